"""The on-chip memory layout of a learner whose network starts with convolutions; pure arithmetic, without a GPU. The terms
are those of ``convolution.cu``."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

from torch import nn

from upgd.population import network as net
from upgd.population.backend import Kind
from upgd.population.cuda.places import Memory, Turns
from upgd.population.cuda.planner import Program
from upgd.population.torch_backend import gated_parameters

__all__ = ["CLUSTERS", "THREADS", "LayerPlan", "Stage", "StagePlan", "plan", "stages"]

THREADS = 640  #: five warps for each of the four schedulers; 96 registers for each thread
CLUSTERS = (1, 2, 3, 4, 5, 6, 7, 8)
#: Floats for partial sums (the first value that fits); numbers of input channels and of sums that a thread holds at once.
_SCRATCH = (5120, 4096, 3072, 2048)
_CHANNELS = 8
_SUMS = 8
#: Maximum number of exchanges, each of which a thread tracks with one bit, and maximum number of bytes per exchange.
_BARRIERS = 32
_BYTES = 1 << 20

_ACTIVATIONS = {"relu": "RELU", "leaky_relu": "LEAKY", "tanh": "TANH", "identity": "IDENTITY"}

Pair = tuple[int, int]


class Stage(NamedTuple):
    """A convolution or a Linear layer, and the pooling and activation after it."""

    outputs: int  #: units; channels of a convolution
    bias: bool
    channels: int  #: input channels; for a Linear layer, all inputs
    sides: Pair = (1, 1)  #: height and width of the inputs
    kernel: Pair | None = None  #: None for a Linear layer
    stride: Pair = (1, 1)
    padding: Pair = (0, 0)
    pool: Pair = (1, 1)
    pool_stride: Pair = (1, 1)
    activation: str = "IDENTITY"
    slope: float = 0.0  #: for LEAKY
    gated: bool = True  #: whether the layer has gates

    @property
    def taps(self) -> int:
        return 1 if self.kernel is None else self.kernel[0] * self.kernel[1]

    @property
    def inputs(self) -> int:
        """The number of incoming weights of a unit."""
        return self.channels * self.taps

    @property
    def windows(self) -> Pair:
        """The height and width of a unit's output."""
        if self.kernel is None:
            return (1, 1)
        return _positions(_positions(self.sides, self.kernel, self.stride, self.padding), self.pool, self.pool_stride)

    @property
    def values(self) -> int:
        return self.windows[0] * self.windows[1]

    @property
    def parameters(self) -> int:
        return self.outputs * (self.inputs + self.bias)


