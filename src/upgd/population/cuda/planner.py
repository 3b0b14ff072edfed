"""The on-chip memory layout of a learner; pure arithmetic, without a GPU.

The terms are those of ``onchip.cu``: a cluster of CTAs shares a learner; a CTA owns rows of every layer; its threads work on
tiles of 2 rows × 4 lanes; a block of a layer is the part covered by one assignment of threads to lanes.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, TypeVar

from upgd.methods.method import Reduction
from upgd.population.backend import Kind
from upgd.population.cuda.places import Memory, Turns

__all__ = ["CLUSTERS", "THREADS", "Block", "ChipPlan", "Dense", "LayerPlan", "Program", "Resets", "fastest", "plan"]

THREADS = 384  #: three warps for each of the four schedulers; 168 registers for each thread
CLUSTERS = (1, 2, 4, 8, 16)
#: Maximum number of tiles that a thread keeps in registers in addition to its working set, by the number of words.
_HELD = {1: 8, 2: 3, 3: 2, 4: 1, 5: 1}
#: Maximum bytes of a learner's tiles that a CTA has in global memory, where they stay in the L2 cache; by cluster size. With
#: more, a larger cluster is faster (measured for clusters of 8 CTAs; Continual Backprop with Adam would need 344,064).
_FAR_BYTES = {1: 160_000, 2: 160_000, 4: 160_000, 8: 320_000, 16: 320_000}
#: Maximum number of exchanges; a thread tracks each with one bit.
_BARRIERS = 32


class Dense(NamedTuple):
    """A layer and the activation after it."""

    inputs: int
    outputs: int
    bias: bool
    activation: str  #: RELU, LEAKY, TANH or IDENTITY
    slope: float = 0.0  #: for LEAKY
    gated: bool = True  #: whether the layer has gates


@dataclass(frozen=True)
class Resets:
    """The requirements of a method's resets of units (see :mod:`upgd.methods.reset_tracing`)."""

    scalars: int  #: number of per-learner and per-step scalars
    outgoing: int  #: number of sums over the outgoing weights of a unit
    joins: tuple[str, ...]  #: the operations that need all units of a layer

    @property
    def selections(self) -> int:
        """The number of joins that select the units with the smallest values."""
        return self.joins.count("smallest")


@dataclass(frozen=True)
class Program:
    """The requirements of a generated rule (see :mod:`.generated`)."""

    text: str  #: the rule in CUDA C++
    state: tuple[str, ...]  #: the names of its state, one number per parameter entry
    scalars: int  #: number of per-learner and per-step scalars
    operations: int  #: approximate number of instructions per entry
    reductions: tuple[Reduction, ...] = ()
    curvature: bool = False
    features: bool = False  #: whether it uses hidden units
    unit_state: tuple[str, ...] = ()
    unit_reductions: tuple[Reduction, ...] = ()
    resets: Resets | None = None

    @property
    def numbers(self) -> int:
        """The total number of per-learner and per-step scalars."""
        return self.scalars + (self.resets.scalars if self.resets else 0)


BY_HAND = Program("", (), 0, 0)  #: the requirements of a hand-written rule


