"""Chunks of third-party streams: an invalid chunk gives the same one-sentence error with every backend;
unusual but valid chunks are accepted."""

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from upgd.networks import MLP
from upgd.noise import Purpose, words
from upgd.population import Diagnostics, Learner, Population
from upgd.population.graphed import GraphedBackend
from upgd.streams import Chunk, make
from upgd.streams.contract import checked_chunk

Tensors = dict[str, Any]
BACKENDS = ("torch", "graphed", "kernel")
KINDS = ("classes", "regression", "images", "permuted images")
LEARNERS = [Learner(method="upgd", lr=0.01, sigma=0.1, seed=seed) for seed in (3, 5)]
SEEDS, STEPS, IMAGES = 2, 20, 50


@dataclass
class Own:
    """A third-party stream. ``change`` modifies its valid tensors."""

    kind: str
    change: Callable[[Tensors], Tensors] = dict
    name: str = "own"
    input_shape: tuple[int, ...] = (2, 3)
    outputs: int = 4
    task_length: int = 7

    @property
    def loss(self) -> str:
        return "mse" if self.kind == "regression" else "cross_entropy"

    def chunk(self, seeds, start, length, device="cpu") -> Chunk:
        return Chunk(start=start, **self.change(self.tensors(torch.as_tensor(seeds)[:, None], start, length)))

    def tensors(self, seeds: Tensor, start: int, length: int) -> Tensors:
        steps = torch.arange(start, start + length)
        task = steps // self.task_length - start // self.task_length
        drawn = words(seeds, Purpose.TASK, steps, 12)
        made: Tensors = {"targets": drawn[..., 0] % self.outputs, "task": task}
        if self.kind == "regression":
            made["targets"] = (drawn[..., :4] % 9 - 4) / 4  # 16 bits are enough for these
        if "images" not in self.kind:
            made["dense"] = ((drawn[..., 4:10] % 9 - 4) / 4).unflatten(-1, self.input_shape)
            return made
        made["source"] = (words(0, Purpose.INPUTS, torch.arange(IMAGES), 6) >> 24).to(torch.uint8).view(-1, 2, 3)
        made["index"] = drawn[..., 10] % IMAGES
        if self.kind == "permuted images":
            made["permutation"] = words(seeds, Purpose.SAMPLE_ORDER, torch.arange(int(task[-1]) + 1), 6).argsort(-1)
        return made


@functools.cache
def fields(kind: str) -> Tensors:
    return Own(kind).tensors(torch.zeros(SEEDS, 1, dtype=torch.long), 0, STEPS)


def population(backend: str) -> Population:
    with pytest.MonkeyPatch.context() as patch:
        if backend == "graphed":
            patch.setattr("upgd.population.choose._torch", lambda device: GraphedBackend)
        return Population(MLP((6, 5, 4)), LEARNERS, backend="kernel" if backend == "kernel" else "torch")


@functools.cache
def untouched(backend: str) -> Population:
    """Return a population that is never trained."""
    return population(backend)


def ends(kind: str) -> dict[str, int]:
    """Return the ends of the ranges of a kind's integers."""
    found = {} if kind == "regression" else {"targets": 4}
    found |= {"index": IMAGES} if "images" in kind else {}
    return found | ({"permutation": 6, "task": 3} if kind == "permuted images" else {})


# ------------------------------------------------------------------------------------------------------- invalid chunks


@st.composite
def spoiled(draw) -> tuple[Own, str, str]:
    """Return a stream, its invalid field, and the kind of the error: "type", "shape" or "range"."""
    kind = draw(st.sampled_from(KINDS))
    field = draw(st.sampled_from(sorted(fields(kind))))
    flaws = {"type": wrong_types, "shape": wrong_shapes} | ({"range": wrong_values} if field in ends(kind) else {})
    flaw = draw(st.sampled_from(sorted(flaws)))
    spoil = draw(flaws[flaw](kind, field))
    return Own(kind, lambda tensors: {**tensors, field: spoil(tensors[field])}), field, flaw


def wrong_types(kind: str, field: str) -> st.SearchStrategy:
    right = fields(kind)[field].dtype
    types = [torch.float64, torch.bool, torch.complex64]
    types += [torch.float32, torch.float16] if right != torch.float32 else [torch.int64, torch.uint8]
    types += [torch.int64, torch.int8] if right == torch.uint8 else []
    return st.sampled_from(types).map(lambda dtype: lambda tensor: tensor.to(dtype))


