"""A method's rule in CUDA C++, the source that precedes generated.cuh.

:mod:`upgd.methods.tracing` gives the rule as operations, which are printed here as functions of one entry of a parameter
and, if the method uses hidden units, of one unit. The kernel determines the memory layout, the reductions, and which thread
computes an entry.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import isfinite, isnan
from typing import Any

from upgd.kernels.source import COMMON, INPUTS, merged, reached
from upgd.methods import Method
from upgd.methods._scalars import Scalar
from upgd.methods.reset_tracing import ResetRule, traced_reset
from upgd.methods.tracing import Node, Rule, observes_units, traced_parts
from upgd.population.cuda.planner import Program, Resets

__all__ = ["program", "scalars"]

#: Operations in C++.
_FORMS = COMMON | {
    "div": "{0} * reciprocal({1})",
    "abs": "fabsf({0})",
    "sqrt": "root({0})",
    "exp": "exponential({0})",
    "logistic": "logistic({0})",
    "tanh": "tanhf({0})",
    "sign": "sign({0})",
    "max": "larger({0}, {1})",
    "min": "smaller({0}, {1})",
    "where": "{0} ? {1} : {2}",
    "and": "{0} && {1}",
    "or": "{0} || {1}",
    "not": "!{0}",
    "floor": "floorf({0})",
    "pow": "powf({0}, {1})",
    "complement": "complement({0})",
}
#: Expressions that are one operation here.
_MERGED = ("logistic", "complement")
#: Approximate number of instructions of operations that take more than one; functions use the special-function unit.
_COSTS = {"div": 6, "sqrt": 6, "exp": 12, "logistic": 14, "tanh": 25, "sign": 3, "complement": 20}
_LONG = 12  #: from this cost on, an operation is worth sharing

_INPUTS = {
    "w": "e.w",
    "g": "e.g",
    "curvature": "e.curvature",
    "noise": "e.noise",
    "bound": "e.bound",
    "state": "e.s[{0}]",
    "reduced": "e.r[{0}]",
    "gate_gradient": "e.gate_gradient",
    "gate_curvature": "e.gate_curvature",
    "unit_observed": "e.unit_o[{0}]",
    "unit_reduced": "e.unit_r[{0}]",
    "scalar": "k[{0}]",
    "activation": "e.activation",
    "draw": "e.draw",
    "outgoing": "w",
    "outgoing_sum": "e.outgoing[{0}]",
    "joined": "e.joined[{0}]",
}

_TEXT = """
// ----------------------------------------------------------------------------------------- the rule of {name}

