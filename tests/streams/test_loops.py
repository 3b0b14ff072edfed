"""The iterator and the DataLoader's dataset give the stream's samples, all of them, in order."""

from itertools import islice

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import DataLoader

from upgd.streams import StreamDataset, iterate, make

STREAM = make("input-permuted-digits", task_length=70)


def expected(seed: int, start: int, steps: int) -> tuple[Tensor, Tensor]:
    chunk = STREAM.chunk([seed], start, steps)
    return chunk.inputs()[0], chunk.targets[0]


def together(batches) -> tuple[Tensor, Tensor]:
    inputs, targets = zip(*batches, strict=True)
    return torch.cat(inputs), torch.cat(targets)


def equal(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@settings(max_examples=30)
@given(st.integers(0, 9), st.integers(0, 300), st.integers(1, 1200), st.integers(1, 600))
def test_iterating_gives_the_samples_in_order(seed: int, start: int, steps: int, batch_size: int) -> None:
    batches = list(iterate(STREAM, seed, steps=steps, start=start, batch_size=batch_size))
    assert equal(together(batches), expected(seed, start, steps))
    sizes = [len(y) for _, y in batches]
    assert sizes == [batch_size] * (steps // batch_size) + [steps % batch_size] * (steps % batch_size > 0)


def test_iterating_never_ends_and_batches_own_their_memory() -> None:
    batches = list(islice(iterate(STREAM), 600))
    assert equal(together(batches), expected(0, 0, 600))
    x, y = batches[5]
    assert (x.shape, y.shape) == ((1, 8, 8), (1,))
    assert x.untyped_storage().nbytes() == 64 * 4


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_a_loader_gives_the_samples_in_order_with_any_number_of_workers(workers: int) -> None:
    dataset = StreamDataset(STREAM, 3, steps=1100, start=41, batch_size=32)
    loader = DataLoader(dataset, batch_size=None, num_workers=workers)
    assert len(loader) == len(dataset) == 35
    assert equal(together(loader), expected(3, 41, 1100))


def test_single_samples_come_in_order_too() -> None:
    loader = DataLoader(StreamDataset(STREAM, steps=600), batch_size=None, num_workers=2)
    inputs, targets = zip(*loader, strict=True)
    assert equal((torch.stack(inputs), torch.stack(targets)), expected(0, 0, 600))


def test_a_loader_that_makes_batches_gives_every_sample_once() -> None:
    loader = DataLoader(StreamDataset(STREAM, steps=60), batch_size=10, num_workers=2)
    inputs, targets = expected(0, 0, 60)
    # As documented: batches take turns between the workers, and a worker has every second sample.
    order = torch.tensor([2 * (10 * (b // 2) + i) + b % 2 for b in range(6) for i in range(10)])
    assert sorted(order.tolist()) == list(range(60))
    assert equal(together(loader), (inputs[order], targets[order]))


def test_regression_streams_are_accepted() -> None:
    x, y = next(iter(DataLoader(StreamDataset(make("toy-changing-inputs"), steps=8, batch_size=4), batch_size=None)))
    assert (x.shape, y.shape) == ((4, 16), (4, 1))


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match="batch_size must be at least 1, not 0"):
        iterate(STREAM, batch_size=0)
    with pytest.raises(ValueError, match="start must be at least 0, not -1"):
        StreamDataset(STREAM, start=-1)
    with pytest.raises(TypeError, match="pass steps="):
        len(StreamDataset(STREAM))


@pytest.mark.parametrize("loop", [iterate, StreamDataset])
def test_a_name_is_no_stream(loop):
    with pytest.raises(
        TypeError,
        match=r"stream must be a Stream, such as the result of upgd.streams.make\(name\), not 'stationary-digits'",
    ):
        loop("stationary-digits", steps=1)
