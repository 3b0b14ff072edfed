"""State and parameters with fewer bits: bfloat16, and 8 bits with a scale per block.

A trace with β = 0.999 changes by a thousandth of the new value per step. Rounding to nearest would lose such changes.
Stochastic rounding, to one of the two neighbours with probabilities that make the expectation exact, keeps them on average.
The random numbers are a function of (seed, step, parameter, entry), like the noise, so results do not depend on the number of
processes.

The 8-bit format divides each row of a tensor into blocks of 256 entries with a scale s, the largest magnitude in the block::

    code c in 0 … 254, s ≥ 0      s·sign(c − 127)·(|c − 127| / 127)⁴
    code c in 0 … 255, s < 0      |s|·((c + 1) / 256)⁴                    for blocks without negative entries

The relative resolution is 3% for the largest entries, and the smallest representable magnitude is 10⁻⁹ of the largest. In
blocks without negative entries nothing is rounded to zero, because Adam divides by the average of squares.
"""

import math
from typing import Any

import torch
from torch import Tensor

from upgd import noise
from upgd.optim._phases import utility_dtype
from upgd.optim._sharded import box, local, zeros_per_row

__all__ = ["Stored", "begin", "rounding_of", "stored", "wide_state"]

#: Number of entries that share a scale.
BLOCK = 256
#: Parameters with fewer entries keep 32-bit state, because they hardly need memory.
LEAST = 4096


class Rounding:
    """The random words with which a tensor of one parameter, or some of its rows, is rounded at one step."""

    def __init__(self, keys: Tensor, start: int, row: int, inner: Tensor | None) -> None:
        self._keys, self._start, self._row, self._inner = keys, start, row, inner

    def rows(self, first: int) -> "Rounding":
        return Rounding(self._keys, self._start + first * self._row, self._row, self._inner)

    def words(self, shape: torch.Size) -> Tensor:
        """Return a random 32-bit word for each entry, int32."""
        device = self._keys.device
        if self._inner is None:
            index = torch.arange(self._start, self._start + shape.numel(), device=device)
        else:
            rows = torch.arange(shape[0] if shape else 1, device=device) * self._row + self._start
            index = (rows[:, None] + self._inner).flatten()
        return noise.rounding_words(self._keys, index).view(shape)


def rounding_of(param: Tensor, group: dict[str, Any], step: float | Tensor, number: int, slot: int) -> Rounding:
    """Return the random words for a tensor of a parameter; tensors with different slots are rounded independently."""
    keys = noise.parameter_keys(
        group["seed"],
        step if isinstance(step, Tensor) else int(step),
        number,
        purpose=noise.Purpose.ROUNDING + (slot << 8),
        device=local(param).device,
    )
    shape, offset, size = box(param)
    row = math.prod(shape[1:])
    if size[1:] == shape[1:]:
        return Rounding(keys, offset[0] * row if shape else 0, row, None)
    inner = torch.zeros(1, dtype=torch.int64, device=keys.device)
    for dim in range(1, len(shape)):
        along = torch.arange(offset[dim], offset[dim] + size[dim], device=keys.device) * math.prod(shape[dim + 1 :])
        inner = (inner[:, None] + along).flatten()
    return Rounding(keys, offset[0] * row, row, inner)