INLINE float sign(float x) {{ return (x > 0.f) - (x < 0.f); }}
INLINE float logistic(float x) {{ return reciprocal(1.f + ex2(1.44269504f * x)); }}
INLINE float exponential(float x) {{  // corrects the rounding of x·log₂e
  x = smaller(larger(x, -104.f), 89.f);  // beyond, it is zero or infinite
  const float t = 1.44269504f * x, rest = fmaf(1.92596303e-8f, x, fmaf(1.44269504f, x, -t));
  return ex2(t) * fmaf(0.693147181f, rest, 1.f);
}}
INLINE float complement(float x) {{  // 1 − eˣ; near zero, where the difference would lose digits, from the series
  const float near = -x * fmaf(x, fmaf(x, fmaf(x, fmaf(x, 1.f / 120, 1.f / 24), 1.f / 6), 0.5f), 1.f);
  return chosen_near(x, 0.0625f, near, 1.f - exponential(x));
}}
struct Entry {{
  float w, g, curvature, noise, bound, s[{states}], r[{reductions}];
  float unit_s[{unit_states}], unit_o[{unit_reductions}], unit_r[{unit_reductions}];
  INLINE void see(const Entry& other) {{  // values shared by a row or a lane
    for (int n = 0; n < REDUCTIONS; ++n) r[n] = other.r[n];
    for (int n = 0; n < UNIT_STATES; ++n) unit_s[n] = other.unit_s[n];
    for (int n = 0; n < UNIT_REDUCTIONS; ++n) {{ unit_o[n] = other.unit_o[n]; unit_r[n] = other.unit_r[n]; }}
  }}
}};
struct Unit {{ float gate_gradient, gate_curvature, s[{unit_states}], o[{unit_reductions}]; }};
// Functions, because nvcc does not support constexpr host arrays on the device.
INLINE constexpr bool OBSERVES(int n) {{ const bool all[] = {{ {observes} }}; return all[n]; }}
INLINE constexpr bool CHANGES(int n) {{ const bool all[] = {{ {changes} }}; return all[n]; }}
INLINE void observe(Entry& e, const float* k) {{
{observe}
}}
template <int n> INLINE float observed(const Entry& e, const float* k);
{observed}
INLINE void observe_unit(Unit& e, const float* k) {{
{units}
}}
template <bool GATED, bool HAS_UNIT> INLINE void update(Entry& e, const float* k) {{
  if constexpr (GATED && HAS_UNIT == FEATURES) {{
{gated}
  }} else {{
{other}
  }}
}}
"""

#: The update in two parts: operations that several entries share, and the rest.
_IN_PARTS = """
struct {name} {{ float p[{count}]; }};
template <bool GATED, bool HAS_UNIT> INLINE void prepare(const Entry& e, const float* k, {name}& of) {{
  if constexpr (GATED && HAS_UNIT == FEATURES) {{
{prepare}
  }}
}}
template <bool GATED, bool HAS_UNIT> INLINE void update(Entry& e, const float* k, const {name}& of) {{
  if constexpr (GATED && HAS_UNIT == FEATURES) {{
{rest}
  }} else update<GATED, HAS_UNIT>(e, k);
}}
"""
#: For generated.cuh: a state with long operations on it alone, which have the same results where it has the same values.
#: An example are the powers that correct an entry's moments for the number of its steps.
_ALIKE = """
constexpr int ALIKE = {alike};  // −1: none
"""
#: Values shared by the entries of a row.
_OF_STEP = {"scalar", "constant"}
_OF_ROW = _OF_STEP | {"reduced", "unit_observed", "unit_reduced", "unit_state"}

#: Resets of units: functions of one unit, for resets.cuh.
_RESETS = """
struct Hidden {{ float activation, draw, s[{states}], outgoing[{sums}], joined[{joins}]; }};
INLINE constexpr bool OF_LAYER(int n) {{ const bool all[] = {{ {of_layer} }}; return all[n]; }}
INLINE constexpr bool COPIES(int n) {{ const bool all[] = {{ {copies} }}; return all[n]; }}
constexpr bool DRAWS = {draws}, MOVES = {moves}, ZEROES = {zeroes};
template <int n> INLINE float leaving(float w, const float* k);
template <int n> INLINE float to_join(const Hidden& e, const float* k);
template <int n> INLINE float how_many(const Hidden& e, const float* k);
{functions}
INLINE void renew(Hidden& e, const float* k, bool& chosen, float& moved) {{
{renew}
}}
"""


def program(method: Method) -> Program:
    """Return the rule of a method; raises :class:`upgd.methods.tracing.CannotTrace` if it is not supported."""
    rule, other = (replace(part, nodes=merged(part.nodes, *_MERGED)) for part in traced_parts(method))
    observed = [
        f"template <> INLINE float observed<{n}>(const Entry& e, const float* k) {{\n"
        f"{_body(rule, [place])}\n  return v{place};\n}}"
        for n, place in enumerate(rule.observed)
    ]
    units = _changes(rule.new_unit_state) + [f"e.o[{n}] = v{place};" for n, place in enumerate(rule.unit_observed)]
    wanted = _known(rule.new_unit_state) + list(rule.unit_observed)
    text = _TEXT.format(
        name=method.name,
        states=max(1, len(rule.state)),
        reductions=max(1, len(rule.reductions)),
        unit_states=max(1, len(rule.unit_state)),
        unit_reductions=max(1, len(rule.unit_reductions)),
        observes=_switches(rule.stored_state),
        changes=_switches(rule.new_state),
        observe=_body(rule, _known(rule.stored_state), _changes(rule.stored_state)),
        observed="\n".join(observed),
        units=_body(rule, wanted, units, of_unit=True),
        gated=_update(rule),
        other=_update(other),
    )
    text += _in_parts(rule, "OfRow", _same(rule, _OF_ROW)) + _alike(rule)
    reset = traced_reset(method)
    if reset is not None:
        reset = replace(reset, nodes=merged(reset.nodes, *_MERGED))
        text += _resets(method, reset)
    places = [*_known(rule.stored_state), *rule.observed, rule.new_weight, *_known(rule.new_state)]
    operations = sum(_COSTS.get(rule.nodes[place][0], 1) for place in reached(rule, places) if _is_done(rule, place))
    return Program(
        text,
        rule.state,
        len(rule.scalars),
        operations,
        rule.reductions,
        method.uses_curvature,
        observes_units(method),
        rule.unit_state,
        rule.unit_reductions,
        None if reset is None else _planned(reset),
    )


def _planned(reset: ResetRule) -> Resets:
    return Resets(len(reset.scalars), len(reset.outgoing), tuple(join.operation for join in reset.joins))


def scalars(method: Method) -> tuple[Scalar, ...]:
    """Return the expressions of settings and the step that the rule needs, followed by those of its resets."""
    reset = traced_reset(method)
    return (*traced_parts(method)[0].scalars, *(() if reset is None else reset.scalars))


def _resets(method: Method, reset: ResetRule) -> str:
    def function(name: str, number: int, place: int, argument: str = "const Hidden& e") -> str:
        head = f"template <> INLINE float {name}<{number}>({argument}, const float* k)"
        return f"{head} {{\n{_body(reset, [place], of_unit=True)}\n  return v{place};\n}}"

    functions = [function("leaving", n, place, "float w") for n, place in enumerate(reset.outgoing)]
    for n, join in enumerate(reset.joins):
        functions.append(function("to_join", n, join.value))
        if join.limit is not None:
            functions.append(function("how_many", n, join.limit))
    moved = [] if reset.moved is None else [reset.moved]
    ends = [f"chosen = v{reset.chosen};", *(f"moved = v{place};" for place in moved), *_changes(reset.new_state)]
    return _RESETS.format(
        states=max(1, len(method.unit_state)),
        sums=max(1, len(reset.outgoing)),
        joins=max(1, len(reset.joins)),
        of_layer=_bools(begins_as == "layer" for begins_as in method.unit_state.values()),
        copies=_bools(begins_as == "parameter" for begins_as in method.state.values()),
        draws=str(("draw",) in reset.nodes).lower(),
        moves=str(bool(moved)).lower(),
        zeroes=str(reset.zeroes).lower(),
        functions="\n".join(functions),
        renew=_body(reset, [reset.chosen, *moved, *_known(reset.new_state)], ends, of_unit=True),
    )


def _update(rule: Rule) -> str:
    ends = [f"e.w = v{rule.new_weight};", *_changes(rule.new_state)]
    return _body(rule, [rule.new_weight, *_known(rule.new_state)], ends)


def _alike(rule: Rule) -> str:
    """Return the update in two parts that share the operations on one state."""
    for number in range(len(rule.state)):
        same = _same(rule, _OF_STEP, ("state", number))
        if any(_COSTS.get(rule.nodes[place][0], 1) >= _LONG for place in same):
            # Operations on inputs are short and are repeated, which takes fewer registers.
            kept = {p for p in same if _is_done(rule, p) and any(_is_done(rule, q) for q in rule.nodes[p][1:])}
            return _ALIKE.format(alike=number) + _in_parts(rule, "OfState", kept)
    return _ALIKE.format(alike=-1) + _in_parts(rule, "OfState", set())


def _same(rule: Rule, kinds: set[str], *inputs: Node) -> set[int]:
    """Return the update's inputs of some kinds, some other inputs, and the operations on them alone."""
    same: set[int] = set()
    # The arguments of an operation precede it.
    for place in sorted(reached(rule, [rule.new_weight, *_known(rule.new_state)])):
        kind, *arguments = rule.nodes[place]
        if kind in kinds or rule.nodes[place] in inputs or (_is_done(rule, place) and same.issuperset(arguments)):
            same.add(place)
    return same


