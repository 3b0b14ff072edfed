"""On-chip layout, schedule and compilation, without a GPU."""

import itertools
import re
import shutil

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from upgd.methods import Method, registry
from upgd.methods.units import Reset
from upgd.networks import MLP, ConvNet, Linear
from upgd.population import Learner
from upgd.population.backend import Group, Kind
from upgd.population.choose import choose
from upgd.population.cuda import backend, compiler, planner, unsupported
from upgd.population.cuda.generated import program
from upgd.population.cuda.network import dense_layers
from upgd.population.cuda.planner import CLUSTERS, THREADS, Dense, Program
from upgd.population.cuda.schedule import TELLS, WAITS, schedule
from upgd.population.cuda.source import source
from upgd.population.graphed import GraphedBackend
from upgd.population.shares import Need, laid
from upgd.population.spec import groups

H200 = 232_448
UPGD = Kind("utility", noise="white")
KINDS = [
    Kind("plain"),
    Kind("plain", noise="anticorrelated"),
    UPGD,
    Kind("utility", scaling="local", noise="white"),
]


def group_of(**settings: object) -> Group:
    ((group, _),) = groups([Learner(**settings)], [0])
    return group


class LooksAtIncoming(Method):
    """Resets units whose incoming weights are small."""

    name = "looks-at-incoming"

    def update(self, w, g, h):
        return w - h.lr * g

    def reset_units(self, units):
        return Reset(units.incoming.abs().sum(-1) < 1), {}


#: Rules with generated kernels, and those with hand-written ones.
GENERATED = [
    group_of(method="adamw", lr=0.1),
    group_of(method="upgd", lr=0.1, order=2, scaling="local"),
    group_of(method="upgd", lr=0.1, granularity="feature", order=2, normalize=0.9),
    group_of(method="adaupgd", lr=0.1),
    group_of(method="continual-backprop", lr=0.1, optimizer="adam"),
    group_of(method="self-normalized-resets", lr=0.1),
]
RULES = [*((kind, None) for kind in KINDS), *((group.kind, program(group.method)) for group in GENERATED)]
PAPER = [Dense(784, 300, True, "RELU"), Dense(300, 150, True, "RELU"), Dense(150, 10, True, "IDENTITY")]

#: Networks whose learners fit on one multiprocessor, even with four numbers per weight.
sizes = st.lists(st.integers(1, 90), min_size=2, max_size=6).filter(
    lambda widths: sum(a * b for a, b in itertools.pairwise(widths)) <= 10_000
)


def layers_of(widths: list[int], bias: bool = True) -> list[Dense]:
    return [Dense(a, b, bias, "TANH") for a, b in itertools.pairwise(widths)]


# ---------------------------------------------------------------------------------------------------------- the planner