def _positions(sides: Pair, size: Pair, stride: Pair, padding: Pair = (0, 0)) -> Pair:
    down, across = ((sides[i] + 2 * padding[i] - size[i]) // stride[i] + 1 for i in range(2))
    return down, across


def stages(network: nn.Module, gated: str = "all") -> list[Stage] | str:
    """Return the stages in order; or why the network is not supported, worded to follow "because".

    Args:
        network: the network.
        gated: the layers with gates; see :func:`upgd.population.torch_backend.gated_parameters`.
    """
    try:
        chain = net.read(network)
    except net.NotAChain as reason:
        return str(reason)
    if chain.image is None:
        return "it supports convolutions if the network is a ConvNet, which knows the shape of its images"
    found: list[Stage] = []
    with_gates = gated_parameters(network, gated)
    shape = chain.image
    pooled = active = True  # the first layer must be a convolution
    for layer in chain.layers:
        if isinstance(layer, net.Convolution) and layer.dilation == (1, 1):
            geometry = layer.kernel_size, layer.stride, layer.padding
            stage = Stage(layer.outputs, layer.bias is not None, layer.inputs, shape[1:], *geometry)
            found.append(stage._replace(gated=layer.weight in with_gates))
            pooled = active = False
        elif isinstance(layer, net.Dense):
            found.append(Stage(layer.outputs, layer.bias is not None, layer.inputs, gated=layer.weight in with_gates))
            pooled, active = True, False
        elif isinstance(layer, net.MaxPool) and not pooled and _is_plain(layer):
            found[-1] = found[-1]._replace(pool=layer.kernel_size, pool_stride=layer.stride)
            pooled = True
        elif isinstance(layer, net.Activation) and not active and (layer.kind != "leaky_relu" or layer.slope > 0):
            slope = layer.slope if layer.kind == "leaky_relu" else 0.0
            found[-1] = found[-1]._replace(activation=_ACTIVATIONS[layer.kind], slope=slope)
            active = True
        elif not isinstance(layer, net.Flatten):
            return (
                "it supports convolutions and Linear layers with at most one pooling and one activation behind each, but "
                f"the network's layer {layer.name!r} is another {net.torch_name(layer)}"
            )
        shape = (found[-1].outputs, *found[-1].windows)
    return found


def _is_plain(pool: net.MaxPool) -> bool:
    return pool.padding == (0, 0) and pool.dilation == (1, 1) and not pool.ceil_mode


@dataclass(frozen=True)
class LayerPlan:
    """The distribution of a stage over the threads of a CTA; see convolution.cuh."""

    stage: Stage
    number: int
    weight: int  #: index of the first weight among the learner's parameters
    rows: int  #: units of the CTA that has the most
    tile: int = 1  #: units that a thread computes at once
    split: int = 1  #: threads that share the input channels of an output
    back_tile: int = 1
    back_groups: int = 1
    own_tile: int = 1
    own_groups: int = 1
    first_thread: int = 0
    bias_thread: int = 0

    @property
    def tap_step(self) -> int:
        """The distance between channels of a filter in floats; large filters are read four floats at a time."""
        return -(-self.stage.taps // 4) * 4 if self.stage.taps > 8 else self.stage.taps

    @property
    def step(self) -> int:
        """The distance between rows of weights in floats; those of a Linear layer are also read four floats at a time."""
        floats = self.stage.channels * self.tap_step
        return floats if self.stage.kernel else -(-floats // 4) * 4

    @property
    def own_lanes(self) -> int:
        """Threads for the taps of a filter, so that a warp works on one window, or on a few."""
        taps = self.stage.taps
        return -(-taps // 32) * 32 if taps > 16 else 1 << (taps - 1).bit_length()

    @property
    def rows_stored(self) -> int:
        return -(-self.rows // self.tile) * self.tile

    @property
    def quads(self) -> bool:
        """Whether the rows of a Linear layer start at even indices and have a multiple of four entries."""
        return self.stage.kernel is None and self.stage.inputs % 4 == 0 and self.weight % 2 == 0

    @property
    def bias(self) -> int:
        return self.weight + self.stage.outputs * self.stage.inputs if self.stage.bias else -1

    @property
    def pitch(self) -> int:
        """The distance between rows of an image in floats, even; the positions of a filter should be in different banks."""
        width = self.stage.sides[1] + 2 * self.stage.padding[1]
        down, across = self.stage.kernel or (1, 1)

        def meetings(pitch: int) -> int:
            banks = [(y * pitch + x) % 32 for y in range(down) for x in range(across)]
            return max(banks.count(bank) for bank in set(banks))

        return min(range(width + width % 2, width + 14, 2), key=meetings)

    @property
    def plane(self) -> int:
        return self.pitch * (self.stage.sides[0] + 2 * self.stage.padding[0])

    @property
    def paired(self) -> bool:
        """Whether a window starts at an even position and has an even number of inputs across."""
        stage = self.stage
        if stage.kernel is None:
            return False
        patch = (stage.pool[1] - 1) * stage.stride[1] + stage.kernel[1]
        return patch % 2 == 0 and stage.pool_stride[1] * stage.stride[1] % 2 == 0

    @property
    def scratch(self) -> int:
        """Floats for partial sums."""
        stage, outputs = self.stage, self.rows_stored * self.stage.pool[0] * self.stage.pool[1] * self.stage.values
        forward = self.split * outputs if self.split > 1 else 0
        inputs = stage.channels * stage.sides[0] * stage.sides[1] if stage.kernel else self.step
        back = self.back_groups * inputs if self.number else 0
        own = self.own_groups * self.rows * stage.inputs if stage.kernel else 0
        return max(forward, back, own, 2 * self.rows * stage.values)


@dataclass(frozen=True, eq=False)
class StagePlan:
    """One way to run a network under a rule on clusters of a given size; like :class:`.planner.ChipPlan`."""

    kind: Kind
    program: Program
    cluster: int
    layers: tuple[LayerPlan, ...]
    offsets: dict[str, int]  #: offsets in shared memory, in floats
    floats: int  #: number of floats of shared memory
    barriers: tuple[str, ...]

    @property
    def shared_bytes(self) -> int:
        return 4 * self.floats

    @property
    def threads(self) -> int:
        return THREADS

    @property
    def parameters(self) -> int:
        return sum(layer.stage.parameters for layer in self.layers)

    @property
    def words(self) -> int:
        """The number of words per parameter entry, including the entry itself."""
        return 1 + len(self.program.state)

    @property
    def hidden(self) -> int:
        """The number of hidden units."""
        return sum(layer.stage.outputs for layer in self.layers[:-1])

    @property
    def far_floats(self) -> int:
        """Zero, because the whole learner is on chip."""
        return 0

    @property
    def cycles(self) -> float:
        """An estimate of the cycles of one step, accurate enough to compare cluster sizes. Fitted to ten rules on an H200;
        nine of them are within 7 %."""
        entries = sum(layer.rows * layer.stage.inputs for layer in self.layers)
        products = sum(layer.rows * layer.stage.inputs * layer.stage.values for layer in self.layers)
        per_entry = 0.8 * self.program.operations + {"none": 0, "white": 19, "anticorrelated": 38}[self.kind.noise]
        by_products = 14 * products * (1 + self.program.curvature)
        return (entries * per_entry + by_products) / 100 + 800 * len(self.barriers) + 12_000


def plan(stages: Sequence[Stage], kind: Kind, cluster: int, shared_bytes: int, program: Program) -> StagePlan | None:
    """Lay out a network.

    Args:
        stages: the network.
        kind: the rule.
        cluster: number of CTAs that share a learner.
        shared_bytes: the shared memory of a CTA.
        program: the rule.

    Returns:
        The plan, or None if it does not fit.
    """
    if any(stage.outputs < cluster for stage in stages[:-1]):
        return None  # a CTA without units would not wait for the others
    for scratch in _SCRATCH:
        layers = []
        weight = 0
        for number, stage in enumerate(stages):
            layers.append(_shared_out(LayerPlan(stage, number, weight, -(-stage.outputs // cluster)), scratch))
            weight += stage.parameters
        made = _placed(_spread(layers), kind, program, cluster)
        most = 4 * max(cluster * layer.rows * layer.stage.values for layer in layers)
        if made.shared_bytes <= shared_bytes and len(made.barriers) <= _BARRIERS and most < _BYTES:
            return made
    return None


def _shared_out(layer: LayerPlan, scratch: int) -> LayerPlan:
    """Distribute the work over as many threads as the memory for partial sums allows."""
    stage, rows = layer.stage, layer.rows
    if stage.kernel is None:
        return _best(
            scratch,
            [replace(layer, back_groups=n) for n in range(1, rows + 1)],
            lambda own: _rounds(own.back_groups * own.step // 4) * -(-rows // own.back_groups),
        )
    tiles = -(-stage.channels // _CHANNELS)
    at_once = -(-stage.channels // tiles)
    tile = max(1, min(rows, _SUMS // (stage.pool[0] * stage.pool[1])))
    layer = replace(layer, tile=tile, back_tile=at_once, own_tile=at_once)
    outputs = layer.rows_stored // tile * stage.values
    layer = _best(
        scratch,
        [replace(layer, split=n) for n in range(1, stage.channels + 1)],
        lambda own: _rounds(own.split * outputs) * -(-stage.channels // own.split),
    )
    pixels = tiles * stage.sides[0] * stage.sides[1]
    layer = _best(
        scratch,
        [replace(layer, back_groups=n) for n in range(1, rows + 1)],
        lambda own: _rounds(own.back_groups * pixels) * -(-rows // own.back_groups),
    )
    taps = tiles * layer.own_lanes * rows
    return _best(
        scratch,
        [replace(layer, own_groups=n) for n in range(1, stage.values + 1)],
        lambda own: _rounds(own.own_groups * taps) * -(-stage.values // own.own_groups),
    )


def _rounds(items: int) -> int:
    return -(-items // THREADS)


def _best(scratch: int, choices: Sequence[LayerPlan], cost: Callable[[LayerPlan], int]) -> LayerPlan:
    """Return the cheapest choice that fits; the first one in case of ties."""
    return min([own for own in choices if own.scratch <= scratch] or choices[:1], key=cost)


def _spread(layers: Sequence[LayerPlan]) -> tuple[LayerPlan, ...]:
    """Assign the entries of layers, and biases, to different first warps."""
    turn = Turns(THREADS)
    groups = [layer.rows * layer.stage.inputs // (4 if layer.quads else 2) for layer in layers]
    made = [replace(layer, first_thread=turn(count)) for layer, count in zip(layers, groups, strict=True)]
    return tuple(replace(layer, bias_thread=turn(layer.rows)) for layer in made)


def _placed(layers: tuple[LayerPlan, ...], kind: Kind, program: Program, cluster: int) -> StagePlan:
    """Assign offsets in shared memory."""
    memory, barriers, words = Memory(), _barriers(layers, program), 1 + len(program.state)
    memory.place("BARRIERS", 2 * len(barriers))
    memory.offsets |= {name: i for i, name in enumerate(barriers)}
    memory.offsets["VECTORS_AT"] = memory.end
    for layer in layers:
        for name, floats in _of_layer(layer, layer.number + 1 < len(layers), program, cluster).items():
            memory.place(f"{name}.{layer.number}", floats)
    for name, floats in _of_learner(layers, kind, program, barriers, cluster).items():
        memory.place(name, floats)
    memory.offsets["VECTORS_END"] = memory.end
    memory.place("PART", max(layer.scratch for layer in layers))
    for layer in layers:
        memory.place(f"WORDS_AT.{layer.number}", words * layer.rows_stored * layer.step)
    return StagePlan(kind, program, cluster, layers, memory.offsets, memory.end, barriers)


def _of_layer(layer: LayerPlan, hidden: bool, program: Program, cluster: int) -> dict[str, int]:
    """Return the floats of a layer's values, except weights and their state."""
    stage, values, curved = layer.stage, layer.rows * layer.stage.values, program.curvature
    floats = {"IN": stage.channels * layer.plane if stage.kernel else layer.step, "C": curved * values}
    if stage.kernel:
        own = layer.rows * stage.inputs
        floats |= {"SEEN": 2 * values, "WEIGHT_GRADIENT": own, "BIAS_GRADIENT": layer.rows}
        floats |= {"WEIGHT_CURVATURE": curved * own, "BIAS_CURVATURE": curved * layer.rows}
    else:
        floats["D"] = layer.rows
    if hidden:
        floats |= {"BACKWARD_BUFFER": cluster * values, "BEND_BUFFER": curved * cluster * values}
    if hidden and program.features:
        floats |= {"GATE_GRADIENT": layer.rows, "GATE_CURVATURE": layer.rows}
        floats["UNIT_STATE"] = len(program.unit_state) * layer.rows
        floats["UNIT_OBSERVED"] = len(program.unit_reductions) * layer.rows
    floats |= {f"VALUES_{n}": layer.rows for n, (_, over) in enumerate(program.reductions) if over == "unit"}
    return floats | {"BIAS_WORDS": (1 + len(program.state)) * layer.rows if stage.bias else 0}


def _of_learner(
    layers: Sequence[LayerPlan], kind: Kind, program: Program, barriers: Iterable[str], cluster: int
) -> dict[str, int]:
    """Return the floats of values that exist once per learner."""
    tensors, first, outputs = 2 * len(layers), layers[0].stage, layers[-1].stage.outputs
    floats = {"OUTPUTS_AT": outputs, "TARGETS_AT": outputs, "KEYS": 8}
    for name in barriers:
        if "." not in name:
            floats |= {f"{name}_BUFFER": cluster * tensors, f"{name}_VALUES": tensors}
    inputs = first.channels * first.sides[0] * first.sides[1] if kind.normalize else 0
    return floats | {
        "OF_WARPS": tensors * THREADS // 32,
        "NUMBERS": program.scalars,
        "MEANS": inputs,
        "VARIANCES": inputs,
    }


def _barriers(layers: Sequence[LayerPlan], program: Program) -> tuple[str, ...]:
    """Return the exchanges of a step."""
    names = [f"FORWARD.{layer.number}" for layer in layers]
    for layer, _ in pairwise(layers):
        names += [f"{name}.{layer.number}" for name in ("BACKWARD", "BEND")[: 1 + program.curvature]]
    names += [f"REDUCTION_{n}" for n in range(len(program.reductions))]
    return (*names, *(f"UNIT_REDUCTION_{n}" for n in range(len(program.unit_reductions))))
