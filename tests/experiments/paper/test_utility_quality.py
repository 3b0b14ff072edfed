"""The utility-quality study: its batched computation against the library, and its report."""

import pytest
import torch
from torch import nn

from upgd import utility
from upgd.experiments.paper import _utility_page, utility_quality
from upgd.experiments.paper._batched_utility import ACTIVATIONS, Pass, initial_layers
from upgd.networks import MLP
from upgd.streams import make
from upgd.utility.ranks import centred_ranks

SEEDS = (3, 11, 4)


def single(layers, which, sizes, activation):
    """One of the batched networks as a module."""
    model = MLP(sizes, activation).double()
    with torch.no_grad():
        linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
        for linear, layer in zip(linears, layers, strict=True):
            linear.weight.copy_(layer[which, :, :-1])
            linear.bias.copy_(layer[which, :, -1])
    return model


def in_layers(utilities, of):
    """The library's dict in the order of the batched computation: each row of weights with its bias."""
    tensors = list(utilities.values())
    if of == "features":
        return tensors
    return [
        torch.cat((weight, bias.unsqueeze(1)), 1).flatten()
        for weight, bias in zip(tensors[::2], tensors[1::2], strict=True)
    ]


@pytest.mark.parametrize("of", ["weights", "features"])
@pytest.mark.parametrize("sizes", [(5, 7, 1), (5, 6, 4, 2)])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_batched_utilities_are_those_of_single_networks(activation, sizes, of):
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(len(SEEDS), n, generator=generator, dtype=torch.float64) for n in (sizes[0], sizes[-1]))
    layers = initial_layers(sizes, SEEDS)
    step = Pass(layers, x, y, activation)
    batched = step.of_weights() if of == "weights" else step.of_features()
    truth = utility.true_weights if of == "weights" else utility.true_features
    library = {
        "true": lambda *a: truth(*a),
        "first order": lambda *a: utility.first_order(*a, of=of),
        "second order": lambda *a: utility.second_order(*a, of=of),
        "magnitude": lambda *a: utility.magnitude(*a, of=of),
        "squared gradient": lambda *a: utility.squared_gradient(*a, of=of),
    }
    assert batched.keys() == library.keys()
    for which in range(len(SEEDS)):
        sample = single(layers, which, sizes, activation), nn.MSELoss(), x[which : which + 1], y[which : which + 1]
        for measure, function in library.items():
            for ours, expected in zip(batched[measure], in_layers(function(*sample), of), strict=True):
                torch.testing.assert_close(ours[which], expected, rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_learning_is_sgd(activation):
    """A few steps of the batch equal steps of torch's SGD on the network of that seed."""
    sizes, lr = (5, 6, 4, 1), 0.1
    chunk = make("utility-quality").chunk(SEEDS, 0, 4)
    layers = initial_layers(sizes, SEEDS)
    models = [MLP(sizes, activation, seed=seed).double() for seed in SEEDS]
    for offset in range(4):
        x, y = chunk.inputs()[:, offset].double(), chunk.targets[:, offset].double()
        step = Pass(layers, x, y, activation)
        for which, model in enumerate(models):
            optimizer = torch.optim.SGD(model.parameters(), lr=lr)
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x[which]), y[which])
            loss.backward()
            optimizer.step()
            assert step.loss()[which].item() == pytest.approx(loss.item(), rel=1e-12)
        layers = step.descend(lr)
    for which, model in enumerate(models):
        expected = single(layers, which, sizes, activation)
        torch.testing.assert_close(dict(model.named_parameters()), dict(expected.named_parameters()))


@pytest.mark.parametrize(("wise", "of"), [("weight", "weights"), ("feature", "features")])
def test_curves_are_the_correlations_at_each_step(wise, of):
    result = utility_quality.run(wise, activations=["tanh"], seeds=SEEDS, steps=3)
    sizes = (5, 50, 1) if wise == "weight" else (5, 50, 50, 1)
    chunk = make("utility-quality").chunk(SEEDS, 0, 3)
    model = MLP(sizes, "tanh", seed=SEEDS[1]).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=result.lr)
    truth = utility.true_weights if wise == "weight" else utility.true_features
    for step in range(3):
        sample = nn.MSELoss(), chunk.inputs()[1, step : step + 1].double(), chunk.targets[1, step : step + 1].double()
        for measure, function in (("first order", utility.first_order), ("second order", utility.second_order)):
            for scope in utility_quality.SCOPES:
                expected = utility.correlation(
                    function(model, *sample, of=of), truth(model, *sample), scope=scope, of=of
                )
                curve = result.curves["tanh"][scope][measure]
                assert curve[1, step].item() == pytest.approx(expected.item(), abs=1e-9)
        optimizer.zero_grad()
        loss = sample[0](model(sample[1]), sample[2])
        assert result.losses["tanh"][1, step].item() == pytest.approx(loss.item(), rel=1e-9)
        loss.backward()
        optimizer.step()


