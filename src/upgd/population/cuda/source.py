"""The source of an on-chip kernel: its plan as C++ constants, followed by the kernel's files."""

from collections.abc import Mapping

from upgd.population.backend import Loss
from upgd.population.cuda.convolutional import LayerPlan as ConvLayerPlan
from upgd.population.cuda.convolutional import StagePlan
from upgd.population.cuda.planner import BY_HAND, Block, ChipPlan, LayerPlan, Program, parameters, units_kept

__all__ = ["source"]

#: Number of steps after which the scale of stored utilities is reset to 1 (see onchip.cu).
RENEWED_EVERY = 100


def source(plan: ChipPlan | StagePlan, loss: Loss, indexed: bool, parts: Mapping[str, str]) -> str:
    """Return the source to compile.

    Args:
        plan: the memory layout.
        loss: the loss.
        indexed: whether samples are indices of images.
        parts: the contents of the kernel's files by name.
    """
    if isinstance(plan, StagePlan):
        return _source_of_convnet(plan, loss, indexed, parts)
    return _source_of_mlp(plan, loss, indexed, parts)


def _source_of_mlp(plan: ChipPlan, loss: Loss, indexed: bool, parts: Mapping[str, str]) -> str:
    before = [parts[f"{name}.cuh"] for name in ("machine", "basics", "judge", "joins", "tiles", "network", "rule")]
    made = plan.program
    if made is None:
        rule = [parts["by_hand.cuh"]]
    else:
        gated = sum(parameters([layer.dense]) for layer in plan.layers if layer.dense.gated)
        rule = [*_reductions(made, gated, plan.hidden), made.text, parts["generated.cuh"]]
        rule += [parts["resets.cuh"]] if made.resets else []
    return "\n".join([*_constants_of_mlp(plan, loss, indexed), *before, *rule, parts["onchip.cu"]])


def _source_of_convnet(plan: StagePlan, loss: Loss, indexed: bool, parts: Mapping[str, str]) -> str:
    before = [parts[f"{name}.cuh"] for name in ("machine", "basics", "judge", "joins", "convolution")]
    gated = sum(layer.stage.parameters for layer in plan.layers if layer.stage.gated)
    rule = [*_reductions(plan.program, gated, plan.hidden), plan.program.text, parts["rows.cuh"]]
    return "\n".join([*_constants_of_convnet(plan, loss, indexed), *before, *rule, parts["convolution.cu"]])


# ------------------------------------------------------------------------------------------------------ rules and layers


def _reductions(program: Program, gated: int, hidden: int) -> list[str]:
    """Return the declarations of a rule's reductions, which follow the functions that join values.

    Args:
        program: the rule.
        gated: number of parameter entries with gates.
        hidden: number of hidden units.
    """
    lines = ["template <int n> struct Reduction;", "template <int n> struct UnitReduction;"]
    kinds = (("Reduction", program.reductions, gated), ("UnitReduction", program.unit_reductions, hidden))
    for name, reductions, count in kinds:
        for n, (operation, over) in enumerate(reductions):
            at = ("UNIT_" if name == "UnitReduction" else "") + f"REDUCTION_{n}"
            numbers = {"OPERATION": operation.upper(), "OVER": over.upper(), "COUNT": count, "BARRIER": at}
            numbers |= {"BUFFER": f"{at}_BUFFER", "VALUES": f"{at}_VALUES"}
            join = "Largest" if operation == "max" else "Sum"
            units = f"static constexpr bool OF_UNITS = {_bool(name == 'UnitReduction')};"
            lines.append(f"template <> struct {name}<{n}> {{ typedef {join} Join; {_ints(numbers)} {units} }};")
    lines.append("template <int n> struct UnitJoin;")
    joins = program.resets.joins if program.resets else ()
    for n, joining in enumerate(joins):
        numbers = {"OPERATION": joining.upper(), "SELECTION": joins[:n].count("smallest")}
        join = "Largest" if joining == "max" else "Sum"
        lines.append(f"template <> struct UnitJoin<{n}> {{ typedef {join} Join; {_ints(numbers)} }};")
    return lines


