"""The noise of a step in groups with a seed."""

from collections.abc import Sequence

import torch
from torch import Tensor

from upgd import noise
from upgd.optim._phases import utility_dtype
from upgd.optim._sharded import is_sharded, seeded_noise

__all__ = ["SeededNoise", "seeded"]


def seeded(param: Tensor, seed: int, step: float | Tensor, number: int, kind: str) -> Tensor:
    """Return the noise ξ of the local part of a parameter."""
    drawn = seeded_noise(param, seed, step, number)
    if kind == "anticorrelated":
        # ζ₀ = 0, and other draws before this one are computed again.
        if isinstance(step, Tensor):
            return drawn - seeded_noise(param, seed, step - 1, number) * (step > 1)
        if step > 1:
            drawn = noise.anticorrelated(drawn, seeded_noise(param, seed, step - 1, number))
    return drawn


class SeededNoise:
    """Draws the noise of parameters by their index, as :func:`seeded` does.

    Each draw takes dozens of operations, so consecutive small parameters are drawn together. Only the last ones are kept, so
    access them in order.

    Args:
        params: the parameters.
        seed, kind: of their group.
        steps: the step of each.
        numbers: the index of each among all parameters of the optimizer.
    """

    #: The largest number of entries of a small parameter, and of all that are drawn together.
    _SMALL, _TOGETHER = 1 << 13, 1 << 16

    def __init__(
        self, params: Sequence[Tensor], seed: int, steps: Sequence[float | Tensor], numbers: Sequence[int], kind: str
    ) -> None:
        self._params, self._seed, self._steps, self._numbers, self._kind = params, seed, steps, numbers, kind
        self._drawn: dict[int, Tensor] = {}

    def __call__(self, index: int) -> Tensor:
        if index not in self._drawn:
            self._drawn.clear()  # free the memory first
            together = self._from(index)
            self._drawn = self._draw(together) if len(together) > 1 else {index: self._alone(index)}
        return self._drawn[index]

    def _alone(self, index: int) -> Tensor:
        return seeded(self._params[index], self._seed, self._steps[index], self._numbers[index], self._kind)

    def _from(self, first: int) -> range:
        """Return the indices of the parameters to draw together with this one."""
        entries, stop, like = 0, first, self._params[first]
        for param, step in zip(self._params[first:], self._steps[first:], strict=True):
            entries += param.numel()
            same = (param.device, utility_dtype(param)) == (like.device, utility_dtype(like))
            # A count on the device is for graphs, into which no numbers can be copied, and for the compiler, which fuses.
            if not same or isinstance(step, Tensor) or is_sharded(param):
                break
            if param.numel() > self._SMALL or entries > self._TOGETHER:
                break
            stop += 1
        return range(first, max(stop, first + 1))

    def _draw(self, indices: range) -> dict[int, Tensor]:
        params, steps = [self._params[i] for i in indices], [int(self._steps[i]) for i in indices]
        counts, numbers, like = [param.numel() for param in params], [self._numbers[i] for i in indices], params[0]

        def white(steps: Sequence[int]) -> list[Tensor]:
            keys = noise.parameter_keys(self._seed, torch.tensor(steps), torch.tensor(numbers)).to(like.device)
            drawn = noise.parameter_normals_together(keys, counts, dtype=utility_dtype(like))
            return [own.view(param.shape) for own, param in zip(drawn, params, strict=True)]

        drawn = white(steps)
        if self._kind == "anticorrelated":
            before = zip(drawn, white([step - 1 for step in steps]), steps, strict=True)
            drawn = [now - last if step > 1 else now for now, last, step in before]
        return dict(zip(indices, drawn, strict=True))