def test_a_run_does_not_depend_on_its_neighbours_or_on_chunks(monkeypatch):
    together = utility_quality.run("feature", activations=["relu"], seeds=[0, 5], steps=6)
    monkeypatch.setattr(utility_quality, "_CHUNK", 4)
    alone = utility_quality.run("feature", activations=["relu"], seeds=[5], steps=6)
    for scope in utility_quality.SCOPES:
        for measure in utility_quality.MEASURES:
            a, b = together.curves["relu"][scope][measure][1], alone.curves["relu"][scope][measure][0]
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_argsort_is_not_the_ranks():
    """Of (2, 3, 1) argsort gives (2, 0, 1), of (1, 3, 2) it gives (0, 2, 1): their correlation is −1, that of the ranks ½."""
    found = {
        name: utility_quality._correlations(
            {"true": [true], "first order": [torch.tensor([[[2.0, 3.0, 1.0]]])]}, ["first order"], ranks
        )["global"]["first order"].item()
        for name, true, ranks in (
            ("ranks", torch.tensor([[[1.0, 3.0, 2.0]]]), centred_ranks),
            ("argsort", torch.tensor([[[1.0, 3.0, 2.0]]]), utility_quality._centred_places),
        )
    }
    assert found == pytest.approx({"ranks": 0.5, "argsort": -1.0})
    result = utility_quality.run("feature", activations=["relu"], seeds=range(2), steps=20)
    assert result.by_argsort["relu"]["global"].keys() == {"second order", "first order"}
    assert result.mean_by_argsort("relu", "global", "second order") < result.summary()["relu"]["global"]["second order"]


def test_the_table_and_the_comparison():
    curves = {
        m: torch.full((2, 10), v) for m, v in zip(utility_quality.MEASURES, (0.9, 0.5, 0.2, 0.0, 0.1), strict=True)
    }
    curves["first order"] = torch.tensor([[0.5] * 10, [0.95] * 5 + [0.15] * 5])
    losses = {"relu": torch.zeros(2, 10)}
    result = utility_quality.UtilityQuality(
        "weight", (0, 1), 10, 0.01, {"relu": {"global": curves, "local": curves}}, losses, {}
    )
    assert result.table().splitlines()[2] == (
        "| ReLU | global | 0.900 ± 0.000 | 0.525 ± 0.025 | 0.200 ± 0.000 | 0.000 ± 0.000 | 0.100 ± 0.000 |"
    )
    assert "| 0.325 ± 0.175 |" in result.table(last=5)
    assert result.wins("relu", "global", "first order", "magnitude") == 2
    assert result.wins("relu", "global", "first order", "magnitude", last=5) == 1


def test_the_page_is_written_from_the_numbers(tmp_path):
    _utility_page.main(["--out", str(tmp_path), "--steps", "30", "--seeds", "2"])
    page = (tmp_path / "utility-quality.md").read_text()
    result = utility_quality.run("weight", seeds=range(2), steps=30)
    assert result.table() in page
    for wise in ("weights", "features"):
        assert f"(utility-quality-{wise}.svg)" in page
        assert (tmp_path / f"utility-quality-{wise}.png").stat().st_size > 10_000
        assert "<svg" in (tmp_path / f"utility-quality-{wise}.svg").read_text()
    assert "second order > first order, over all steps: holds in" in page
    assert (
        f"- Command: `python -m upgd.experiments.paper.utility_quality --out {tmp_path} --steps 30 --seeds 2`" in page
    )
    assert "the seeds 0 to 1" in page


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"granularity": "weights"}, "granularity must be 'weight' or 'feature', not 'weights'"),
        ({"activations": ["gelu"]}, "not 'gelu'"),
        ({"steps": 0}, "at least 1, not 0"),
        ({"seeds": []}, "at least 1"),
    ],
)
def test_mistakes_are_explained(arguments, says):
    with pytest.raises(ValueError, match=says):
        utility_quality.run(**arguments)
