"""Print a rule as assignments in a kernel language: numba's for the CPU, Triton's for a GPU."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from upgd.methods.reset_tracing import ResetRule
from upgd.methods.tracing import Node, Rule

__all__ = ["COMMON", "INPUTS", "NUMBA", "TRITON", "Dialect", "indented", "lines", "merged", "reached", "simplified"]

#: Kinds of nodes that are not operations: of a rule, and of hidden units and their resets.
INPUTS = (
    *("w", "g", "curvature", "noise", "bound", "state", "reduced", "scalar", "constant"),
    *("gate_gradient", "gate_curvature", "unit_state", "unit_observed", "unit_reduced"),
    *("activation", "draw", "outgoing", "outgoing_sum", "joined"),
)


@dataclass(frozen=True)
class Dialect:
    """The syntax of a kernel language.

    Attributes:
        forms: templates of all operations, with placeholders for their arguments.
        constant: the template of a number.
        endless: the template of an infinite number or NaN; empty if it is that of other numbers.
        fused: the template of a·b + c, for a product that is used once, in a sum; empty if the compiler fuses automatically.
    """

    forms: Mapping[str, str]
    constant: str
    endless: str = ""
    fused: str = ""


#: Operations as most languages write them.
COMMON = {
    "add": "{0} + {1}",
    "sub": "{0} - {1}",
    "mul": "{0} * {1}",
    "div": "{0} / {1}",
    "neg": "-{0}",
    "lt": "{0} < {1}",
    "le": "{0} <= {1}",
    "gt": "{0} > {1}",
    "ge": "{0} >= {1}",
    "eq": "{0} == {1}",
    "ne": "{0} != {1}",
    "and": "{0} & {1}",
    "or": "{0} | {1}",
}
NUMBA = Dialect(
    COMMON
    | {
        "abs": "abs({0})",
        "sqrt": "_f(math.sqrt({0}))",
        "exp": "exp({0})",
        "tanh": "tanh({0})",
        "sign": "sign({0})",
        "max": "larger({0}, {1})",
        "min": "smaller({0}, {1})",
        "where": "{1} if {0} else {2}",
        "not": "not {0}",
        "complement": "complement({0})",
    },
    constant="_f({0!r})",
    fused="fused({0}, {1}, {2})",
)
TRITON = Dialect(
    COMMON
    | {
        "abs": "tl.abs({0})",
        "sqrt": "tl.sqrt({0})",
        "exp": "tl.exp({0})",
        "tanh": "tanh({0})",
        "sign": "tl.where({0} > 0, 1.0, tl.where({0} < 0, -1.0, 0.0))",
        "max": "tl.maximum({0}, {1})",
        "min": "tl.minimum({0}, {1})",
        "where": "tl.where({0}, {1}, {2})",
        "not": "tl.where({0}, False, True)",
    },
    constant="{0!r}",
    endless='float("{0}")',
)


def lines(rule: Rule | ResetRule, wanted: list[int], read: Callable[[Node], str], dialect: Dialect) -> list[str]:
    """Return the operations needed for the wanted values, as assignments; ``read`` returns the text of an input."""
    needed = reached(rule, wanted)
    uses = [argument for place in needed for argument in _arguments(rule, place)]
    # A product that is used only once, in a sum, is fused with it.
    inside = {
        place: _product(rule, place, uses, set(wanted))
        for place in needed
        if dialect.fused and rule.nodes[place][0] in ("add", "sub")
    }
    hidden = {product for product in inside.values() if product is not None}
    return [
        f"v{place} = {_expression(rule, place, inside.get(place), read, dialect)}"
        for place in sorted(needed)
        if place not in hidden
    ]


def reached(rule: Rule | ResetRule, wanted: Iterable[int]) -> set[int]:
    """Return the indices of the wanted values and of everything that they are computed from."""
    needed: set[int] = set()
    waiting = list(wanted)
    while waiting:
        place = waiting.pop()
        if place not in needed:
            needed.add(place)
            waiting += _arguments(rule, place)
    return needed


def _arguments(rule: Rule | ResetRule, place: int) -> list[int]:
    node = rule.nodes[place]
    return [] if node[0] in INPUTS else list(node[1:])


def _product(rule: Rule | ResetRule, place: int, uses: list[int], wanted: set[int]) -> int | None:
    """Return the argument of a sum that is a product and is not used elsewhere."""
    for argument in rule.nodes[place][1:]:
        if rule.nodes[argument][0] == "mul" and uses.count(argument) == 1 and argument not in wanted:
            return int(argument)
    return None


def _expression(
    rule: Rule | ResetRule, place: int, product: int | None, read: Callable[[Node], str], dialect: Dialect
) -> str:
    kind, *arguments = rule.nodes[place]
    if kind == "constant":
        endless = dialect.endless and not math.isfinite(arguments[0])
        return (dialect.endless if endless else dialect.constant).format(arguments[0])
    if kind in INPUTS:
        return read(rule.nodes[place])
    if product is not None:
        a, b = (f"v{factor}" for factor in rule.nodes[product][1:])
        first, second = arguments
        if kind == "add":
            return dialect.fused.format(a, b, f"v{second if first == product else first}")
        return dialect.fused.format(*((a, b, f"-v{second}") if first == product else (f"-{a}", b, f"v{first}")))
    return dialect.forms[kind].format(*(f"v{argument}" for argument in arguments))


def merged(nodes: Sequence[Node], *operations: str) -> tuple[Node, ...]:
    """Merge expressions into one operation each.

    Args:
        nodes: the operations of a rule.
        operations: ``"complement"``, 1 − eˣ, which needs a series for small x; ``"logistic"``, 1/(1 + eˣ), which is accurate
            even if its parts overflow.
    """
    made = list(nodes)
    one = made.index(("constant", 1.0)) if ("constant", 1.0) in made else None
    for place, (kind, *arguments) in enumerate(nodes):
        if "logistic" in operations and kind == "div" and arguments[0] == one and nodes[arguments[1]][0] == "add":
            terms = [term for term in nodes[arguments[1]][1:] if term != one]
            if len(terms) == 1 and nodes[terms[0]][0] == "exp":
                made[place] = ("logistic", nodes[terms[0]][1])
        if "complement" in operations and kind == "sub" and arguments[0] == one and nodes[arguments[1]][0] == "exp":
            made[place] = ("complement", nodes[arguments[1]][1])
    return tuple(made)


def indented(text: list[str], by: int) -> str:
    """Indent the lines of a function's body; ``pass`` if there are none."""
    return "\n".join(" " * by + line for line in text) if text else " " * by + "pass"