def _in_parts(rule: Rule, name: str, same: set[int]) -> str:
    """Return the update in two parts, the first of which does the operations that are the same for several entries."""
    needed = sorted(reached(rule, [rule.new_weight, *_known(rule.new_state)]))
    kept: list[tuple[int, str]] = []  # results of the first part for the second: operations, and how they are passed

    def passed(place: int, form: str) -> str:
        if (place, form) not in kept:
            kept.append((place, form))
        return f"of.p[{kept.index((place, form))}]"

    def value(place: int) -> str:
        if place in same:
            return passed(place, "v{0}") if _is_done(rule, place) else _expression(rule.nodes[place], False)
        return f"v{place}"

    lines = []
    for place in (place for place in needed if place not in same):
        kind, *arguments = rule.nodes[place]
        if kind == "div" and arguments[1] in same:
            expression = f"{value(arguments[0])} * {passed(arguments[1], 'reciprocal(v{0})')}"
        elif _is_done(rule, place):
            expression = _FORMS[kind].format(*map(value, arguments))
        else:
            expression = _expression(rule.nodes[place], False)
        lines.append(f"const auto v{place} = {expression};")
    lines.append(f"e.w = {value(rule.new_weight)};")
    lines += [f"e.s[{n}] = {value(place)};" for n, place in enumerate(rule.new_state) if place is not None]
    ends = [f"of.p[{n}] = {form.format(place)};" for n, (place, form) in enumerate(kept)]
    return _IN_PARTS.format(
        name=name,
        count=max(1, len(kept)),
        prepare=_body(rule, [place for place, _ in kept], ends),
        rest="\n".join(f"  {line}" for line in lines),
    )


