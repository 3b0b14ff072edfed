"""The memory of an optimizer's steps on a GPU, and the launches that use it.

A table on the device holds the addresses of the tensors, so gradients may move. It is rewritten if they have moved, and
within every captured graph, so that each graph has its own addresses. Nothing synchronizes with the GPU.
"""

import itertools
import struct
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from upgd.kernels.steps import Part, Reductions
from upgd.kernels.triton_reductions import atomic, combines
from upgd.kernels.triton_shared import Narrow, early_names_of, names_of, widths
from upgd.kernels.triton_source import kernels, kernels_for_writing
from upgd.kernels.triton_text import CODED, NOTHING, ROWS, WRITTEN_AT_ONCE

__all__ = ["Common", "Laid", "capturing", "starts_of"]

#: Number of entries per block, and of warps per block; likewise for rows, which may be shorter or longer.
_BLOCK, _WARPS = 2048, 8
_ROW_BLOCK, _ROW_WARPS = 1024, 4
_GRADIENT = ROWS.index("gradient")


class Common:
    """Buffers that all parts of a step share."""

    def __init__(self, device: torch.device, tensors: int, entries: int, reductions: Reductions, seed: int) -> None:
        self.key = tensors, entries, reductions, seed
        self.device, self.tensors, self.entries, self.reductions = device, tensors, entries, reductions
        count = max(1, len(reductions))
        self.slots = torch.full((count, max(1, tensors)), NOTHING, dtype=torch.int32, device=device)
        self.layers = torch.empty(count * max(1, tensors), dtype=torch.float64, device=device)
        self.learner = torch.zeros(count, dtype=torch.float32, device=device)
        self.seed = torch.empty(1, dtype=torch.int64, device=device)
        _send(self.seed, [seed - 2**64 if seed >= 2**63 else seed])
        self.grad_scale, self.found_inf = torch.ones((), device=device), torch.zeros((), device=device)
        self.amp = False
        self._one, self._zero = self.grad_scale, self.found_inf

    def scale(self, grad_scale: Tensor | None, found_inf: Tensor | None) -> None:
        """Set the values of a gradient scaler for the next launches."""
        self.amp = grad_scale is not None or found_inf is not None
        self.grad_scale = self._one if grad_scale is None else grad_scale.to(torch.float32)
        self.found_inf = self._zero if found_inf is None else found_inf.to(torch.float32)

    def forget(self) -> None:
        """Reset all maxima."""
        self.slots.fill_(NOTHING)

    def conclude(
        self,
        observing: "list[Laid]",
        everywhere: Callable[[Tensor], Tensor] | None,
        across: Callable[[Tensor], None] | None,
    ) -> None:
        """Reduce what has been observed; see :meth:`upgd.kernels.cuda_step.CudaStep.step`."""
        for one in observing:
            if combines(one.part.rule):
                one.combine()
            one.observed.clear()
        if across is not None:
            across(self.slots)
        if any(over == "learner" for _, _, over in self.reductions):
            observing[0].kernels.conclude[(1,)](
                self.tensors, float(self.entries), self.slots, self.layers, self.learner, BLOCK=1024
            )
            if everywhere is not None:
                self.learner.copy_(everywhere(self.learner))