def simplified(rule: Rule, known: Mapping[int, float], *, noise: bool) -> Rule:
    """Simplify a rule for known values of some scalars, given by number, and optionally without noise.

    A term that is multiplied by zero is removed together with its inputs, as in the optimizers without kernels.
    """
    nodes: list[Node] = []
    places: dict[Node, int] = {}
    moved: list[int] = []
    uniform: set[int] = set()  #: values that are the same for all entries of a block

    def record(node: Node) -> int:
        if node not in places:
            places[node] = len(nodes)
            nodes.append(node)
            if node[0] in ("scalar", "constant", "reduced"):
                uniform.add(places[node])
        return places[node]

    for node in rule.nodes:
        kind = node[0]
        if kind == "scalar" and node[1] in known:
            moved.append(record(("constant", known[node[1]])))
        elif kind == "noise" and not noise:
            moved.append(record(("constant", 0.0)))
        elif kind in INPUTS:
            moved.append(record(node))
        else:
            arguments = [moved[place] for place in node[1:]]
            if kind == "div" and arguments[1] in uniform and arguments[0] not in uniform:
                # Values that are the same for all entries are inverted once, before the loop.
                kind, arguments[1] = "mul", record(("div", record(("constant", 1.0)), arguments[1]))
                uniform.add(arguments[1])
            if kind == "mul" and (arguments[0] in uniform) != (arguments[1] in uniform):
                # Likewise, factors that are the same for all entries are multiplied first.
                entry, factor = sorted(arguments, key=uniform.__contains__)
                if nodes[entry][0] == "mul" and (inner := uniform.intersection(nodes[entry][1:])):
                    (own,) = inner
                    entry = next(place for place in nodes[entry][1:] if place != own)
                    arguments = [entry, record(("mul", own, factor))]
                    uniform.add(arguments[1])
            folded = _folded(kind, arguments, nodes)
            moved.append(folded if isinstance(folded, int) else record(folded))
            if all(place in uniform for place in arguments):
                uniform.add(moved[-1])
    return replace(
        rule,
        nodes=tuple(nodes),
        observed=tuple(moved[place] for place in rule.observed),
        new_state=tuple(None if place is None else moved[place] for place in rule.new_state),
        new_weight=moved[rule.new_weight],
    )


def _folded(kind: str, arguments: list[int], nodes: list[Node]) -> Node | int:
    """Return an operation, or the index of its result if it can be folded."""
    values = [nodes[place][1] if nodes[place][0] == "constant" else None for place in arguments]
    if kind == "neg" and values[0] is not None:
        return ("constant", -values[0])
    if kind == "neg" and nodes[arguments[0]][0] == "neg":
        return int(nodes[arguments[0]][1])
    if kind in ("add", "sub", "mul", "div"):
        one, other = values
        if one is not None and other is not None and not (kind == "div" and other == 0):
            result = {"add": one + other, "sub": one - other, "mul": one * other, "div": one / (other or 1)}[kind]
            return ("constant", result)
        if kind == "mul" and 0 in values:
            return ("constant", 0.0)
        if (kind, one) in (("mul", 1), ("add", 0)):
            return arguments[1]
        if (kind, other) in (("mul", 1), ("div", 1), ("add", 0), ("sub", 0)):
            return arguments[0]
        if (kind, one) == ("sub", 0):
            return ("neg", arguments[1])
    return (kind, *arguments)