def _switches(places: Sequence[int | None]) -> str:
    """Return which words change, with one extra entry, because the list must not be empty."""
    return _bools(place is not None for place in places)


def _bools(values: Iterable[bool]) -> str:
    return ", ".join(str(value).lower() for value in (*values, False))


def _known(places: Iterable[int | None]) -> list[int]:
    return [place for place in places if place is not None]


def _changes(places: Sequence[int | None]) -> list[str]:
    return [f"e.s[{n}] = v{place};" for n, place in enumerate(places) if place is not None]


def _body(rule: Rule | ResetRule, wanted: list[int], ends: Sequence[str] = (), of_unit: bool = False) -> str:
    """Return the operations that the wanted ones depend on, as lines, and the lines that use them."""
    lines = [
        f"const auto v{place} = {_expression(rule.nodes[place], of_unit)};" for place in sorted(reached(rule, wanted))
    ]
    return "\n".join(f"  {line}" for line in (*lines, *ends))


def _is_done(rule: Rule | ResetRule, place: int) -> bool:
    """Return whether this is an operation rather than an input."""
    return rule.nodes[place][0] not in INPUTS


def _expression(node: tuple[Any, ...], of_unit: bool) -> str:
    kind, *arguments = node
    if kind in _INPUTS:
        return _INPUTS[kind].format(*arguments)
    if kind == "unit_state":
        return f"e.{'s' if of_unit else 'unit_s'}[{arguments[0]}]"
    if kind == "constant":
        value = arguments[0]
        if isnan(value):
            return 'nanf("")'
        return f"{value!r}f" if isfinite(value) else f"(float){value!r}".replace("inf", "(1e300 * 1e300)")
    return _FORMS[kind].format(*(f"v{argument}" for argument in arguments))