def _layer(numbers: Mapping[str, object], switches: Mapping[str, bool], slope: float, inputs: int) -> str:
    """Return the constants of a layer. Initial weights and biases are uniform on [−BOUND, BOUND]."""
    bools = ", ".join(f"{name} = {_bool(value)}" for name, value in switches.items())
    floats = f"static constexpr float SLOPE = {slope!r}f, BOUND = {inputs**-0.5!r}f;"
    return (
        f"template <> struct Layer<{numbers['NUMBER']}> {{ {_ints(numbers)} static constexpr bool {bools}; {floats} }};"
    )


def _ints(numbers: Mapping[str, object]) -> str:
    return f"static constexpr int {', '.join(f'{name} = {value}' for name, value in numbers.items())};"


def _bool(value: bool) -> str:
    return str(bool(value)).lower()


# ------------------------------------------------------------------------------------------------------------------ MLPs


def _constants_of_mlp(plan: ChipPlan, loss: Loss, indexed: bool) -> list[str]:
    kind, program = plan.kind, plan.program
    needs = program or BY_HAND
    rule = "GENERATED" if program else kind.rule.upper()
    lines = [
        "enum { RELU, LEAKY, TANH, IDENTITY };",
        "enum { PLAIN, UTILITY, GENERATED };",
        "enum { GLOBAL, LOCAL };",
        "enum { NONE, WHITE, ANTICORRELATED };",
        "enum { CROSS_ENTROPY, MSE };",
        "enum { MAX, NORM, MEAN, SUM, SMALLEST };",
        "enum { LEARNER, LAYER, UNIT };",
        f"constexpr int RULE = {rule}, SCALING = {kind.scaling.upper()}, NOISE = {kind.noise.upper()};",
        f"constexpr int LOSS = {loss.upper()}; constexpr bool INDEXED = {_bool(indexed)};",
        f"constexpr bool NORMALIZE = {_bool(kind.normalize)}, CURVATURE = {_bool(needs.curvature)};",
        f"constexpr bool FEATURES = {_bool(needs.features)};",
        f"constexpr int CLUSTER = {plan.cluster}, THREADS = {plan.threads}, LAYERS = {len(plan.layers)};",
        f"constexpr int PARAMETERS = {plan.parameters}, WORDS = {plan.words}, RENEWED_EVERY = {RENEWED_EVERY};",
        f"constexpr int FAR_FLOATS = {plan.far_floats};",
        f"constexpr int BARRIER_COUNT = {plan.exchanges}, BLOCKS_0 = {len(plan.layers[0].blocks)}, HIDDEN = {plan.hidden};",
        f"constexpr bool RESETS = {_bool(needs.resets is not None)};",
        f"constexpr int SCALARS = {needs.numbers}, RESET_SCALARS = {needs.scalars}, UNIT_STATES = {len(needs.unit_state)};",
        f"constexpr int OUTGOING_SUMS = {needs.resets.outgoing if needs.resets else 0};",
        f"constexpr int UNIT_JOINS = {len(needs.resets.joins) if needs.resets else 0};",
        f"constexpr int REDUCTIONS = {len(needs.reductions)}, UNIT_REDUCTIONS = {len(needs.unit_reductions)};",
        f"#define EXPECTED {{ {', '.join(map(str, [*plan.barriers.values(), 0]))} }}",
    ]
    offsets = {"GATHER": -1, "SCALE": -1, "SCALE_BUFFER": -1, **plan.offsets}
    lines += [f"constexpr int {name} = {offset};" for name, offset in offsets.items() if "." not in name]
    lines += ["template <int l> struct Layer;", "template <int l, int b> struct Block;"]
    lines += ["template <int l, int b> struct Held;", "template <int l, int n> struct Reduced;"]
    lines.append("template <int l, int n> struct Outgoing;")
    held = []
    for layer in plan.layers:
        lines.append(_layer_of_mlp(layer, plan))
        for number, block in enumerate(layer.blocks):
            lines += _block(layer, number, block)
            held.append(f"Held<{layer.number}, {number}>")
        for n in range(len(needs.reductions)):
            names = {"BARRIER": "UNITS_{}", "BUFFER": "UNITS_{}_BUFFER", "VALUES": "VALUES_{}"}
            places = {name: plan.offsets.get(f"{of.format(n)}.{layer.number}", -1) for name, of in names.items()}
            lines.append(f"template <> struct Reduced<{layer.number}, {n}> {{ {_ints(places)} }};")
        for n in range(needs.resets.outgoing if needs.resets else 0):
            names = {"BARRIER": "OUTGOING_{}", "BUFFER": "OUTGOING_{}_BUFFER"}
            places = {name: plan.offsets.get(f"{of.format(n)}.{layer.number}", -1) for name, of in names.items()}
            lines.append(f"template <> struct Outgoing<{layer.number}, {n}> {{ {_ints(places)} }};")
    lines.append(f"struct Registers : {', '.join(held)} {{}};")
    return lines


