"""The kernel backend: learners are rows of arrays, each advanced through a block of samples by one thread."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor, nn

from upgd.population.backend import Group, Kind, Loss, Tally, finite_learners
from upgd.population.kernel import generated
from upgd.population.kernel.layout import Recipe, Samples, scratch
from upgd.population.kernel.learner import address_of, advance, learn
from upgd.population.kernel.network import chain, plan
from upgd.population.kernel.sample import backward_with, forward_with
from upgd.population.kernel.updates import adamw_step, unit_wise_step, weight_wise_step
from upgd.streams.contract import Chunk

__all__ = ["BY_HAND", "KernelBackend", "by_hand", "unsupported"]

#: The rules with hand-written kernels; the feature-wise variant of ``utility`` uses that of ``plain``.
BY_HAND = {"plain": unit_wise_step, "utility": weight_wise_step, "adamw": adamw_step}
_NOISES = {"none": 0, "white": 1, "anticorrelated": 2}
#: The kernels' name of each setting, and its value for methods without it.
_NAMES = {"beta": "beta_utility"}
_OTHERWISE = {"c": 1.0}


def by_hand(kind: Kind) -> bool:
    """Return whether there is a hand-written kernel for the kind. For features, hidden layers are all layers with gates."""
    everywhere = ("all", "hidden") if kind.granularity == "feature" else ("all",)
    return kind.rule in BY_HAND and kind.gated in everywhere and not kind.others


def unsupported(network: nn.Module, group: Group, device: torch.device, dtype: torch.dtype) -> str | None:
    """Return the reason why no kernel can run this, worded to follow "because"; ``None`` if one can."""
    if device.type != "cpu":
        return f"it runs on the CPU, not on {device}"
    if dtype != torch.float32:
        return f"it computes in torch.float32, not in {dtype}"
    links = chain(network)
    if isinstance(links, str):
        return links
    if by_hand(group.kind):
        return None
    if hasattr(group.method, "reset_units") and any(isinstance(module, nn.Conv2d) for module in network.modules()):
        return f"{group.method.name} resets hidden units, which kernels support only without convolutions"
    return generated.unsupported(group.method)


class KernelBackend:
    """See :class:`upgd.population.backend.Backend`.

    Learners are distributed over ``torch.get_num_threads()`` threads. Each learner is computed by one thread in a fixed
    order, so its results are independent of the number of threads and of other learners.
    """

    fills_device = True

    def __init__(
        self,
        network: nn.Module,
        group: Group,
        parameters: Mapping[str, Tensor],
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._begin(network, group, device, dtype)
        self._recipes = np.array([_recipe(group, i) for i in range(len(group))])
        utility = group.kind.rule == "utility"
        weight_wise, feature_wise = (
            utility and group.kind.granularity == "weight",
            utility and group.kind.granularity == "feature",
        )
        adamw = group.kind.rule == "adamw"
        learners, count = len(group), self._plan.parameter_count
        #: Utility, or AdamW's first moment; empty if the rule does not use it.
        self._trace = torch.zeros(learners, count if weight_wise or adamw else 0)
        self._second_moment = torch.zeros(learners, count if adamw else 0)
        self._features = torch.zeros(learners, self._plan.units)
        self._keeps_extremes = group.kind[:3] == ("utility", "weight", "global")
        self._extremes = torch.zeros(learners, 2, self._plan.rows)
        if adamw:
            self._state["first_moment"] = self._named(self._trace)
            self._state["second_moment"] = self._named(self._second_moment)
        elif weight_wise:
            self._state["utility"] = self._named(self._trace)
        elif feature_wise:
            self._state["utility"] = self._named_features()
        for name, values in parameters.items():
            self._state["parameters"][name].copy_(values)

    def _begin(self, network: nn.Module, group: Group, device: torch.device, dtype: torch.dtype) -> None:
        """Set what all methods have in common."""
        if reason := unsupported(network, group, device, dtype):
            raise ValueError(f"the kernel backend cannot run this, because {reason}")
        self._plan, self._kind = plan(network), group.kind
        self._rows, self._seeds = group.rows.tolist(), group.seeds.tolist()
        self._rates = group.value("normalize").tolist()
        self._keeps_extremes = False
        self._parameters = torch.zeros(len(group), self._plan.parameter_count)
        self._state: dict[str, dict[str, Tensor]] = {"parameters": self._named(self._parameters)}
        #: Running means and variances of the inputs, one per unit before the first layer's outputs.
        self._normalizer = torch.zeros(len(group), 2, self._plan.layers[0].outputs if group.kind.normalize else 0)
        self._normalizer[:, 1] = 1

    def _name_normalizer(self, shape: torch.Size) -> None:
        """Name the running means and variances once the shape of a sample is known."""
        if self._kind.normalize and "normalizer" not in self._state:
            mean, variance = (part.view(len(part), *shape) for part in self._normalizer.unbind(1))
            self._state["normalizer"] = {"mean": mean, "variance": variance}

    def advance(self, chunk: Chunk, loss: Loss, tally: Tally) -> None:
        """Learn from every sample of the chunk, in order, and update the tally."""
        images = chunk.dense[0] if chunk.dense is not None else chunk.source
        assert images is not None
        self._name_normalizer(images.shape[1:])
        alive = [i for i, step in enumerate(tally.diverged_at.tolist()) if step < 0]
        threads = min(torch.get_num_threads(), len(alive))
        self._compile()  # not in several threads at once
        if threads <= 1:
            for i in alive:
                self._advance(i, chunk, loss, tally)
            return
        with ThreadPoolExecutor(threads) as pool:
            # Consume the results, so that an exception in any thread is raised here.
            list(pool.map(lambda i: self._advance(i, chunk, loss, tally), alive))

    def parameters(self) -> dict[str, Tensor]:
        """Return the learners' current parameters."""
        return dict(self._state["parameters"])

    def finite(self) -> Tensor:
        """Return whether all parameters of each learner are finite."""
        return finite_learners(*self.parameters().values())

    def state(self) -> dict[str, Tensor]:
        """Return everything needed to resume; the names are those of the interface."""
        return {f"{part}.{name}": t.clone() for part, named in self._state.items() for name, t in named.items()}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Resume from the result of :meth:`state`."""
        if "normalizer.mean" in state:
            self._name_normalizer(state["normalizer.mean"].shape[1:])
        for part, named in self._state.items():
            for name, tensor in named.items():
                tensor.copy_(state[f"{part}.{name}"])
        if self._keeps_extremes:
            self._find_extremes()

    def _compile(self) -> None:
        """Compile the kernels, or load them from the cache."""
        convolutions = any(layer.kernel for layer in self._plan.layers)
        passes = forward_with(convolutions), backward_with(convolutions, self._second_order())
        self._functions = *map(address_of, passes), self._step()
        address_of(learn)

    def _second_order(self) -> bool:
        return self._kind.order == 2

    def _step(self) -> int:
        """Return the address of the function that changes the parameters."""
        return address_of(unit_wise_step if self._kind.granularity == "feature" else BY_HAND[self._kind.rule])

    def _advance(self, i: int, chunk: Chunk, loss: Loss, tally: Tally) -> None:
        own = (
            self._recipes[i].ctypes.data,
            self._trace[i].data_ptr(),
            self._second_moment[i].data_ptr(),
            self._features[i].data_ptr(),
            *(part.data_ptr() for part in self._extremes[i]),
        )
        self._learn(i, chunk, loss, tally, own)

    def _learn(self, i: int, chunk: Chunk, loss: Loss, tally: Tally, own: tuple[int, ...]) -> None:
        """Call the kernels; ``own`` are the entries of the job that only the rule of this method uses."""
        p = self._plan
        longest = max(max(layer.rows, layer.columns) for layer in p.layers)
        floats, bytes_ = scratch(p.units, p.rows, longest, p.workspace), np.zeros(p.rows, np.uint8)
        samples, rate = _samples(chunk, self._rows[i], loss), np.array(self._rates[i])
        job = np.array(
            [
                *(p.table.ctypes.data, p.slopes.ctypes.data, len(p.layers), p.units, p.rows, longest),
                *(floats.ctypes.data, bytes_.ctypes.data, self._parameters[i].data_ptr()),
                *(_NOISES[self._kind.noise], self._seeds[i]),
                *(array.ctypes.data if array.size else 0 for array in samples),
                *(chunk.length, chunk.start),
                *(rate.ctypes.data, self._normalizer[i].data_ptr() if self._kind.normalize else 0),
                *(tally.loss[i].data_ptr(), tally.correct[i].data_ptr()),
                *self._functions,
                *(0, 0, 0, 0),
                *own,
            ],
            np.int64,
        )
        tally.diverged_at[i] = advance(job)

    def _named(self, values: Tensor) -> dict[str, Tensor]:
        """Return views of all parameters' values by name."""
        return {
            name: values[:, begin : begin + int(np.prod(shape))].view(len(values), *shape)
            for name, (begin, shape) in self._plan.parameters.items()
        }

    def _named_features(self) -> dict[str, Tensor]:
        hidden = zip(self._plan.weights[:-1], self._plan.layers[:-1], strict=True)
        return {name: self._features[:, layer.outputs : layer.outputs + layer.rows] for name, layer in hidden}

    def _find_extremes(self) -> None:
        """Compute the largest and smallest utility of every row, which the kernels otherwise keep up to date."""
        largest, smallest = self._extremes.unbind(1)
        for rows, columns, weight, bias, row, *_ in self._plan.layers:
            of_rows = self._trace[:, weight : weight + rows * columns].view(-1, rows, columns)
            smallest[:, row : row + rows], largest[:, row : row + rows] = of_rows.aminmax(dim=2)
            if bias >= 0:
                smallest[:, row + rows], largest[:, row + rows] = self._trace[:, bias : bias + rows].aminmax(dim=1)