class _Division:
    """The division of a part's tensors into rows, and into blocks; the lists have one number per tensor."""

    def __init__(self, part: Part) -> None:
        self.sizes = [param.numel() for param in part.params]
        self.rows = [param.shape[0] if param.ndim > 1 else 1 for param in part.params]
        self.starts = part.starts or [0] * len(part.params)
        columns = [size // max(1, number) for size, number in zip(self.sizes, self.rows, strict=True)]
        self.row_lengths = columns if part.scales else []  #: if the states have 8 bits
        #: Whether a shard, or a row if the states have 8 bits, may begin with the second normal of a pair.
        self.odd = part.noise > 0 and any(first % 2 for first in (*self.starts, *self.row_lengths))
        if part.scales:
            self.blocks = [
                -(-number * -(-size // CODED) // (_BLOCK // CODED))
                for number, size in zip(self.rows, columns, strict=True)
            ]
        else:
            self.blocks = [
                -(-(size + (first % 2 if self.odd else 0)) // _BLOCK)
                for size, first in zip(self.sizes, self.starts, strict=True)
            ]

    def table(self, part: Part) -> list[list[int]]:
        """Return the rows of the table (see :data:`upgd.kernels.triton_text.ROWS`)."""
        nothing = [0] * len(part.params)
        rows = {
            "parameter": _addresses(part.params),
            "gradient": _addresses(part.grads),
            "curvature": _addresses(part.curvatures) or nothing,
            "step": _addresses(part.steps) or nothing,
            "number": part.numbers,
            "start": self.starts,
            "entries": self.sizes,
            "rows": self.rows,
            "first_block": starts_of(self.blocks),
            "blocks": self.blocks,
            "first_row": starts_of(self.rows),
        }
        return [rows[name] for name in ROWS] + [_addresses(tensors) for tensors in (*part.states, *part.scales)]


class Laid:
    """A part of a step, laid out for the kernels."""

    def __init__(self, part: Part, common: Common, start: int) -> None:
        self.part, self.common = part, common
        self.offset = start  #: the index of the first tensor among all that are reduced
        self.kernels = kernels(part.rule, part.noise, part.slots, bool(part.scales))
        self.by_unit = any(over == "unit" for _, over in part.rule.reductions)
        self.signature = self._signature(part)
        self.division = _Division(part)
        self.blocks = sum(self.division.blocks)
        #: The number of pieces of each tensor: ``observe`` iterates over rows or blocks.
        self.piece_counts = self.division.rows if self.by_unit else self.division.blocks
        self.piece_starts = starts_of(self.piece_counts)
        self.pieces = sum(self.piece_counts)
        device, count = common.device, len(part.params)
        table = self.division.table(part)
        self.table = torch.empty(len(table), count, dtype=torch.int64, device=device)
        _send(self.table, [number for row in table for number in row])
        self.tensor_of_block = self._tensor_of("blocks", self.blocks)
        self.tensor_of_piece = self._tensor_of("rows", self.pieces) if self.by_unit else self.tensor_of_block
        width = widths(Narrow(part.rule, part.noise, part.slots, bool(part.scales)))
        self.names, self.early_names = names_of(part.rule), set(early_names_of(part.rule))
        self.h = torch.empty(max(1, len(self.names)), dtype=torch.float64, device=device)
        self.k = torch.empty(count * width.scalars, dtype=torch.float32, device=device)
        self.keys = torch.empty(count * width.keys, dtype=torch.int32, device=device)
        #: Inputs of ``observe`` in two halves: one to read, one to write for the next step; ``turn`` is the one to read.
        self.early = torch.empty(2 * count * width.early, dtype=torch.float32, device=device)
        self.early_keys = torch.empty(2 * count * width.early_keys, dtype=torch.int32, device=device)
        self.turn = torch.zeros(1, dtype=torch.int32, device=device)
        self.partial = torch.empty(max(1, len(part.rule.reductions)) * self.pieces, dtype=torch.float32, device=device)
        self.moving = self._moving(part)
        self.types = self._types()
        self.slots, self.layers = common.slots.view(-1)[self.offset :], common.layers[self.offset :]
        #: The indices of the tensors that have been observed since the last call of ``conclude``.
        self.observed: set[int] = set()
        self.is_primed = False
        self.values: dict[str, float] = {}
        self.lr: Tensor | None = None
        self.versions = -1
        self._send_values()

    def _tensor_of(self, what: str, count: int) -> Tensor:
        """Return the index of the tensor of each block or row."""
        numbers = torch.arange(len(self.part.params), dtype=torch.int32, device=self.common.device)
        return torch.repeat_interleave(numbers, self.table[ROWS.index(what)], output_size=count)

    @staticmethod
    def _signature(part: Part) -> tuple[Any, ...]:
        addresses = tuple(_addresses(itertools.chain(part.params, *part.states, *part.scales)))
        steps = tuple(_addresses(part.steps))
        shapes = tuple(param.shape for param in part.params)
        places = tuple(part.numbers), tuple(part.starts), part.slots
        return addresses, part.rule, part.noise, steps, shapes, places, bool(part.curvatures)

    @staticmethod
    def _moving(part: Part) -> list[int]:
        return _addresses([*part.grads, *part.curvatures])

    def takes(self, part: Part, start: int) -> bool:
        """Return whether this is the same part, apart from gradients, curvature and settings."""
        return self.offset == start and (part is self.part or self.signature == self._signature(part))

    def refresh(self, part: Part) -> None:
        """Update gradients, curvature and settings."""
        self.part = part
        moving = self._moving(part)
        if moving != self.moving:
            self.moving = moving
            self.types = self._types()
            _send(self.table[_GRADIENT : _GRADIENT + len(moving) // len(part.params)], moving)
        self._send_values()

    def _send_values(self) -> None:
        lr = self.part.values.get("lr")
        self.lr = lr if isinstance(lr, Tensor) and lr.device == self.common.device and "lr" in self.names else None
        values = {
            name: 0.0 if name == "lr" and self.lr is not None else float(self.part.values[name]) for name in self.names
        }
        changed = {name for name, value in values.items() if self.values.get(name) != value}
        if changed:
            self.values = values
            self.is_primed = self.is_primed and changed.isdisjoint(self.early_names)
            bits = [struct.unpack("<q", struct.pack("<d", value))[0] for value in values.values()]
            _send(self.h.view(torch.int64)[: len(bits)], bits)
        # Detect step counts that were modified elsewhere.
        versions = sum(step._version for step in self.part.steps)
        if versions != self.versions or (self.lr is not None and "lr" in self.early_names):
            self.versions, self.is_primed = versions, False

    def move(self, place: int, grad: Tensor) -> None:
        """Update the gradient of one tensor."""
        if self.moving[place] != grad.data_ptr():
            self.moving[place] = grad.data_ptr()
            self.types = self._types()
            _send(self.table[_GRADIENT, place : place + 1], [grad.data_ptr()])

    # ------------------------------------------------------------------------------------------------------- launches

    def _preparing(self) -> dict[str, Any]:
        """Return the arguments that ``prepare`` and ``observe`` share."""
        common = self.common
        return {
            "h": self.h,
            "lr": self.h if self.lr is None else self.lr,
            "k": self.k,
            "keys": self.keys,
            "early": self.early,
            "early_keys": self.early_keys,
            "turn": self.turn,
            "seed": common.seed,
            "found_inf": common.found_inf,
            "LR": self.lr is not None,
            "AMP": common.amp,
        }

    def prepare(self, *, count: bool = True) -> None:
        """Prepare the next ``observe``; if ``count``, also count the step and prepare ``update``."""
        number = len(self.part.params)
        self.kernels.prepare[(number,)](self.table, number, **self._preparing(), COUNT=count, num_warps=1)

    def prime(self) -> None:
        """Prepare the first ``observe``, or one after settings changed; every other one is prepared by its predecessor."""
        if not self.is_primed:
            self.prepare(count=False)
            self.is_primed = True

    def observe(self, *, only: int | None = None, prepare: bool = True) -> None:
        """Observe all tensors, or only one; if ``prepare``, also count the step and prepare ``update``."""
        self.prime()
        places = range(len(self.part.params)) if only is None else (only,)
        if atomic(self.part.rule) and not self.observed.isdisjoint(places):  # a maximum can only grow, so reset it
            for n in range(len(self.part.rule.reductions)):
                self.common.slots[n, self.offset + places[0] : self.offset + places[-1] + 1].fill_(NOTHING)
        if only is not None:
            self.observed.add(only)
        first, pieces = (0, self.pieces) if only is None else (self.piece_starts[only], self.piece_counts[only])
        self._observe(first, pieces, prepare)

    def prepare_observed(self) -> None:
        """Count the step and prepare ``update``, after all tensors have been observed."""
        self._observe(0, 0, True)

    def _observe(self, first: int, pieces: int, prepare: bool) -> None:
        common, count = self.common, len(self.part.params)
        preparing = count if prepare else 0
        self.kernels.observe[(preparing + pieces,)](
            self.table,
            count,
            common.tensors,
            self.pieces,
            first,
            preparing,
            self.tensor_of_piece,
            **self._preparing(),
            slots=self.slots,
            partial=self.partial,
            grad_scale=common.grad_scale,
            sign=self.part.sign,
            **self.types,
            BLOCK=_ROW_BLOCK if self.by_unit else _BLOCK,
            num_warps=_ROW_WARPS if self.by_unit else _WARPS,
        )

    def combine(self) -> None:
        common, count = self.common, len(self.part.params)
        self.kernels.combine[(count,)](
            self.table, count, common.tensors, self.pieces, self.partial, self.layers, BLOCK=1024
        )

    def sum_split_units(self, summed: Callable[[Tensor], Tensor]) -> None:
        """Complete the norms of units that are split across processes, which sum their squares with ``summed``."""
        norms = self.partial.view(len(self.part.rule.reductions), -1)
        for n in range(len(norms)):
            squares = summed(torch.stack([norms[n, self.piece_starts[place]] for place in self.part.split]).square())
            for place, square in zip(self.part.split, squares, strict=True):
                norms[n, self.piece_starts[place]].copy_(square.sqrt())

    def update(self) -> None:
        if not self.blocks:  # all shards are empty
            return
        common, count = self.common, len(self.part.params)
        self.kernels.update[(self.blocks,)](
            self.table,
            count,
            common.tensors,
            self.pieces,
            self.tensor_of_block,
            self.k,
            self.keys,
            self.turn,
            self.partial,
            self.layers,
            common.learner,
            common.grad_scale,
            common.found_inf,
            self.part.sign,
            **self.types,
            AMP=common.amp,
            ODD=self.division.odd,
            BLOCK=_BLOCK,
            num_warps=_WARPS,
        )

    def _types(self) -> dict[str, Any]:
        import triton.language as tl

        kinds = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
        return {
            "WT": kinds[self.part.params[0].dtype],
            "GT": kinds[self.part.grads[0].dtype],
            "ALIGNED": not any(
                number % 16 for number in (*self.signature[0], *self.moving, *self.division.row_lengths)
            ),
            "SHARDED": any(self.division.starts),
        }


def _addresses(tensors: Iterable[Tensor]) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]


def starts_of(counts: list[int]) -> list[int]:
    """Return the sum of all counts before each one."""
    return [0, *itertools.accumulate(counts)][:-1]


def capturing(device: torch.device) -> bool:
    """Return whether launches are captured in a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _send(out: Tensor, numbers: list[int]) -> None:
    """Copy numbers to the device without synchronizing."""
    if not capturing(out.device):
        out.view(-1).copy_(torch.tensor(numbers, dtype=torch.int64), non_blocking=True)
        return
    write = kernels_for_writing().write
    for start in range(0, len(numbers), WRITTEN_AT_ONCE):
        some = numbers[start : start + WRITTEN_AT_ONCE]
        write[(1,)](out, start, len(some), *some, *[0] * (WRITTEN_AT_ONCE - len(some)), num_warps=1)