def covered(plan: planner.ChipPlan) -> np.ndarray:
    """How many tiles have each parameter, found by walking through all CTAs and threads as the kernel does."""
    count = np.zeros(plan.parameters, int)
    for layer in plan.layers:
        for rank in range(plan.cluster):
            first, stop = (planner.first_of(layer.units, layer.grain, r, plan.cluster) for r in (rank, rank + 1))
            for block in layer.blocks:
                for thread in range(THREADS):
                    worker = (thread - block.shift) % THREADS
                    chunk, group = worker % block.chunks, worker // block.chunks
                    if group >= block.groups:
                        continue
                    for pair in range(group, -(-(stop - first) // 2), block.groups):
                        for row, lane in itertools.product((2 * pair, 2 * pair + 1), range(4)):
                            unit, other = first + row, block.first + 4 * chunk + lane
                            if unit < stop and other < layer.lanes:
                                out, into = (other, unit) if layer.turned else (unit, other)
                                count[layer.weight + out * layer.dense.inputs + into] += 1
            if layer.bias >= 0:
                cut = [
                    planner.first_of(layer.dense.outputs, layer.bias_grain, r, plan.cluster) for r in (rank, rank + 1)
                ]
                count[layer.bias + cut[0] : layer.bias + cut[1]] += 1
    return count


@settings(max_examples=40)
@given(widths=sizes, cluster=st.sampled_from(CLUSTERS), bias=st.booleans(), rule=st.sampled_from(RULES))
def test_every_parameter_has_one_place(
    widths: list[int], cluster: int, bias: bool, rule: tuple[Kind, Program | None]
) -> None:
    plan = planner.plan(layers_of(widths, bias), rule[0], cluster, H200, rule[1])
    assert plan is not None
    assert (covered(plan) == 1).all()


def test_the_papers_network_has_one_place_each() -> None:
    plan = planner.plan(PAPER, UPGD, 8, H200)
    assert plan is not None
    assert (covered(plan) == 1).all()


@settings(max_examples=40)
@given(widths=sizes, cluster=st.sampled_from(CLUSTERS), rule=st.sampled_from(RULES))
def test_nothing_overlaps_in_shared_memory(widths: list[int], cluster: int, rule: tuple[Kind, Program | None]) -> None:
    plan = planner.plan(layers_of(widths), rule[0], cluster, H200, rule[1])
    assert plan is not None
    spans = set()  # a buffer that is used twice in a step is there once
    for layer in plan.layers:
        for block in layer.blocks:
            spans.add((block.shared, plan.words * block.shared_floats))
        vector = layer.padded if layer.turned else layer.rows
        vectors = ("D", "H") if layer.number + 1 < len(plan.layers) else ("D",)
        spans |= {(plan.offsets[f"{name}.{layer.number}"], vector) for name in vectors}
        spans.add((plan.offsets[f"BIAS_WORDS.{layer.number}"], plan.words * -(-layer.dense.outputs // cluster)))
        buffers = ("FORWARD", "BACKWARD", "BEND", "NORM", "UNITS_0", "OUTGOING_0")
        for name in (f"{buffer}_BUFFER" for buffer in buffers):
            if f"{name}.{layer.number}" in plan.offsets:
                spans.add((plan.offsets[f"{name}.{layer.number}"], cluster * layer.padded))
        if (resets := rule[1] and rule[1].resets) and layer.number + 1 < len(plan.layers):
            counts = {"UNIT_STATE": len(rule[1].unit_state), "ALL_H": not layer.turned, "OUTGOING": resets.outgoing}
            counts |= {"RANKED": resets.selections, "AMONG": resets.selections, "CHOSEN": 1, "MOVED": 1}
            for name, count in counts.items():
                spans.add((plan.offsets[f"{name}.{layer.number}"], count * layer.dense.outputs))
    joined = [name for name in ("SCALE", "REDUCTION_0", "UNIT_REDUCTION_0") if name in plan.barriers]
    spans |= {(plan.offsets[f"{name}_BUFFER"], plan.barriers[name] // 4) for name in joined}
    over_rows = [layer.padded * max(block.used_groups for block in layer.blocks) for layer in plan.layers[1:]]
    by_rows = [layer.rows * layer.parts for layer in plan.layers]
    spans.add((plan.offsets["PART"], max(*over_rows, sum(by_rows[::2]), *by_rows)))
    spans = sorted(span for span in spans if span[1])
    assert all(a + size <= b for (a, size), (b, _) in itertools.pairwise(spans))
    assert spans[-1][0] + spans[-1][1] <= plan.floats


@pytest.mark.parametrize(
    ("settings", "shared"),
    [
        ({"method": "upgd"}, True),
        ({"method": "adaupgd"}, True),
        ({"method": "continual-backprop"}, True),
        ({"method": "upgd", "scaling": "local"}, False),
        ({"method": "upgd", "order": 2, "scaling": "local"}, False),
        ({"method": "adamw"}, False),
        ({"method": "sgd"}, False),
    ],
    ids=str,
)
def test_both_passes_share_a_buffer_if_another_exchange_follows_the_backward_pass(settings: dict, shared: bool) -> None:
    group = group_of(lr=0.1, **settings)
    plan = planner.plan(PAPER, group.kind, 16, H200, backend._program(group))
    assert plan is not None
    assert (plan.offsets["BACKWARD_BUFFER.2"] == plan.offsets["FORWARD_BUFFER.1"]) == shared


@pytest.mark.parametrize(("hidden", "shared"), [(31, True), (30, False)])
def test_both_passes_share_no_buffer_if_a_block_is_not_heard_of_in_between(hidden: int, shared: bool) -> None:
    group = group_of(lr=0.1, method="continual-backprop")
    plan = planner.plan(dense_layers(MLP((9, hidden, 8, 20))), group.kind, 16, H200, backend._program(group))
    assert plan is not None
    assert (plan.offsets["BACKWARD_BUFFER.2"] == plan.offsets["FORWARD_BUFFER.1"]) == shared


def test_the_papers_network_fits_on_eight_multiprocessors_with_registers_and_not_on_four() -> None:
    plan = planner.plan(PAPER, UPGD, 8, H200)
    assert plan is not None
    assert H200 - 32_768 < plan.shared_bytes <= H200
    assert 0 < 16 * sum(block.held for layer in plan.layers for block in layer.blocks) <= 64
    assert planner.plan(PAPER, UPGD, 4, H200) is None


def test_without_utilities_half_of_the_memory_will_do() -> None:
    with_utilities, without = planner.plan(PAPER, UPGD, 8, H200), planner.plan(PAPER, Kind("plain"), 8, H200)
    assert with_utilities is not None
    assert without is not None
    assert without.shared_bytes < 0.75 * with_utilities.shared_bytes
    assert not any(block.held for layer in without.layers for block in layer.blocks)


def test_the_fastest_plan_serves_most_learners() -> None:
    small = layers_of([16, 300, 150, 1])
    plans = [(plan, 120 // c) for c in CLUSTERS if (plan := planner.plan(small, UPGD, c, H200))]
    best = planner.fastest(plans)
    assert best.cycles / {id(p): n for p, n in plans}[id(best)] == min(p.cycles / n for p, n in plans)
    assert planner.plan(layers_of([5000, 300, 10]), UPGD, 8, H200) is None


# --------------------------------------------------------------------------------------------------------- the schedule


@settings(max_examples=40)
@given(learners=st.integers(1, 60), steps=st.integers(1, 50), clusters=st.integers(1, 40))
@example(learners=29, steps=27, clusters=27)  # 29 / 27 · 27 > 29
def test_every_step_runs_once_in_order_without_deadlock(learners: int, steps: int, clusters: int) -> None:
    pieces = laid([Need(learners, 1.0, clusters)], clusters, steps)[0].pieces
    segments, begins = schedule(learners, steps, pieces)
    assert len(begins) - 1 <= clusters
    longest = max(sum(to - start for _, start, to, _ in segments[a:b]) for a, b in itertools.pairwise(begins))
    assert longest <= max(steps, -(-learners * steps // min(clusters, learners)))

    taken = dict.fromkeys(range(learners), 0)
    told: dict[int, int] = {}
    for cluster, (a, b) in enumerate(itertools.pairwise(begins)):
        for learner, start, to, flags in segments[a:b].tolist():
            assert start < to
            assert start == taken[learner]
            taken[learner] = to
            assert bool(flags & WAITS) == (start > 0)
            assert bool(flags & TELLS) == (to < steps)
            if flags & WAITS:
                assert told[learner] < cluster  # it was that cluster's first work, which waits for no other
            if flags & TELLS:
                assert segments[a].tolist() == [learner, start, to, flags]
                told[learner] = cluster
    assert set(taken.values()) == {steps}


# ----------------------------------------------------------------------------------- supported and unsupported networks


def test_networks_are_read() -> None:
    assert dense_layers(MLP((784, 300, 150, 10))) == PAPER
    assert dense_layers(Linear(5, 2)) == [Dense(5, 2, True, "IDENTITY")]
    own = nn.Sequential(nn.Flatten(), nn.Linear(4, 3, bias=False), nn.LeakyReLU(0.2), nn.Linear(3, 2))
    assert dense_layers(own) == [Dense(4, 3, False, "LEAKY", 0.2), Dense(3, 2, True, "IDENTITY")]
    whole = dense_layers(nn.Sequential(nn.Linear(4, 3), nn.LeakyReLU(1), nn.Linear(3, 2)))
    assert repr(whole[0].slope) == "1.0"  # as C++ wants it
    relu = nn.ReLU()
    shared = nn.Sequential(nn.Linear(4, 3), relu, nn.Linear(3, 5), relu, nn.Linear(5, 2))
    assert dense_layers(shared) == dense_layers(MLP((4, 3, 5, 2)))


@pytest.mark.parametrize(
    ("network", "words"),
    [
        (ConvNet((3, 32, 32), 10), "layer 'layers.0' is a Conv2d"),
        (nn.Sequential(nn.Linear(4, 3), nn.GELU(), nn.Linear(3, 2)), "GELU"),
        (nn.Sequential(nn.Linear(4, 3), nn.ReLU()), "end with a Linear"),
        (nn.Sequential(nn.Linear(4, 4), *[nn.Linear(4, 4)] * 2), "one layer twice"),
    ],
)
def test_other_networks_are_refused_with_a_reason(network: nn.Module, words: str) -> None:
    reason = dense_layers(network)
    assert isinstance(reason, str)
    assert words in reason


def test_layers_know_whether_they_have_gates() -> None:
    layers = dense_layers(MLP((4, 3, 5, 2)), "hidden")
    assert [layer.gated for layer in layers] == [True, True, False]


def test_the_cpu_is_refused() -> None:
    reason = unsupported(MLP((4, 3, 2)), GENERATED[0], torch.device("cpu"), torch.float32)
    assert reason is not None
    assert "CUDA" in reason


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"method": "looks-at-incoming"}, r"looks-at-incoming: it uses units\.incoming"),
        ({"method": "upgd", "scaling": "local", "profile": "authors"}, r"its rule uses \.sum of a tensor"),
    ],
)
def test_rules_that_cannot_become_kernels_are_refused(settings: dict, words: str, monkeypatch) -> None:
    monkeypatch.setattr(registry, "_REGISTERED", registry._REGISTERED | {LooksAtIncoming.name: LooksAtIncoming})
    reason = unsupported(MLP((4, 3, 2)), group_of(lr=0.1, **settings), torch.device("cuda"), torch.float32)
    assert reason is not None
    assert re.search(words, reason)


def test_long_operations_on_one_state_are_computed_once_where_its_values_are_equal() -> None:
    text = program(group_of(method="continual-backprop", lr=0.1, optimizer="adam").method).text
    first, rest = text.split("struct OfState")[1].split("INLINE void update(Entry& e")
    assert "ALIKE = 2;" in text
    assert (first.count("complement("), rest.split("else update")[0].count("complement(")) == (2, 0)
    assert "ALIKE = -1;" in program(group_of(method="adamw", lr=0.1).method).text


@pytest.mark.parametrize(("method", "words", "cluster"), [("adamw", 3, 8), ("adaupgd", 4, 8), ("s-rwalk", 5, 16)])
def test_what_has_no_room_on_chip_is_in_global_memory(method: str, words: int, cluster: int) -> None:
    group = group_of(method=method, lr=0.1, **({"kappa": 1.0} if method == "s-rwalk" else {}))
    plan = planner.plan(PAPER, group.kind, cluster, H200, program(group.method))
    assert plan is not None
    assert plan.words == words
    assert 0 < 4 * plan.far_floats <= planner._FAR_BYTES[cluster]
    assert (covered(plan) == 1).all()
    assert planner.plan(PAPER, group.kind, cluster // 2, H200, program(group.method)) is None


def test_the_last_noise_and_the_moments_of_the_inputs_are_in_global_memory() -> None:
    weights = sum(dense.inputs * dense.outputs for dense in PAPER)
    twice, normalized = UPGD._replace(noise="anticorrelated"), UPGD._replace(normalize=True)
    for kind, floats in ((UPGD, 0), (twice, weights / 8), (normalized, 2 * 784)):
        plan = planner.plan(PAPER, kind, 8, H200)
        assert plan is not None
        assert floats <= plan.far_floats <= 1.05 * floats


# ---------------------------------------------------------------------------------------------------------- compilation


def test_settings_are_those_of_the_rule() -> None:
    learner = Learner(method="upgd-nonprotecting", lr=0.1, sigma=0.2, beta_utility=0.9, weight_decay=0.5, seed=2**40)
    (group, _), *_ = groups([learner], [7])
    settings = backend._settings(group)[0]
    assert settings["lr_c"] == np.float32(0.1)
    assert settings["decay"] == pytest.approx(0.05)
    assert settings["noise"] == pytest.approx(2 * np.log(2) * 0.02**2)
    assert (settings["beta"], settings["p"], settings["q"]) == (np.float32(0.9), 0, 1)
    assert settings["rest"] == pytest.approx(0.1)
    assert (settings["row"], settings["seed"]) == (7, 2**40)


def test_structures_have_the_fields_of_the_kernel_in_order() -> None:
    """Python and CUDA must agree on the layout of what is passed."""
    text = backend.parts()["basics.cuh"]
    settings = re.search(r"struct Settings \{(.*?)\};", text).group(1)
    assert re.findall(r"\w+(?=[,;])", settings) == list(backend._SETTINGS.names)
    arguments = re.sub(r"//.*", "", re.search(r"struct Arguments \{(.*?)\};", text, re.DOTALL).group(1))
    assert re.findall(r"(\w+)(?=[,;])", arguments) == [name for name, _ in backend._Arguments._fields_]


@pytest.mark.parametrize(("kind", "made"), RULES)
@pytest.mark.parametrize("cluster", [1, 16])
def test_constants_are_written_for_every_layer(kind: Kind, made: Program | None, cluster: int) -> None:
    plan = planner.plan(PAPER if cluster == 16 else layers_of([5, 7, 3]), kind, cluster, H200, made)
    assert plan is not None
    text = source(plan, "cross_entropy", True, backend.parts())
    assert text.endswith(backend.parts()["onchip.cu"])
    assert len(re.findall(r"template <> struct Layer<", text)) == len(plan.layers)
    assert f"RULE = {kind.rule.upper() if made is None else 'GENERATED'}" in text
    assert f"PARAMETERS = {plan.parameters}," in text
    assert text.count("{") == text.count("}")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.parametrize(("kind", "made"), RULES)
@pytest.mark.parametrize("widths", [[784, 300, 150, 10], [5, 7, 3], [9, 4], [33, 21, 18, 7, 9, 4]])
def test_it_compiles(kind: Kind, made: Program | None, widths: list[int]) -> None:
    plan = planner.plan(layers_of(widths), kind, 16 if widths[0] == 784 else 1, H200, made)
    assert plan is not None
    assert len(compiler._by_nvcc(source(plan, "cross_entropy", True, backend.parts()), "sm_90")) > 1000


def test_a_compiled_kernel_is_kept(tmp_path, monkeypatch) -> None:
    calls = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(compiler, "_nvrtc", lambda: None)
    monkeypatch.setattr(compiler, "_version", lambda: None)
    monkeypatch.setattr(compiler, "_by_nvcc", lambda source, architecture: calls.append(source) or b"code")
    for _ in range(2):
        assert compiler.compiled("text", "sm_90") == b"code"
    assert compiler.compiled("other", "sm_90") == b"code"
    assert calls == ["text", "other"]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    (tmp_path / "file").write_text("no folder")
    assert compiler.compiled("text", "sm_90") == b"code"  # it also works without a cache


def test_networks_that_do_not_fit_on_chip_use_graphs_and_log_the_reason(caplog, monkeypatch) -> None:
    network, cuda = MLP((4, 3, 2)), torch.device("cuda")
    monkeypatch.setattr(registry, "_REGISTERED", registry._REGISTERED | {LooksAtIncoming.name: LooksAtIncoming})
    group = group_of(method=LooksAtIncoming.name, lr=0.1)
    with caplog.at_level("INFO", "upgd.population"):
        assert choose("auto", network, group, cuda, torch.float32) == ("torch", GraphedBackend)
    assert len(caplog.records) == 1
    assert "it uses units.incoming" in caplog.text
    with pytest.raises(
        ValueError, match="backend='kernel' cannot be used, because no kernel can be generated for looks-at-incoming"
    ):
        choose("kernel", network, group, cuda, torch.float32)