def _layer_of_mlp(layer: LayerPlan, plan: ChipPlan) -> str:
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
    numbers["BIASES"] = layer.biases(plan.cluster)
    numbers["UNITS_KEPT"] = units_kept(layer, plan.program)
    numbers["FIRST_HIDDEN"] = sum(other.dense.outputs for other in plan.layers[:number])
    vectors = ("H", "D", "C", "NORMS", "BIAS_WORDS", "GATE_GRADIENT", "GATE_CURVATURE", "UNIT_STATE", "UNIT_OBSERVED")
    of_resets = ("ALL_H", "OUTGOING", "RANKED", "AMONG", "CHOSEN", "MOVED", "HEARD")
    exchanges = ("FORWARD", "BACKWARD", "BEND", "NORM")
    names = ("PARTS_AT", *vectors, *of_resets, *exchanges, *(f"{name}_BUFFER" for name in exchanges))
    numbers |= {name: plan.offsets.get(f"{name}.{number}", -1) for name in names}
    switches = {
        "TURNED": layer.turned,
        "GATED": dense.gated,
        # Pairs of normals are neighbours in a tile if rows start at even indices.
        "EVEN": dense.inputs % 2 == 0 and layer.weight % 2 == 0,
        # Rows in global memory can be read four floats at a time.
        "VECTORS": not layer.turned and all(n % 4 == 0 for n in (dense.inputs, layer.weight, total)),
    }
    return _layer(numbers, switches, dense.slope, dense.inputs)


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
        "FAR": block.far,
        "FAR_AT": block.far_at,
        "SHARED": block.shared,
        "LAST": block.last_at,
    }
    size = max(1, block.held)
    which = f"{layer.number}, {number}"
    return [
        f"template <> struct Block<{which}> {{ {_ints(numbers)} }};",
        f"template <> struct Held<{which}> {{ float words[{size}][WORDS][2][4]; }};",
    ]


# -------------------------------------------------------------------------------------------------------------- ConvNets


