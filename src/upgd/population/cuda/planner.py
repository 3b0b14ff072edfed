"""Where everything of one learner lies on the chips that it is spread over: pure arithmetic, no GPU needed.

The words are those of ``onchip.cu``: a cluster of CTAs shares a learner; a CTA owns rows of every layer; its threads work on
tiles of 2 rows × 4 lanes, a block of a layer is what one assignment of threads to lanes covers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from upgd.population.backend import Kind, Loss

__all__ = ["CLUSTERS", "THREADS", "ChipPlan", "Dense", "fastest", "plan", "source"]

THREADS = 384  #: three warps for each of the four schedulers; 168 registers for each thread
CLUSTERS = (1, 2, 4, 8, 16)
#: Numbers of a learner that one thread may hold in registers, next to those that it computes with.
_HELD = 64
#: After so many steps the stored utilities are the true ones again (see onchip.cu).
RENEWED_EVERY = 100


class Dense(NamedTuple):
    """A layer and the activation behind it."""

    inputs: int
    outputs: int
    bias: bool
    activation: str  #: RELU, LEAKY, TANH or IDENTITY
    slope: float = 0.0  #: LEAKY's


@dataclass(frozen=True)
class Block:
    """Some lanes of a layer, ``4·chunks`` from ``first``: chunk i of rows 2j, 2j + 1 is for thread (j mod groups, i)."""

    first: int
    chunks: int
    groups: int
    pairs: int  #: pairs of rows, of the CTA that has most
    shift: int = 0  #: the thread that begins, a multiple of 32
    held: int = 0  #: so many pairs of each group are in registers
    w: int = 0  #: where the others' weights begin in shared memory
    u: int = 0

    @property
    def used_groups(self) -> int:
        """Groups that have rows."""
        return min(self.groups, self.pairs)

    @property
    def rounds(self) -> int:
        """How many tiles a thread has."""
        return -(-self.pairs // self.groups)

    @property
    def team(self) -> int:
        """So many neighbours add up their products before they write them down."""
        return next(size for size in (8, 4, 2, 1) if self.chunks % size == 0)

    @property
    def parts(self) -> int:
        return self.chunks // self.team

    @property
    def shared_floats(self) -> int:
        """Floats in shared memory for one number per weight."""
        return max(0, self.pairs - self.held * self.groups) * 8 * self.chunks


@dataclass(frozen=True)
class LayerPlan:
    dense: Dense
    number: int
    weight: int  #: index of the first weight among the learner's parameters
    bias: int  #: of the first bias; −1: none
    grain: int  #: rows are dealt out to CTAs in such portions
    rows: int  #: of the CTA that has most, made even
    blocks: tuple[Block, ...]
    bias_thread: int = 0  #: the thread that has the first bias

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
        """Biases belong to the CTA that owns their unit; behind a turned layer they are dealt out one by one."""
        return 1 if self.turned else self.grain


@dataclass(frozen=True, eq=False)
class ChipPlan:
    """One way to run a network under a rule on clusters of a given size."""

    kind: Kind
    cluster: int
    layers: tuple[LayerPlan, ...]
    offsets: dict[str, int]  #: where things are in shared memory, in floats
    floats: int  #: of shared memory

    @property
    def shared_bytes(self) -> int:
        return 4 * self.floats

    @property
    def parameters(self) -> int:
        """How many parameters a learner has."""
        return _parameters([layer.dense for layer in self.layers])

    @property
    def exchanges(self) -> int:
        return _exchanges(self.layers, self.kind)

    @property
    def cycles(self) -> float:
        """A guess at the cycles of one step, good enough to compare cluster sizes. Measured on an H200: a tile of every
        thread takes about 840 cycles in all, an exchange 1000."""
        per_tile = (280 if self.kind.rule == "utility" else 60) + {"none": 80, "white": 560, "anticorrelated": 1100}[
            self.kind.noise
        ]
        tiles = sum(block.rounds for layer in self.layers for block in layer.blocks)
        return per_tile * tiles + 1000 * self.exchanges + 2000


def plan(layers: Sequence[Dense], kind: Kind, cluster: int, shared_bytes: int) -> ChipPlan | None:
    """Lay out a network.

    Args:
        layers: the network.
        kind: the rule; weight-wise and first order.
        cluster: how many CTAs share a learner.
        shared_bytes: what a CTA may have.

    Returns:
        The plan, or None if it does not fit.
    """
    laid_out = _layers(layers, cluster)
    if laid_out is None:
        return None
    numbers = 2 if kind.rule == "utility" else 1
    for held in _holdings(laid_out, numbers):
        candidate = _placed(held, kind, cluster)
        if candidate.shared_bytes <= shared_bytes:
            return candidate
    return None


def fastest(plans: Sequence[tuple[ChipPlan, int]]) -> ChipPlan:
    """The plan that should serve most learners in a time. It is the same for few of them: sums are rounded as a plan orders
    them, and a learner alone shall be the same, bit for bit, as among others.

    Args:
        plans: with each, how many of its clusters the device runs at once.
    """
    return min(plans, key=lambda p: (p[0].cycles / p[1], p[0].cluster))[0]


def first_of(units: int, grain: int, rank: int, cluster: int) -> int:
    """The first unit of a CTA, if units are dealt out evenly in portions of ``grain``."""
    return min(units, grain * (-(-units // grain) * rank // cluster))


def _layers(layers: Sequence[Dense], cluster: int) -> tuple[LayerPlan, ...] | None:
    made = []
    parameter = 0
    for number, dense in enumerate(layers):
        last = number + 1 == len(layers)
        # A turned layer has the rows of the layer before it, and its normals come in pairs of neighbouring rows.
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
    """Let small blocks, and biases, begin at warps of their own, one after the other."""
    start = 0

    def turn(threads: int) -> int:
        nonlocal start
        mine, start = start, (start + -(-threads // 32) * 32) % THREADS
        return mine

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
    """One block, or two where one would leave many threads without work; the cheaper of all."""
    chunks = -(-lanes // 4)
    choices: list[tuple[int, ...]] = [(chunks,)] if chunks <= THREADS else []
    choices += [(THREADS // g, chunks - THREADS // g) for g in range(1, 9) if 0 < chunks - THREADS // g <= THREADS]
    made = []
    for choice in choices:
        starts = (0, 4 * choice[0])
        made.append(tuple(Block(first, c, THREADS // c, pairs) for first, c in zip(starts, choice, strict=False)))
    return min(made, key=lambda blocks: sum(block.rounds for block in blocks), default=None)


def _holdings(layers: tuple[LayerPlan, ...], numbers: int) -> list[tuple[LayerPlan, ...]]:
    """The layers with more and more in registers: the rounds that save most shared memory first, later layers before
    earlier ones, whose products are fewer and waited for."""
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
    for number, at in rounds[: _HELD // (8 * numbers)]:
        now = list(result[-1])
        blocks = list(now[number].blocks)
        blocks[at] = replace(blocks[at], held=blocks[at].held + 1)
        now[number] = replace(now[number], blocks=tuple(blocks))
        result.append(tuple(now))
    return result


def _exchanges(layers: Sequence[LayerPlan], kind: Kind) -> int:
    turned = sum(layer.turned for layer in layers)
    back = sum(not layer.turned and layer.number > 0 for layer in layers)
    gather = not layers[-1].turned
    norms = turned if kind.scaling == "local" else 0
    return turned + back + gather + (kind.rule == "utility") + norms


def _placed(layers: tuple[LayerPlan, ...], kind: Kind, cluster: int) -> ChipPlan:
    """Give everything its place in shared memory."""
    offsets: dict[str, int] = {}
    end = 0

    def place(name: str, floats: int) -> None:
        nonlocal end
        offsets[name] = end
        end += -(-floats // 4) * 4

    barriers = _barriers(layers, kind)
    place("BARRIERS", 2 * len(barriers))
    offsets |= {name: i for i, name in enumerate(barriers)}
    offsets["VECTORS_AT"] = end
    for layer in layers:
        own = layer.padded if layer.turned else layer.rows
        for name in ("H", "D", "NORMS"):
            place(f"{name}.{layer.number}", own if name != "NORMS" or kind.scaling == "local" else 0)
        biases = layer.rows if not layer.turned else -(-layer.dense.outputs // cluster)
        place(f"BIAS_W.{layer.number}", biases if layer.dense.bias else 0)
        place(f"BIAS_U.{layer.number}", biases if layer.dense.bias else 0)
        for name in ("FORWARD", "BACKWARD", "NORM"):
            if f"{name}.{layer.number}" in barriers:
                place(f"{name}_BUFFER.{layer.number}", cluster * layer.padded)
    place("OUTPUTS_AT", layers[-1].dense.outputs)
    place("TARGETS_AT", layers[-1].dense.outputs)
    place("MAXIMA", 2 * len(layers))
    place("KEYS", 8)
    place("SCALE_BUFFER", 2 * len(layers) * cluster)
    offsets["VECTORS_END"] = end
    place("PART", max(_scratch(layer) for layer in layers))
    placed = []
    for layer in layers:
        blocks = []
        for block in layer.blocks:
            place("w", block.shared_floats)
            place("u", block.shared_floats if kind.rule == "utility" else 0)
            blocks.append(replace(block, w=offsets.pop("w"), u=offsets.pop("u")))
        placed.append(replace(layer, blocks=tuple(blocks)))
    return ChipPlan(kind, cluster, tuple(placed), offsets, end)


def _scratch(layer: LayerPlan) -> int:
    """Floats for sums on their way: of rows over lanes, and (not in the first layer) of lanes over rows."""
    over_rows = layer.padded * max(block.used_groups for block in layer.blocks) if layer.number else 0
    return max(layer.rows * layer.parts, over_rows)


def _barriers(layers: Sequence[LayerPlan], kind: Kind) -> list[str]:
    names = []
    for layer in layers:
        if layer.turned:
            names.append(f"FORWARD.{layer.number}")
            names += [f"NORM.{layer.number}"] if kind.scaling == "local" else []
        elif layer.number:
            names.append(f"BACKWARD.{layer.number}")
    names += [] if layers[-1].turned else ["GATHER"]
    names += ["SCALE"] if kind.rule == "utility" else []
    return names


def _parameters(layers: Sequence[Dense]) -> int:
    return sum(dense.inputs * dense.outputs + dense.bias * dense.outputs for dense in layers)


# ------------------------------------------------------------------------------------------------ the plan as C++ constants


def source(plan: ChipPlan, loss: Loss, indexed: bool, template: str) -> str:
    """The text to compile: what is constant, then the template."""
    return "\n".join([*_constants(plan, loss, indexed), template])


def _constants(plan: ChipPlan, loss: Loss, indexed: bool) -> list[str]:
    kind = plan.kind
    lines = [
        "enum { RELU, LEAKY, TANH, IDENTITY };",
        "enum { PLAIN, UTILITY };",
        "enum { GLOBAL, LOCAL };",
        "enum { NONE, WHITE, ANTICORRELATED };",
        "enum { CROSS_ENTROPY, MSE };",
        f"constexpr int RULE = {kind.rule.upper()}, SCALING = {kind.scaling.upper()}, NOISE = {kind.noise.upper()};",
        f"constexpr int LOSS = {loss.upper()}; constexpr bool INDEXED = {str(indexed).lower()};",
        f"constexpr int CLUSTER = {plan.cluster}, THREADS = {THREADS}, LAYERS = {len(plan.layers)};",
        f"constexpr int PARAMETERS = {plan.parameters}, RENEWED_EVERY = {RENEWED_EVERY};",
        f"constexpr int EXCHANGES = {plan.exchanges}, BLOCKS_0 = {len(plan.layers[0].blocks)};",
        f"constexpr int BARRIER_COUNT = {len(_barriers(plan.layers, kind))};",
    ]
    offsets = {"GATHER": -1, "SCALE": -1, **plan.offsets}
    lines += [f"constexpr int {name} = {offset};" for name, offset in offsets.items() if "." not in name]
    lines += ["template <int l> struct Layer;", "template <int l, int b> struct Block;"]
    lines += ["template <int l, int b> struct Held;"]
    held = []
    for layer in plan.layers:
        lines.append(_layer(layer, plan))
        for number, block in enumerate(layer.blocks):
            lines += _block(layer, number, block)
            held.append(f"Held<{layer.number}, {number}>")
    lines.append(f"struct Registers : {', '.join(held)} {{}};")
    return lines


def _layer(layer: LayerPlan, plan: ChipPlan) -> str:
    dense, number = layer.dense, layer.number
    total = plan.parameters
    numbers = {
        "NUMBER": number,
        "INPUTS": dense.inputs,
        "OUTPUTS": dense.outputs,
        "WEIGHT": layer.weight,
        "BIAS": layer.bias,
        "UNITS": layer.units,
        "LANES": layer.lanes,
        "GRAIN": layer.grain,
        "BIAS_GRAIN": layer.bias_grain,
        "ROWS": layer.rows,
        "PADDED": layer.padded,
        "PARTS": layer.parts,
        "BLOCKS": len(layer.blocks),
        "ACTIVATION": dense.activation,
        "BIAS_THREAD": layer.bias_thread,
    }
    vectors = ("H", "D", "NORMS", "BIAS_W", "BIAS_U")
    exchanges = ("FORWARD", "BACKWARD", "NORM")
    names = (*vectors, *exchanges, *(f"{name}_BUFFER" for name in exchanges))
    numbers |= {name: plan.offsets.get(f"{name}.{number}", -1) for name in names}
    switches = {
        "TURNED": layer.turned,
        # Pairs of normals are pairs of neighbours in a tile, if rows begin at even indices.
        "EVEN": dense.inputs % 2 == 0 and layer.weight % 2 == 0,
        # Rows of global memory can be read in fours.
        "VECTORS": not layer.turned and all(n % 4 == 0 for n in (dense.inputs, layer.weight, total)),
    }
    ints = ", ".join(f"{name} = {value}" for name, value in numbers.items())
    bools = ", ".join(f"{name} = {str(value).lower()}" for name, value in switches.items())
    slope = f"static constexpr float SLOPE = {dense.slope!r}f;"
    return (
        f"template <> struct Layer<{number}> {{ static constexpr int {ints}; static constexpr bool {bools}; {slope} }};"
    )


def _block(layer: LayerPlan, number: int, block: Block) -> list[str]:
    numbers = {
        "LAYER": layer.number,
        "NUMBER": number,
        "FIRST": block.first,
        "CHUNKS": block.chunks,
        "GROUPS": block.groups,
        "USED_GROUPS": block.used_groups,
        "SHIFT": block.shift,
        "TEAM": block.team,
        "FIRST_PART": sum(b.parts for b in layer.blocks[:number]),
        "HELD": block.held,
        "W": block.w,
        "U": block.u,
    }
    ints = ", ".join(f"{name} = {value}" for name, value in numbers.items())
    size = max(1, block.held)
    which = f"{layer.number}, {number}"
    return [
        f"template <> struct Block<{which}> {{ static constexpr int {ints}; }};",
        f"template <> struct Held<{which}> {{ float w[{size}][2][4], u[{size}][2][4]; }};",
    ]