def _recipe(group: Group, i: int) -> Recipe:
    kind = group.kind
    settings = {
        name: float(group.value(_NAMES.get(name, name), _OTHERWISE.get(name, 0.0))[i]) for name in Recipe._fields[3:]
    }
    return Recipe(
        feature_wise=kind.granularity == "feature",
        local=kind.scaling == "local",
        second_order=kind.order == 2,
        **settings,
    )


def _samples(chunk: Chunk, row: int, loss: Loss) -> Samples:
    """Return the samples for this row of the chunk."""
    dense, values = np.zeros((0, 0), np.float32), np.zeros((0, 0), np.float32)
    source, permutation = np.zeros((0, 0), np.uint8), np.zeros((0, 0), np.int64)
    index = classes = np.zeros(0, np.int64)
    if chunk.dense is not None:
        dense = np.ascontiguousarray(chunk.dense[row].flatten(1).numpy())
    else:
        assert chunk.source is not None
        assert chunk.index is not None
        source = np.ascontiguousarray(chunk.source.flatten(1).numpy())
        index = np.ascontiguousarray(chunk.index[row].numpy())
        if chunk.permutation is not None:
            permutation = np.ascontiguousarray(chunk.permutation[row].numpy())
    if loss == "mse":
        values = np.ascontiguousarray(chunk.targets[row].numpy())
    else:
        classes = np.ascontiguousarray(chunk.targets[row].numpy())
    white = np.float32(chunk.white)
    scaled = (2 * np.arange(256, dtype=np.float32) - white) / white
    task = np.ascontiguousarray(chunk.task.numpy())
    return Samples(dense, source, index, permutation, task, scaled, classes, values)