class Stored:
    """A tensor stored in bfloat16, or in 8 bits with scales. Slices of rows are of the same type."""

    def __init__(self, data: Tensor, scales: Tensor | None, rounding: Rounding | None, dtype: torch.dtype) -> None:
        self._data, self._scales, self._rounding, self._dtype = data, scales, rounding, dtype

    def __getitem__(self, rows: slice) -> "Stored":
        rounding = None if self._rounding is None else self._rounding.rows(rows.start)
        return Stored(self._data[rows], None if self._scales is None else self._scales[rows], rounding, self._dtype)

    def wide(self) -> Tensor:
        """Return the values in the dtype of the computation."""
        if self._scales is None:
            return self._data.to(self._dtype)
        scale = self._scales[..., None].to(self._dtype)
        # In both cases the value is |s|·x³·|x|, with x = (c − 127) / 127 or (c + 1) / 256.
        positive = scale < 0
        x = _blocks(self._data.to(self._dtype))
        x.add_(torch.where(positive, 1.0, -127.0)).mul_(torch.where(positive, 1 / 256, 1 / 127))
        value = (x * x).mul_(x.abs()).mul_(x).mul_(scale.abs())
        return value.flatten(1)[:, : self._data.shape[1:].numel()].reshape(self._data.shape)

    def keep(self, values: Tensor) -> Tensor:
        """Store values; return them as stored."""
        assert self._rounding is not None
        words = self._rounding.words(values.shape)
        if self._scales is None:
            self._data.copy_(_to_bfloat16(values, words))
            return self.wide()
        blocks = _blocks(values)
        size = blocks.abs().amax(-1)
        positive = (blocks.amin(-1) >= 0) & (size > 0)
        self._scales.copy_(torch.where(positive, -size, size))
        magnitude = blocks.abs()
        part = magnitude.div_(size.clamp(min=torch.finfo(size.dtype).tiny)[..., None]).clamp_(max=1)
        uniform = _blocks(((words >> 8) & 0xFFFFFF).to(part.dtype)).mul_(2.0**-24)
        # Between two levels, take the upper one with the probability that makes the expectation exact.
        levels, shift = torch.where(positive, 256.0, 127.0)[..., None], positive.to(part.dtype)[..., None]
        low = part.sqrt().sqrt_().mul_(levels).sub_(shift).floor_().clamp_(min=0)
        below, above = _fourth_power((low + shift).div_(levels)), _fourth_power((low + (shift + 1)).div_(levels))
        up = uniform.mul_(above.sub_(below)) < part.sub_(below)
        step = low.add_(up)
        code = torch.where(positive[..., None], step.clamp(max=255), blocks.sign().mul_(step.clamp_(max=127)).add_(127))
        self._data.copy_(code.flatten(1)[:, : values.shape[1:].numel()].reshape(values.shape))
        return self.wide()


def _blocks(values: Tensor) -> Tensor:
    """Return a tensor of shape (rows, blocks, 256), in which the last block of each row is padded."""
    rows = values.flatten(1)
    number = -(-rows.shape[1] // BLOCK)
    return torch.nn.functional.pad(rows, (0, number * BLOCK - rows.shape[1])).view(len(rows), number, BLOCK)


def _fourth_power(values: Tensor) -> Tensor:
    return values.square_().square_()  # ten times as fast as a general power


def _to_bfloat16(values: Tensor, words: Tensor) -> Tensor:
    """Round stochastically to one of the two neighbours in bfloat16."""
    exact = values.to(torch.float32)
    bits = exact.view(torch.int32)
    rounded = ((bits + (words & 0xFFFF)) & -0x10000).view(torch.float32)
    return torch.where(exact.isfinite(), rounded, exact).to(torch.bfloat16)


def stored(data: Tensor, scales: Tensor | None, param: Tensor, rounding: Rounding | None) -> Tensor | Stored:
    """Return the local state of a parameter as a step reads and writes it: the tensor itself if it has full precision."""
    if data.dtype == utility_dtype(param):
        return local(data)
    return Stored(local(data), None if scales is None else local(scales), rounding, utility_dtype(param))


def _dtype_of(param: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype in which the state of a parameter is stored."""
    if dtype is None or (dtype == torch.uint8 and (param.numel() < LEAST or param.ndim < 2)):
        return utility_dtype(param)
    return torch.promote_types(dtype, param.dtype) if dtype == torch.float32 else dtype


def begin(state: dict[str, Any], name: str, param: Tensor, dtype: torch.dtype | None) -> None:
    """Create a state of a parameter as zeros in the requested dtype, or convert it if it exists with another dtype."""
    kind, scales = _dtype_of(param, dtype), f"{name}_scale"
    if name in state and state[name].dtype == kind:
        return
    before = wide_state(state, name, param) if name in state else None
    state.pop(scales, None)
    state[name] = torch.zeros_like(param, dtype=kind, memory_format=torch.preserve_format)
    if kind == torch.uint8:
        state[scales] = zeros_per_row(param, -(-math.prod(param.shape[1:]) // BLOCK))
    if before is not None:
        nowhere = Rounding(torch.zeros(4, dtype=torch.int32, device=before.device), 0, 0, None)
        kept = stored(state[name], state.get(scales), param, nowhere)
        kept.keep(before) if isinstance(kept, Stored) else kept.copy_(before)


def wide_state(state: dict[str, Any], name: str, param: Tensor) -> Tensor:
    """Return the local values of a parameter's state in the dtype of the computation."""
    kept = stored(state[name], state.get(f"{name}_scale"), param, None)
    return kept.wide() if isinstance(kept, Stored) else kept
