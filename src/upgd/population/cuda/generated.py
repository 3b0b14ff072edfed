"""A method's rule in CUDA C++: what stands in front of generated.cuh.

:mod:`upgd.methods.tracing` gives the rule as operations; here they are printed as functions of one entry of a parameter, and,
if the method looks at hidden units, of one unit. Where the entry lies, what is reduced how, and who computes it is the
kernel's part.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import isfinite
from typing import Any

from upgd.methods import Method
from upgd.methods.tracing import Node, Rule, traced_parts
from upgd.population.cuda.planner import Program

__all__ = ["program"]

#: How an operation is written.
_FORMS = {
    "add": "{0} + {1}",
    "sub": "{0} - {1}",
    "mul": "{0} * {1}",
    "div": "{0} * reciprocal({1})",
    "neg": "-{0}",
    "abs": "fabsf({0})",
    "sqrt": "root({0})",
    "exp": "exponential({0})",
    "logistic": "logistic({0})",
    "tanh": "tanhf({0})",
    "sign": "sign({0})",
    "max": "larger({0}, {1})",
    "min": "smaller({0}, {1})",
    "where": "{0} ? {1} : {2}",
    "lt": "{0} < {1}",
    "le": "{0} <= {1}",
    "gt": "{0} > {1}",
    "ge": "{0} >= {1}",
}
#: About how many instructions it takes, where that is not one; the functions have a unit of their own.
_COSTS = {"div": 6, "sqrt": 6, "exp": 12, "logistic": 14, "tanh": 25, "sign": 3}

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
}

_TEXT = """
// ----------------------------------------------------------------------------------------- the rule of {name}

INLINE float sign(float x) {{ return (x > 0.f) - (x < 0.f); }}
INLINE float logistic(float x) {{ return reciprocal(1.f + ex2(1.44269504f * x)); }}
INLINE float exponential(float x) {{  // what x·log₂e has lost in rounding is put back
  x = smaller(larger(x, -104.f), 89.f);  // beyond, it is zero or infinite
  const float t = 1.44269504f * x, rest = fmaf(1.92596303e-8f, x, fmaf(1.44269504f, x, -t));
  return ex2(t) * fmaf(0.693147181f, rest, 1.f);
}}
struct Entry {{
  float w, g, curvature, noise, bound, s[{states}], r[{reductions}];
  float unit_s[{unit_states}], unit_o[{unit_reductions}], unit_r[{unit_reductions}];
  INLINE void see(const Entry& other) {{  // what is the same in a row or in a lane
    for (int n = 0; n < REDUCTIONS; ++n) r[n] = other.r[n];
    for (int n = 0; n < UNIT_STATES; ++n) unit_s[n] = other.unit_s[n];
    for (int n = 0; n < UNIT_REDUCTIONS; ++n) {{ unit_o[n] = other.unit_o[n]; unit_r[n] = other.unit_r[n]; }}
  }}
}};
struct Unit {{ float gate_gradient, gate_curvature, s[{unit_states}], o[{unit_reductions}]; }};
constexpr bool OBSERVES[] = {{ {observes} }}, CHANGES[] = {{ {changes} }};
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


def program(method: Method) -> Program:
    """The rule of a method; raises :class:`upgd.methods.tracing.CannotTrace` where there can be none."""
    rule, other = (replace(part, nodes=_shortened(part.nodes)) for part in traced_parts(method))
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
    places = [*_known(rule.stored_state), *rule.observed, rule.new_weight, *_known(rule.new_state)]
    operations = sum(_COSTS.get(rule.nodes[place][0], 1) for place in _needed(rule, places) if _is_done(rule, place))
    return Program(
        text,
        rule.state,
        len(rule.scalars),
        operations,
        rule.reductions,
        method.uses_curvature,
        method.uses_units,
        rule.unit_state,
        rule.unit_reductions,
    )


def _shortened(nodes: Sequence[Node]) -> tuple[Node, ...]:
    """1/(1 + eˣ) is one operation: it needs less care than its parts do, where they may be large."""
    made = list(nodes)
    one = made.index(("constant", 1.0)) if ("constant", 1.0) in made else None
    for place, (kind, *arguments) in enumerate(nodes):
        if kind == "div" and arguments[0] == one and nodes[arguments[1]][0] == "add":
            terms = [term for term in nodes[arguments[1]][1:] if term != one]
            if len(terms) == 1 and nodes[terms[0]][0] == "exp":
                made[place] = ("logistic", nodes[terms[0]][1])
    return tuple(made)


def _update(rule: Rule) -> str:
    ends = [f"e.w = v{rule.new_weight};", *_changes(rule.new_state)]
    return _body(rule, [rule.new_weight, *_known(rule.new_state)], ends)


def _switches(places: Sequence[int | None]) -> str:
    """Which words change; one more, because there may be none."""
    return ", ".join(str(place is not None).lower() for place in (*places, None))


def _known(places: Iterable[int | None]) -> list[int]:
    return [place for place in places if place is not None]


def _changes(places: Sequence[int | None]) -> list[str]:
    return [f"e.s[{n}] = v{place};" for n, place in enumerate(places) if place is not None]


def _body(rule: Rule, wanted: list[int], ends: Sequence[str] = (), of_unit: bool = False) -> str:
    """The operations that lead to the wanted ones, as lines, and what is done with them."""
    lines = [f"const auto v{place} = {_expression(rule.nodes[place], of_unit)};" for place in _needed(rule, wanted)]
    return "\n".join(f"  {line}" for line in (*lines, *ends))


def _needed(rule: Rule, wanted: Iterable[int]) -> list[int]:
    needed: set[int] = set()
    waiting = list(wanted)
    while waiting:
        place = waiting.pop()
        if place not in needed:
            needed.add(place)
            waiting += rule.nodes[place][1:] if _is_done(rule, place) else ()
    return sorted(needed)


def _is_done(rule: Rule, place: int) -> bool:
    """Whether it is an operation, and not an input."""
    return rule.nodes[place][0] in _FORMS


def _expression(node: tuple[Any, ...], of_unit: bool) -> str:
    kind, *arguments = node
    if kind in _INPUTS:
        return _INPUTS[kind].format(*arguments)
    if kind == "unit_state":
        return f"e.{'s' if of_unit else 'unit_s'}[{arguments[0]}]"
    if kind == "constant":
        value = arguments[0]
        return f"{value!r}f" if isfinite(value) else f"(float){value!r}".replace("inf", "(1e300 * 1e300)")
    return _FORMS[kind].format(*(f"v{argument}" for argument in arguments))