@dataclass(frozen=True)
class Block:
    """Some lanes of a layer, ``4·chunks`` from ``first``: chunk i of rows 2j, 2j + 1 is for thread (j mod groups, i)."""

    first: int
    chunks: int
    groups: int
    pairs: int  #: pairs of rows of the CTA that has the most
    shift: int = 0  #: the first thread, a multiple of 32
    held: int = 0  #: number of pairs per group in registers
    far: int = 0  #: number of pairs in global memory, which follow those in registers
    shared: int = 0  #: offset of the remaining pairs in shared memory
    far_at: int = 0  #: offset of the pairs in the CTA's part of global memory
    last_at: int = 0  #: offset of the last step's noise there, if it is needed again

    @property
    def used_groups(self) -> int:
        """The number of groups that have rows."""
        return min(self.groups, self.pairs)

    @property
    def rounds(self) -> int:
        """The number of tiles per thread."""
        return -(-self.pairs // self.groups)

    @property
    def team(self) -> int:
        """The number of neighbouring threads that sum their products before writing them."""
        return next(size for size in (8, 4, 2, 1) if self.chunks % size == 0)

    @property
    def parts(self) -> int:
        return self.chunks // self.team

    @property
    def shared_floats(self) -> int:
        """Floats in shared memory for one number per weight."""
        return max(0, self.pairs - self.held * self.groups - self.far) * 8 * self.chunks


@dataclass(frozen=True)
class LayerPlan:
    dense: Dense
    number: int
    weight: int  #: index of the first weight among the learner's parameters
    bias: int  #: index of the first bias; −1 if there is none
    grain: int  #: rows are distributed over CTAs in portions of this size
    rows: int  #: rows of the CTA that has the most, rounded up to an even number
    blocks: tuple[Block, ...]
    bias_thread: int = 0  #: the thread with the first bias

    @property
    def turned(self) -> bool:
        return self.number % 2 == 1

    @property
    def units(self) -> int:
        return self.dense.inputs if self.turned else self.dense.outputs

    @property
    def lanes(self) -> int:
        return self.dense.outputs if self.turned else self.dense.inputs

    @property
    def padded(self) -> int:
        return 4 * sum(block.chunks for block in self.blocks)

    @property
    def parts(self) -> int:
        return sum(block.parts for block in self.blocks)

    @property
    def bias_grain(self) -> int:
        """Biases belong to the CTA that owns their unit; after a transposed layer they are distributed one by one."""
        return 1 if self.turned else self.grain

    @property
    def vector(self) -> int:
        """Floats for one number per output that a CTA has: its own, or all after a transposed layer."""
        return self.padded if self.turned else -(-self.rows // 4) * 4

    def biases(self, cluster: int) -> int:
        """Floats for the biases that a CTA owns."""
        own = self.rows if not self.turned else -(-self.dense.outputs // cluster)
        return -(-own // 4) * 4 if self.dense.bias else 0


@dataclass(frozen=True, eq=False)
class ChipPlan:
    """One way to run a network under a rule on clusters of a given size."""

    kind: Kind
    program: Program | None  #: None for a hand-written rule
    cluster: int
    layers: tuple[LayerPlan, ...]
    #: Offsets in shared memory, in floats (of MEANS and VARIANCES, in global memory), and the numbers of the barriers.
    offsets: dict[str, int]
    floats: int  #: number of floats of shared memory
    far_floats: int  #: number of floats of global memory per CTA
    barriers: dict[str, int]  #: the exchanges, and the number of bytes that a CTA receives

    @property
    def shared_bytes(self) -> int:
        return 4 * self.floats

    @property
    def threads(self) -> int:
        return THREADS

    @property
    def parameters(self) -> int:
        """The number of parameters of a learner."""
        return parameters([layer.dense for layer in self.layers])

    @property
    def words(self) -> int:
        """The number of words per parameter entry, including the entry itself."""
        return _words(self.kind, self.program)

    @property
    def hidden(self) -> int:
        """The number of hidden units."""
        return sum(layer.dense.outputs for layer in self.layers[:-1])

    @property
    def exchanges(self) -> int:
        return len(self.barriers)

    @property
    def cycles(self) -> float:
        """An estimate of the cycles of one step, accurate enough to compare cluster sizes. Measured on an H200: one tile per
        thread takes about 840 cycles in total, an exchange 1,000, a float in global memory 0.16 in the update and 0.1 in a
        reduction."""
        by_rule = 280 if self.kind.rule == "utility" else 60
        if self.program is not None:
            by_rule = 12 * self.program.operations
        per_tile = by_rule + {"none": 80, "white": 560, "anticorrelated": 1100}[self.kind.noise]
        blocks = [block for layer in self.layers for block in layer.blocks]
        tiles = sum(block.rounds for block in blocks)
        far = self.words * _far_entries(blocks)
        reduces = self.program.reductions if self.program is not None else self.kind.rule == "utility"
        return per_tile * tiles + 1000 * self.exchanges + 6000 + far * (0.26 if reduces else 0.16)


def plan(
    layers: Sequence[Dense], kind: Kind, cluster: int, shared_bytes: int, program: Program | None = None
) -> ChipPlan | None:
    """Lay out a network.

    Args:
        layers: the network.
        kind: the rule.
        cluster: number of CTAs that share a learner.
        shared_bytes: the shared memory of a CTA.
        program: the rule, unless it is hand-written.

    Returns:
        The plan, or None if it does not fit.
    """
    laid_out = _layers(layers, cluster)
    if laid_out is None:
        return None
    for held in _holdings(laid_out, _words(kind, program), _FAR_BYTES[cluster]):
        candidate = _placed(held, kind, program, cluster)
        if candidate.shared_bytes <= shared_bytes:
            return candidate if candidate.exchanges <= _BARRIERS else None
    return None


def _words(kind: Kind, program: Program | None) -> int:
    if program is not None:
        return 1 + len(program.state)
    return 2 if kind.rule == "utility" else 1


class _Plan(Protocol):
    @property
    def cluster(self) -> int: ...

    @property
    def cycles(self) -> float: ...


P = TypeVar("P", bound=_Plan)


def fastest(plans: Sequence[tuple[P, int]]) -> P:
    """Return the plan with the highest throughput for many learners. It is also used for few learners: the plan determines
    the order and thus the rounding of sums, and results must be bitwise independent of the number of learners.

    Args:
        plans: the plans, each with the number of its clusters that the device runs at once.
    """
    return min(plans, key=lambda p: (p[0].cycles / p[1], p[0].cluster))[0]


def first_of(units: int, grain: int, rank: int, cluster: int) -> int:
    """Return the first unit of a CTA, if units are distributed evenly in portions of ``grain``."""
    return min(units, grain * (-(-units // grain) * rank // cluster))


def _layers(layers: Sequence[Dense], cluster: int) -> tuple[LayerPlan, ...] | None:
    made = []
    parameter = 0
    for number, dense in enumerate(layers):
        last = number + 1 == len(layers)
        # A transposed layer has the rows of the preceding layer, and its normals are pairs of neighbouring rows.
        grain = 1 if last and number % 2 == 0 else 2
        units, lanes = (dense.outputs, dense.inputs) if number % 2 == 0 else (dense.inputs, dense.outputs)
        most = max(
            first_of(units, grain, rank + 1, cluster) - first_of(units, grain, rank, cluster) for rank in range(cluster)
        )
        blocks = _blocks(lanes, -(-most // 2))
        if blocks is None:
            return None
        weights = dense.inputs * dense.outputs
        bias = parameter + weights if dense.bias else -1
        made.append(LayerPlan(dense, number, parameter, bias, grain, most + most % 2, blocks))
        parameter += weights + dense.bias * dense.outputs
    return _spread(made, cluster)


def _spread(layers: Sequence[LayerPlan], cluster: int) -> tuple[LayerPlan, ...]:
    """Assign small blocks, and biases, to different first warps."""
    turn = Turns(THREADS)
    made = []
    for layer in layers:
        blocks = [
            replace(block, shift=turn(block.used_groups * block.chunks))
            if block.used_groups * block.chunks <= THREADS // 2
            else block
            for block in layer.blocks
        ]
        made.append(replace(layer, blocks=tuple(blocks)))
    return tuple(
        replace(layer, bias_thread=turn(layer.rows if not layer.turned else -(-layer.dense.outputs // cluster)))
        for layer in made
    )


def _blocks(lanes: int, pairs: int) -> tuple[Block, ...] | None:
    """Return the cheapest split into one block, or into two if one would leave many threads idle."""
    chunks = -(-lanes // 4)
    choices: list[tuple[int, ...]] = [(chunks,)] if chunks <= THREADS else []
    choices += [(THREADS // g, chunks - THREADS // g) for g in range(1, 9) if 0 < chunks - THREADS // g <= THREADS]
    made = []
    for choice in choices:
        starts = (0, 4 * choice[0])
        made.append(tuple(Block(first, c, THREADS // c, pairs) for first, c in zip(starts, choice, strict=False)))
    return min(made, key=lambda blocks: sum(block.rounds for block in blocks), default=None)


def _holdings(layers: tuple[LayerPlan, ...], numbers: int, far_bytes: int) -> list[tuple[LayerPlan, ...]]:
    """Return the layers with increasing numbers of tiles in registers: rounds that save the most shared memory first, and
    later layers before earlier ones, because their few products are on the critical path. Then with increasing parts of the
    first layer in global memory."""
    rounds = [
        (layer.number, at)
        for layer in layers
        for at, block in enumerate(layer.blocks)
        for _ in range(block.pairs // block.groups or 1)
        if block.rounds
    ]

    def saved(which: tuple[int, int]) -> tuple[int, int]:
        block = layers[which[0]].blocks[which[1]]
        return -round(block.chunks * block.used_groups / 128), -which[0]

    rounds.sort(key=saved)
    result = [layers]
    for number, at in rounds[: _HELD.get(numbers, 0)]:
        now = list(result[-1])
        blocks = list(now[number].blocks)
        blocks[at] = replace(blocks[at], held=blocks[at].held + 1)
        now[number] = replace(now[number], blocks=tuple(blocks))
        result.append(tuple(now))
    while True:
        blocks = list(result[-1][0].blocks)
        at = max(range(len(blocks)), key=lambda at: blocks[at].shared_floats)
        blocks[at] = replace(blocks[at], far=blocks[at].far + 1)
        if not result[-1][0].blocks[at].shared_floats or 4 * numbers * _far_entries(blocks) > far_bytes:
            return result
        result.append((replace(result[-1][0], blocks=tuple(blocks)), *result[-1][1:]))


def _far_entries(blocks: Sequence[Block]) -> int:
    return sum(8 * block.far * block.chunks for block in blocks)


def _placed(layers: tuple[LayerPlan, ...], kind: Kind, program: Program | None, cluster: int) -> ChipPlan:
    """Assign offsets in shared memory, and in the CTA's part of global memory."""
    barriers = _barriers(layers, kind, program, cluster)
    shared, far = Memory(), Memory()
    shared.place("BARRIERS", 2 * len(barriers))
    shared.offsets |= {name: i for i, name in enumerate(barriers)}
    shared.offsets["VECTORS_AT"] = shared.end
    exchanges_last = _exchanges_last(barriers, layers[0], cluster)
    for layer in layers:
        hidden = layer.number + 1 < len(layers)
        for name, floats in _of_layer(layer, hidden, kind, program, cluster).items():
            shared.place(f"{name}.{layer.number}", floats)
        _place_buffers(shared, layer, hidden, barriers, cluster, exchanges_last)
    for name, floats in _of_learner(layers, kind, program, barriers).items():
        shared.place(name, floats)
    shared.offsets["VECTORS_END"] = shared.end
    _place_scratch(shared, layers, kind, by_hand=program is None)
    placed = _place_tiles(shared, far, layers, kind, _words(kind, program))
    for name in ("MEANS", "VARIANCES"):
        far.place(name, layers[0].padded if kind.normalize else 0)
    return ChipPlan(kind, program, cluster, placed, shared.offsets | far.offsets, shared.end, far.end, barriers)


def _of_layer(layer: LayerPlan, hidden: bool, kind: Kind, program: Program | None, cluster: int) -> dict[str, int]:
    """Return the floats of a layer's values and biases."""
    needs = program or BY_HAND
    floats = {}
    if needs.resets and hidden:  # every CTA has the values of all units
        units = {"UNIT_STATE": len(needs.unit_state), "ALL_H": not layer.turned, "OUTGOING": needs.resets.outgoing}
        units |= {"RANKED": needs.resets.selections > 0, "AMONG": needs.resets.selections, "CHOSEN": 1, "MOVED": 1}
        floats = {name: count * units_kept(layer, program) for name, count in units.items()}
    vectors = {"H": hidden, "D": 1, "C": needs.curvature}
    vectors["NORMS"] = program is None and kind.scaling == "local" and layer.turned
    if needs.features and hidden:
        vectors |= {"GATE_GRADIENT": 1, "GATE_CURVATURE": needs.curvature}
        vectors |= {"UNIT_STATE": len(needs.unit_state), "UNIT_OBSERVED": len(needs.unit_reductions)}
    vectors |= {f"VALUES_{n}": over == "unit" for n, (_, over) in enumerate(needs.reductions)}
    floats |= {name: count * layer.vector for name, count in vectors.items()}
    return floats | {"BIAS_WORDS": _words(kind, program) * layer.biases(cluster)}


def _place_buffers(
    memory: Memory, layer: LayerPlan, hidden: bool, barriers: Iterable[str], cluster: int, exchanges_last: bool
) -> None:
    """Place the buffers of a layer's exchanges, except of those that write to their destination."""
    for name in barriers:
        exchange, _, number = name.partition(".")
        if number != str(layer.number) or exchange == "HEARD":
            continue
        # All CTAs have read the sums of the forward pass before the first one reaches this layer in the backward pass, and
        # have read these before the next forward pass: other exchanges are in between.
        if hidden and (exchange == "NORM" or exchange.startswith("UNITS")):
            memory.offsets[f"{exchange}_BUFFER.{number}"] = memory.offsets[f"FORWARD_BUFFER.{number}"]
        elif exchange == "BACKWARD" and exchanges_last:
            memory.offsets[f"BACKWARD_BUFFER.{number}"] = memory.offsets[f"FORWARD_BUFFER.{layer.number - 1}"]
        else:
            memory.place(f"{exchange}_BUFFER.{number}", cluster * layer.padded)


def _of_learner(
    layers: Sequence[LayerPlan], kind: Kind, program: Program | None, barriers: Mapping[str, int]
) -> dict[str, int]:
    """Return the floats of values that exist once per learner."""
    needs = program or BY_HAND
    by_hand, tensors, outputs = program is None, 2 * len(layers), layers[-1].dense.outputs
    floats = {"OUTPUTS_AT": max(outputs, barriers.get("GATHER", 0) // 4), "TARGETS_AT": outputs}
    floats["MAXIMA"] = tensors if "SCALE" in barriers and kind.scaling == "global" else 0
    floats["KEYS"] = 8
    for name, received in barriers.items():
        if "." not in name and name != "GATHER":
            floats |= {f"{name}_BUFFER": received // 4, f"{name}_VALUES": 0 if by_hand else tensors}
    floats |= {"OF_WARPS": 0 if by_hand else tensors * THREADS // 32, "NUMBERS": needs.numbers}
    floats["JOINED"] = len(needs.resets.joins) * len(layers) if needs.resets else 0
    floats["OF_LAYERS"] = len(needs.unit_state) * len(layers) if needs.resets else 0
    return floats | {"ANY_CHOSEN": 1}


def _place_scratch(memory: Memory, layers: Sequence[LayerPlan], kind: Kind, by_hand: bool) -> None:
    """Place scratch memory: sums of lanes over rows (except in the first layer), and sums of rows over lanes, which are
    separate for each even layer; followed by norms. Normalized inputs are stored there temporarily."""
    start = memory.offsets["PART"] = memory.end
    for layer in layers[::2]:
        memory.place(f"PARTS_AT.{layer.number}", layer.rows * layer.parts)
    if by_hand and kind.scaling == "local":
        for layer in layers[::2]:
            memory.place(f"NORMS.{layer.number}", layer.vector)
    other = [layers[0].padded if kind.normalize else 0]
    for layer in layers[1:]:
        other.append(layer.padded * max(block.used_groups for block in layer.blocks))
        if layer.turned:
            memory.offsets[f"PARTS_AT.{layer.number}"] = start
            other.append(layer.rows * layer.parts)
    memory.end = max(memory.end, start + -(-max(other) // 4) * 4)


def _place_tiles(
    shared: Memory, far: Memory, layers: Sequence[LayerPlan], kind: Kind, words: int
) -> tuple[LayerPlan, ...]:
    """Place the tiles that are not in registers, and return the layers with their offsets."""
    keeps_noise = kind.noise == "anticorrelated"
    placed = []
    for layer in layers:
        blocks = [
            replace(
                block,
                shared=shared.reserve(words * block.shared_floats),
                far_at=far.reserve(words * _far_entries([block])),
                last_at=far.reserve(8 * block.pairs * block.chunks) if keeps_noise else 0,
            )
            for block in layer.blocks
        ]
        placed.append(replace(layer, blocks=tuple(blocks)))
    return tuple(placed)


def _exchanges_last(barriers: Iterable[str], first: LayerPlan, cluster: int) -> bool:
    """Return whether every step has an exchange among all CTAs after the backward pass, but none that uses a buffer of the
    forward pass."""
    kinds = {name.partition(".")[0].rstrip("0123456789") for name in barriers}
    last = {"SCALE", "REDUCTION_", "UNIT_REDUCTION_"}
    if -(-first.dense.outputs // first.grain) >= cluster:  # only CTAs that own units of the first layer are heard of
        last.add("HEARD")
    return not kinds & {"NORM", "UNITS_"} and bool(kinds & last)


def units_kept(layer: LayerPlan, program: Program | None) -> int:
    """Return the floats for one number per hidden unit that a CTA stores."""
    return -(-layer.dense.outputs // 4) * 4 if program is not None and program.resets else layer.vector


def _barriers(layers: Sequence[LayerPlan], kind: Kind, program: Program | None, cluster: int) -> dict[str, int]:
    """Return the exchanges of a step, and the number of bytes that each CTA receives."""
    names: dict[str, int] = {}
    needs = program or BY_HAND
    tensors = cluster * 2 * len(layers) * 4
    for layer in layers:
        own = []
        if layer.turned:
            own.append("FORWARD")
            own += ["NORM"] if program is None and kind.scaling == "local" else []
            own += [f"UNITS_{n}" for n, (_, over) in enumerate(needs.reductions) if over == "unit"]
        elif layer.number:
            own += ["BACKWARD", "BEND"] if needs.curvature else ["BACKWARD"]
            own += [f"OUTGOING_{n}" for n in range(needs.resets.outgoing)] if needs.resets else []
        names |= {f"{name}.{layer.number}": cluster * layer.padded * 4 for name in own}
        if needs.resets and not layer.turned and layer.number + 1 < len(layers):
            names[f"HEARD.{layer.number}"] = layer.dense.outputs * 4 * (1 + needs.resets.outgoing)
    if not layers[-1].turned:
        names["GATHER"] = max(layers[-1].dense.outputs, cluster) * 4  # a CTA without outputs also sends a number
    if program is None and kind.rule == "utility":
        names["SCALE"] = tensors if kind.scaling == "global" else tensors // 2
    names |= {f"REDUCTION_{n}": tensors for n in range(len(needs.reductions))}
    names |= {f"UNIT_REDUCTION_{n}": tensors for n in range(len(needs.unit_reductions))}
    return names


def parameters(layers: Sequence[Dense]) -> int:
    """Return the number of parameters of these layers."""
    return sum(dense.inputs * dense.outputs + dense.bias * dense.outputs for dense in layers)
