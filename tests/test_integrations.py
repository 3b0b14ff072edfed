"""The programs of docs/integrations.md run with the libraries that they name.

The libraries are not needed for development; ``pip install -e '.[integrations]'`` installs them.
"""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import upgd

PAGE = Path(__file__).parents[1] / "docs" / "integrations.md"
SECTIONS = dict(re.findall(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", PAGE.read_text(encoding="utf-8"), re.S | re.M))
LIBRARIES = {
    "Lightning": "lightning",
    "Accelerate": "accelerate",
    "transformers.Trainer": "transformers",
    "Avalanche": "avalanche",
    "Optuna": "optuna",
    "TensorBoard": "tensorboard",
    "Weights & Biases": "wandb",
    "MLflow": "mlflow",
}
#: Checks after the last line of a program.
OUTCOMES = {
    "Lightning": "{'dormant_share/network.2', 'weight_l2'} <= set(trainer.logged_metrics)",
    "Accelerate": "all((state['step'] == 2_000).all() for state in optimizer.optimizer.state.values())",
    "transformers.Trainer": "isinstance(trainer.optimizer.optimizer, upgd.AdaUPGD)",
    "Avalanche": "strategy.clock.train_iterations == sum(-(-len(labels) // 10) for _, labels in tasks)",
    "Optuna": "len(upgd.open('optuna.db')) == 30",
    "TensorBoard": "list(Path('runs/upgd').glob('events.out.tfevents.*'))",
    "Weights & Biases": "len(list(Path('wandb').glob('offline-run-*'))) == 3",
    "MLflow": "sorted(len(run.data.metrics) for run in mlflow.search_runs(output_format='list')) == [1, 1, 9]",
}
CHECK = "from pathlib import Path\nimport upgd\n"


def test_every_section_is_run():
    assert set(SECTIONS) == set(LIBRARIES) == set(OUTCOMES)


@pytest.mark.slow
@pytest.mark.parametrize("section", LIBRARIES)
def test_the_program_runs(section, tmp_path):
    if importlib.util.find_spec(LIBRARIES[section]) is None:
        pytest.skip(f"{LIBRARIES[section]} is not installed; pip install -e '.[integrations]'")
    if section == "Avalanche":
        pytest.importorskip("torchvision", reason="torchvision does not work with this torch", exc_type=Exception)
    program = "\n".join(re.findall(r"^```python\n(.*?)^```$", SECTIONS[section], re.S | re.M))
    (tmp_path / "program.py").write_text(f"{program}\n{CHECK}assert {OUTCOMES[section]}\n", encoding="utf-8")
    kept = os.environ.get("PYTHONPATH")
    source = str(Path(upgd.__file__).parents[1])
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, (source, kept))),
        "HF_HUB_OFFLINE": "1",
        "WANDB_SILENT": "true",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "HOME": str(tmp_path),
    }
    done = subprocess.run([sys.executable, "program.py"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3_000:]