def _constants_of_convnet(plan: StagePlan, loss: Loss, indexed: bool) -> list[str]:
    kind, program = plan.kind, plan.program
    lines = [
        "enum { RELU, LEAKY, TANH, IDENTITY };",
        "enum { NONE, WHITE, ANTICORRELATED };",
        "enum { CROSS_ENTROPY, MSE };",
        "enum { MAX, NORM, MEAN, SUM };",
        "enum { LEARNER, LAYER, UNIT };",
        f"constexpr int NOISE = {kind.noise.upper()}, LOSS = {loss.upper()};",
        f"constexpr bool INDEXED = {_bool(indexed)}, NORMALIZE = {_bool(kind.normalize)};",
        f"constexpr bool CURVATURE = {_bool(program.curvature)}, FEATURES = {_bool(program.features)};",
        f"constexpr int CLUSTER = {plan.cluster}, THREADS = {plan.threads}, LAYERS = {len(plan.layers)};",
        f"constexpr int PARAMETERS = {plan.parameters}, WORDS = {plan.words}, HIDDEN = {plan.hidden};",
        f"constexpr int BARRIER_COUNT = {len(plan.barriers)}, SCALARS = {program.scalars};",
        f"constexpr int UNIT_STATES = {len(program.unit_state)};",
        f"constexpr int REDUCTIONS = {len(program.reductions)}, UNIT_REDUCTIONS = {len(program.unit_reductions)};",
    ]
    lines += [f"constexpr int {name} = {offset};" for name, offset in plan.offsets.items() if "." not in name]
    lines += ["template <int l> struct Layer;", "template <int l, int n> struct Reduced;"]
    for layer in plan.layers:
        lines.append(_layer_of_convnet(layer, plan))
        for n in range(len(program.reductions)):
            values = plan.offsets.get(f"VALUES_{n}.{layer.number}", -1)
            lines.append(
                f"template <> struct Reduced<{layer.number}, {n}> {{ static constexpr int VALUES = {values}; }};"
            )
    return lines


#: Names of offsets in shared memory and of exchanges.
_PLACES = (
    *("IN", "C", "D", "SEEN", "WEIGHT_GRADIENT", "BIAS_GRADIENT", "WEIGHT_CURVATURE", "BIAS_CURVATURE"),
    *("BACKWARD_BUFFER", "BEND_BUFFER", "GATE_GRADIENT", "GATE_CURVATURE", "UNIT_STATE", "UNIT_OBSERVED"),
    *("BIAS_WORDS", "WORDS_AT", "FORWARD", "BACKWARD", "BEND"),
)


def _layer_of_convnet(layer: ConvLayerPlan, plan: StagePlan) -> str:
    stage = layer.stage
    numbers: dict[str, object] = {
        "NUMBER": layer.number,
        "OUTPUTS": stage.outputs,
        "INPUTS": stage.inputs,
        "CHANNELS": stage.channels,
        "TAPS": stage.taps,
        "WINDOWS": stage.values,
        "WEIGHT": layer.weight,
        "BIAS": layer.bias,
        "ROWS": layer.rows,
        "STEP": layer.step,
        "TAP_STEP": layer.tap_step,
        "AT_ONCE": 4 if layer.tap_step % 4 == 0 else 1,
        "OWN_LANES": layer.own_lanes,
        "SIZE": layer.rows_stored * layer.step,
        "PITCH": layer.pitch,
        "PLANE": layer.plane,
        "TILE": layer.tile,
        "SPLIT": layer.split,
        "BACK_TILE": layer.back_tile,
        "BACK_GROUPS": layer.back_groups,
        "OWN_TILE": layer.own_tile,
        "OWN_GROUPS": layer.own_groups,
        "FIRST_THREAD": layer.first_thread,
        "BIAS_THREAD": layer.bias_thread,
        "ACTIVATION": stage.activation,
        "FIRST_HIDDEN": sum(other.stage.outputs for other in plan.layers[: layer.number]),
    }
    pairs = {
        ("HEIGHT", "WIDTH"): stage.sides,
        ("KERNEL_Y", "KERNEL_X"): stage.kernel or (1, 1),
        ("STRIDE_Y", "STRIDE_X"): stage.stride,
        ("PAD_Y", "PAD_X"): stage.padding,
        ("POOL_Y", "POOL_X"): stage.pool,
        ("POOL_SY", "POOL_SX"): stage.pool_stride,
        ("DOWN", "ACROSS"): stage.windows,
    }
    for names, values in pairs.items():
        numbers |= dict(zip(names, values, strict=True))
    numbers |= {name: plan.offsets.get(f"{name}.{layer.number}", -1) for name in _PLACES}
    switches = {"CONVOLUTION": stage.kernel is not None, "GATED": stage.gated, "TURNED": False}
    switches |= {"QUADS": layer.quads, "PAIRED": layer.paired}
    return _layer(numbers, switches, stage.slope, stage.inputs)