def wrong_shapes(kind: str, field: str) -> st.SearchStrategy:
    rank = fields(kind)[field].ndim
    free = {"source": 0, "permutation": 1}.get(field)  # a data set may have more images, a chunk rows for more tasks
    fixed = [dim for dim in range(rank) if dim != free]
    longer = [lambda tensor, dim=dim: torch.cat((tensor, tensor.narrow(dim, 0, 1)), dim) for dim in fixed]
    shorter = [lambda tensor, dim=dim: tensor.narrow(dim, 1, tensor.shape[dim] - 1) for dim in fixed]
    fewer = [lambda tensor, dim=dim: tensor.select(dim, 0) for dim in range(rank)]
    more = [lambda tensor, dim=dim: tensor.unsqueeze(dim) for dim in range(rank + 1)]
    none = [] if free is None else [lambda tensor: tensor.narrow(free, 0, 0)]
    return st.sampled_from(longer + shorter + fewer + more + none)


def wrong_values(kind: str, field: str) -> st.SearchStrategy:
    end = ends(kind)[field]
    values = st.integers(-(2**63), -1) | st.integers(end, 2**63 - 1) | st.sampled_from([-1, end])

    def at(where: float, value: int) -> Callable[[Tensor], Tensor]:
        def spoil(tensor: Tensor) -> Tensor:
            flat = tensor.flatten().clone()
            flat[int(where * (len(flat) - 1))] = value
            return flat.view(tensor.shape)

        return spoil

    return st.builds(at, st.floats(0, 1), values)


@settings(max_examples=300)
@given(spoiled())
def test_invalid_chunks_are_reported_before_a_backend_reads_them(case):
    stream, field, flaw = case
    words = {"type": "be torch.", "shape": "have the shape (", "range": "be from 0 to "}[flaw]
    sentence = rf"^{field} of own must {re.escape(words)}.*, not .*[^.]$"
    told = set()
    for backend in BACKENDS:
        with pytest.raises(TypeError if flaw == "type" else ValueError, match=sentence) as raised:
            untouched(backend).run(stream, STEPS)
        told.add(str(raised.value))
    assert len(told) == 1


def changed(kind: str, **tensors: Any) -> Own:
    return Own(kind, lambda right: {**right, **tensors})


@pytest.mark.parametrize(
    ("stream", "sentence"),
    [
        (
            Own("classes", lambda t: {**t, "targets": t["targets"] + 1}),
            "targets of own must be from 0 to 3, not 4, because there are 4 outputs",
        ),
        (
            Own("images", lambda t: {**t, "index": t["index"] + (t["index"] == 49)}),
            "index of own must be from 0 to 49, not 50, because there are 50 images",
        ),
        (
            Own("classes", lambda t: {**t, "dense": t["dense"].double()}),
            "dense of own must be torch.float32, not torch.float64; convert it with .to(torch.float32)",
        ),
        (
            Own("images", lambda t: {**t, "source": t["source"].flatten(1)}),
            "source of own must have the shape (images, 2, 3), not (50, 6)",
        ),
        (
            Own("permuted images", lambda t: {**t, "task": t["task"].flip(0)}),
            "task of own must be ascending, but it decreases by 1 in a chunk",
        ),
        (
            Own("classes", lambda t: {"targets": t["targets"][0], "dense": t["dense"]}),
            "targets of own must have the shape (2, 20), not (20,)",
        ),
        (
            changed("classes", targets=torch.zeros(2, 20, device="meta", dtype=torch.long)),
            "targets of own must be on cpu",
        ),
        (changed("classes", dense=[0.5]), "dense of a Chunk must be a tensor, not a list"),
        (changed("images", permutation=None, index=None), "a Chunk needs either dense, or source and index"),
        (changed("images", source=None), "with an optional permutation; not index"),
        (changed("classes", index=torch.zeros(2, 20, dtype=torch.long)), "not dense, index"),
        (changed("classes", permutation=torch.zeros(2, 1, 6, dtype=torch.long)), "not dense, permutation"),
    ],
)
def test_sentences(stream, sentence):
    for backend in BACKENDS:
        with pytest.raises((TypeError, ValueError), match=re.escape(sentence)):
            untouched(backend).run(stream, STEPS)


@pytest.mark.parametrize(
    ("method", "sentence"),
    [
        (lambda *_: "a chunk", "chunk() of own must return an upgd.streams.Chunk, not a str"),
        (
            lambda *_: Own("classes").chunk([3, 5], 1, STEPS),
            "start of own must be 0, the requested step, not 1",
        ),
    ],
)
def test_chunks_other_than_requested_are_refused(method, sentence):
    stream = Own("classes")
    stream.chunk = method
    for backend in BACKENDS:
        with pytest.raises((TypeError, ValueError), match=re.escape(sentence)):
            untouched(backend).run(stream, STEPS)


