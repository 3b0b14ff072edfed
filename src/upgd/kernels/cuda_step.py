"""One step of an optimizer on a GPU: at most two launches per part, and one for the maximum over all parts.

``triton_source.py`` prints the kernels, and ``cuda_layout.py`` contains the memory that they use.
"""

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from upgd.kernels.cuda_layout import Common, Laid, capturing, starts_of
from upgd.kernels.steps import Part, Reductions

__all__ = ["CudaStep"]


class CudaStep:
    """Runs the steps of one optimizer on one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._laid: dict[int, Laid] = {}
        self._common: Common | None = None
        #: Whether a step has been captured in a graph; replays of the graph also count steps.
        self._is_captured = False

    def step(
        self,
        parts: Sequence[Part],
        reductions: Reductions,
        seed: int,
        *,
        grad_scale: Tensor | None = None,
        found_inf: Tensor | None = None,
        everywhere: Callable[[Tensor], Tensor] | None = None,
        across: Callable[[Tensor], None] | None = None,
        across_units: Callable[[int, Tensor], Tensor] | None = None,
        changed: Sequence[tuple[int, int]] | None = None,
    ) -> None:
        """Take one step; see :meth:`upgd.kernels.steps.Engine.step`.

        Args:
            parts, reductions, seed, grad_scale, found_inf, everywhere: see there.
            across: for shards, if all reductions are maxima over the learner; reduces the maxima of the local shards to those
                of the whole parameters, in place; integers of shape (reductions, parameters) with the order of the values.
            across_units: for shards, if all reductions are norms of units; returns the sums over all processes of the squared
                norms of a part's split units, given the index of the part.
            changed: if all tensors have been observed, those that have changed since then, by part and index.
        """
        common = self._shared_by(parts, reductions, seed)
        common.scale(grad_scale, found_inf)
        starts = starts_of([len(part.params) if part.rule.reductions else 0 for part in parts])
        laid = [self._lay(n, part, common, start) for n, (part, start) in enumerate(zip(parts, starts, strict=True))]
        for number, place in changed or ():
            laid[number].observe(only=place, prepare=False)
        observing = [one for one in laid if one.part.rule.reductions]
        for one in laid:
            if not one.part.rule.reductions:
                one.prepare()
            elif changed is None:
                one.observe()
            else:
                one.prepare_observed()
        if observing:
            common.conclude(observing, everywhere, across)
        if across_units is not None:
            for number, one in enumerate(laid):
                if one.part.rule.reductions and one.part.split:
                    one.sum_split_units(functools.partial(across_units, number))
        for one in laid:
            one.update()

    def observe(self, part: Part, number: int, place: int, grad: Tensor) -> bool:
        """Observe a tensor of a part of the last step again, with a new gradient; return whether that is possible."""
        known = self._laid.get(number)
        if known is None or known.part is not part or self._is_captured or capturing(self._device):
            return False
        known.common.scale(None, None)
        known.move(place, grad)
        known.observe(only=place, prepare=False)
        return True

    def _shared_by(self, parts: Sequence[Part], reductions: Reductions, seed: int) -> Common:
        tensors = sum(len(part.params) for part in parts if part.rule.reductions)
        entries = sum(param.numel() for part in parts if part.rule.reductions for param in part.params)
        key = tensors, entries, reductions, seed
        if capturing(self._device):
            self._is_captured = True
            return Common(self._device, *key)
        if self._common is None or self._common.key != key:
            self._common = Common(self._device, *key)
            self._laid.clear()
        return self._common

    def _lay(self, number: int, part: Part, common: Common, start: int) -> Laid:
        if capturing(self._device):
            return Laid(part, common, start)
        known = self._laid.get(number)
        if known is None or not known.takes(part, start):
            if known is not None and known.observed:
                common.forget()
            known = self._laid[number] = Laid(part, common, start)
        else:
            known.refresh(part)
        if self._is_captured:
            known.is_primed = False
        return known
