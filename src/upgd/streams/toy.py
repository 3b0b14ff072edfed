"""Regression problems with generated inputs: the toy problems, and the problem for evaluating utility approximations."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from upgd.noise import Purpose, normals, uniforms
from upgd.streams.contract import Chunk, Device, Loss, checked_task_length, described, seed_tensor, step_tensor
from upgd.streams.shuffle import permutations

__all__ = ["ToyChangingInputs", "ToyChangingOutputs", "UtilityQuality"]


class _Toy:
    """Base class: 16 standard normal inputs; the target is ``a`` times the sum of two of them."""

    input_shape: tuple[int, ...] = (16,)
    outputs: int = 1
    loss: Loss = "mse"
    name: str
    __repr__ = described

    def __init__(self, *, amplitude: float = 1.0, task_length: int = 200) -> None:
        if not math.isfinite(amplitude):
            raise ValueError(f"amplitude must be a finite number, such as 1 or 0.5, not {amplitude}")
        self.amplitude = amplitude
        self.task_length = checked_task_length(task_length)

    def chunk(self, seeds: Sequence[int] | Tensor, start: int, length: int, device: Device = "cpu") -> Chunk:
        """Return the samples of ``seeds`` at steps ``start … start + length − 1``."""
        steps = step_tensor(start, length, device)
        inputs = normals(seed_tensor(seeds, device)[:, None], Purpose.INPUTS, steps, self.input_shape[0]).float()
        task = steps // self.task_length
        first, amplitude = self._of_task(task)
        pair = torch.stack((first, first + 1), -1).expand(len(inputs), -1, -1)
        targets = amplitude.unsqueeze(-1) * inputs.gather(2, pair).sum(-1, keepdim=True)
        return Chunk(start=start, targets=targets, dense=inputs, task=task - start // self.task_length)

    def _of_task(self, task: Tensor) -> tuple[Tensor, Tensor]:
        """Return the index of the pair's first input and the signed amplitude of each task."""
        raise NotImplementedError


class ToyChangingInputs(_Toy):
    """Linear regression in which the relevant inputs change.

    ``y = a·(x_i + x_{i+1})`` with 16 standard normal inputs. The pair is {1, 2} in the first task, {3, 4} in the second,
    and so on; {1, 2} follows {15, 16}.

    Args:
        amplitude: ``a``. Default: 1, the sum, as in the paper; the authors' code uses ½, the mean.
        task_length: Number of steps per task. Default: 200.

    Example:
        >>> chunk = ToyChangingInputs().chunk(seeds=[0], start=0, length=3)
        >>> torch.equal(chunk.targets[..., 0], chunk.dense[..., 0] + chunk.dense[..., 1])
        True
    """

    name = "toy-changing-inputs"

    def _of_task(self, task: Tensor) -> tuple[Tensor, Tensor]:
        return 2 * task % self.input_shape[0], torch.full_like(task, self.amplitude, dtype=torch.float32)


class ToyChangingOutputs(_Toy):
    """Linear regression in which the target changes its sign.

    ``y = ±a·(x_1 + x_2)`` with 16 standard normal inputs. The sign is positive in the first task and alternates.

    Args:
        amplitude: ``a``. Default: 1, the sum, as in the paper; the authors' code uses ½, the mean.
        task_length: Number of steps per task. Default: 200.

    Example:
        >>> chunk = ToyChangingOutputs(task_length=200).chunk(seeds=[0], start=200, length=3)
        >>> torch.equal(chunk.targets[..., 0], -(chunk.dense[..., 0] + chunk.dense[..., 1]))
        True
    """

    name = "toy-changing-outputs"

    def _of_task(self, task: Tensor) -> tuple[Tensor, Tensor]:
        return torch.zeros_like(task), self.amplitude * (1 - 2 * (task % 2)).float()


class UtilityQuality:
    """Stationary regression for comparing approximations of utility with the true utility.

    ``y = x_i + x_j`` with 5 inputs from ``U[−½, ½]``. The seed determines the two relevant inputs.

    Args:
        task_length: Window length of learning curves. Default: 100.

    Example:
        >>> UtilityQuality().chunk(seeds=[0, 1], start=0, length=3).inputs().shape
        torch.Size([2, 3, 5])
    """

    name = "utility-quality"
    input_shape: tuple[int, ...] = (5,)
    outputs = 1
    loss: Loss = "mse"
    __repr__ = described

    def __init__(self, *, task_length: int = 100) -> None:
        self.task_length = checked_task_length(task_length)

    def relevant_inputs(self, seeds: Sequence[int] | Tensor, device: Device = "cpu") -> Tensor:
        """Return the indices of the two relevant inputs: ``(len(seeds), 2)``."""
        return permutations(seed_tensor(seeds, device), torch.zeros((), dtype=torch.long), self.input_shape[0])[:, :2]

    def chunk(self, seeds: Sequence[int] | Tensor, start: int, length: int, device: Device = "cpu") -> Chunk:
        """Return the samples of ``seeds`` at steps ``start … start + length − 1``."""
        steps = step_tensor(start, length, device)
        uniform = uniforms(seed_tensor(seeds, device)[:, None], Purpose.INPUTS, steps, self.input_shape[0])
        inputs = (uniform - 0.5).float()
        pair = self.relevant_inputs(seeds, device)[:, None].expand(-1, length, -1)
        targets = inputs.gather(2, pair).sum(-1, keepdim=True)
        task = steps // self.task_length - start // self.task_length
        return Chunk(start=start, targets=targets, dense=inputs, task=task)