def test_an_unknown_loss_is_refused():
    class Hinge(Own):
        loss = "hinge"

    for backend in BACKENDS:
        with pytest.raises(ValueError, match="loss of own must be 'cross_entropy' or 'mse', not 'hinge'"):
            untouched(backend).run(Hinge("classes"), STEPS)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_population_survives_a_bad_chunk(backend):
    """Earlier steps have been taken; the population can be saved, or continue with a corrected stream."""

    def bad_later(tensors: Tensors) -> Tensors:
        return tensors if len(tensors["task"]) == 64 else {**tensors, "targets": tensors["targets"] + 4}

    crowd = population(backend)
    with pytest.raises(ValueError, match="targets of own must be from 0 to 3"):
        crowd.run(Own("classes", bad_later), 100)
    assert crowd.step == 64
    crowd.run(Own("classes"), 36)
    alone = population(backend)
    alone.run(Own("classes"), 100)
    assert_same_bits(crowd, alone)


# --------------------------------------------------------------------------------------------- unusual but valid chunks


@st.composite
def unusual(draw) -> Own:
    """Narrower types, strided and expanded tensors, tensors that require a gradient."""
    kind = draw(st.sampled_from(KINDS))
    ways = {}
    for field, right in fields(kind).items():
        integers, floats = [torch.uint8, torch.int8, torch.int16, torch.int32], [torch.float16, torch.bfloat16]
        narrower = {torch.int64: integers, torch.float32: floats, torch.uint8: []}[right.dtype]
        dtype = draw(st.sampled_from([right.dtype, *narrower]))
        ways[field] = (dtype, draw(st.booleans()), draw(st.booleans()) and dtype.is_floating_point)

    def change(tensors: Tensors) -> Tensors:
        return {field: told(tensors[field], *ways[field]) for field in tensors}

    return Own(kind, change)


def told(tensor: Tensor, dtype: torch.dtype, gaps: bool, history: bool) -> Tensor:
    tensor = tensor.to(dtype)
    tensor = torch.stack((tensor, tensor), -1)[..., 0] if gaps else tensor
    return tensor.requires_grad_().view_as(tensor) if history else tensor


def assert_same_bits(one: Population, other: Population) -> None:
    mine, its = one.state(), other.state()
    assert mine.keys() == its.keys()
    for name, tensor in mine.items():
        assert torch.equal(tensor.nan_to_num(), its[name].nan_to_num()), name


@functools.cache
def usual(backend: str, kind: str) -> Population:
    """Without validation: the stream's chunk is passed to the backend unchanged."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("upgd.population.blocks.checked_chunk", lambda stream, *asked: stream.chunk(*asked))
        crowd = population(backend)
        crowd.run(Own(kind), STEPS)
    return crowd


@settings(max_examples=30)
@given(unusual())
def test_unusual_chunks_give_bitwise_equal_results(stream):
    for backend in BACKENDS:
        crowd = population(backend)
        crowd.run(stream, STEPS)
        assert_same_bits(crowd, usual(backend, stream.kind))


@pytest.mark.parametrize("backend", BACKENDS)
def test_diagnostics_accept_unusual_chunks(backend):
    stream = Own("classes", lambda t: {**t, "targets": t["targets"].int(), "dense": t["dense"].half()})
    found, right = (
        population(backend).run(s, STEPS, diagnostics=Diagnostics(every=5)).diagnostics
        for s in (stream, Own("classes"))
    )
    assert found.keys() == right.keys()
    for name, figures in right.items():
        torch.testing.assert_close(torch.from_numpy(found[name]), torch.from_numpy(figures), equal_nan=True)


@pytest.mark.parametrize("name", ["input-permuted-digits", "output-permuted-digits", "toy-changing-inputs"])
def test_valid_tensors_are_not_copied(name):
    """In particular not the data set: a GPU would copy it again and rebuild its graphs."""
    stream = make(name)
    given = []

    class Watching(type(stream)):
        def chunk(self, *asked):
            given.append(super().chunk(*asked))
            return given[-1]

    stream.__class__ = Watching
    chunk = checked_chunk(stream, [0, 1], 990, 30)
    for field in ("targets", "dense", "source", "index", "permutation", "task"):
        assert getattr(chunk, field) is getattr(given[0], field), field


def test_targets_may_come_from_a_network():
    """A teacher network, which needs no gradients."""
    teacher = nn.Sequential(nn.Flatten(-2), nn.Linear(6, 4))
    stream = Own("regression", lambda t: {**t, "targets": teacher(t["dense"])})
    for backend in BACKENDS:
        assert population(backend).run(stream, STEPS).loss.min() > 0
