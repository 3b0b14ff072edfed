"""Code that works on the entries of a tensor: the values to reduce, and new parameters and state.

A program works on a block of consecutive entries. If states have 8 bits, it works on several of their blocks instead, which
do not extend beyond a row: arrays of shape (blocks, 128, 2), so that no thread has to pass one half of a pair of normals to
another. The number of a block is ``q``, which is also the index of its scale.
"""

from upgd.kernels.source import TRITON, lines, reached
from upgd.kernels.steps import states_of
from upgd.kernels.triton_reductions import atomic, neutral, summand
from upgd.kernels.triton_shared import Narrow, Widths
from upgd.kernels.triton_text import CODED, FIRST_BLOCK, FIRST_ROW, ROWS, ROWS_OF, START, C
from upgd.methods.tracing import Node, Rule

__all__ = ["noise", "observe_blocks", "observe_rows", "place", "pointers", "update"]

_INDEX = "index = (start + i).to(tl.uint32)"
_ALIGNED_ROWS = ["if ALIGNED:", "    columns = tl.multiple_of(columns, 16)"]
_LANES = "lane = 2 * tl.arange(0, 128)[None, :, None] + tl.arange(0, 2)[None, None, :]"


def pointers(narrow: Narrow) -> list[str]:
    """Return code that loads the addresses of a tensor's data."""
    rule, used = narrow.rule, states_of(narrow.rule)
    text = ["w_, g_ = at(table, 0, T, t, WT, ALIGNED), at(table, 1, T, t, GT, ALIGNED)"]
    if rule.uses("curvature"):
        text.append(f"c_ = at(table, {C}, T, t, tl.float32, ALIGNED)")
    kind = "tl.uint8" if narrow.coded else "tl.bfloat16"
    text += [
        f"s{n}_ = at(table, {len(ROWS) + i}, T, t, {kind if n in narrow.states else 'tl.float32'}, ALIGNED)"
        for i, n in enumerate(used)
    ]
    if narrow.coded:
        first = len(ROWS) + len(used)
        text += [
            f"q{n}_ = at(table, {first + i}, T, t, tl.float32, False)" for i, n in enumerate(used) if n in narrow.states
        ]
    return text


def place(narrow: Narrow) -> list[str]:
    """Return code that finds the entries of a program of ``update``."""
    start = ["start = 0", "if SHARDED:", f"    start = number_at(table, {START}, T, t)"]
    if narrow.coded:
        return [*start, *_coded_blocks()]
    return [
        f"o = (b - number_at(table, {FIRST_BLOCK}, T, t)) * BLOCK",
        *start,
        "if ODD:  # a block begins with the first entry of a pair",
        "    o = o - (start & 1)",
    ]


def _coded_blocks() -> list[str]:
    """Return code that finds the blocks of a program, for states with 8 bits."""
    return [
        f"rows = number_at(table, {ROWS_OF}, T, t)",
        "columns = entries // rows",
        *_ALIGNED_ROWS,
        f"per_row = (columns + {CODED - 1}) // {CODED}",
        f"q = (b - number_at(table, {FIRST_BLOCK}, T, t)) * (BLOCK // {CODED}) + tl.arange(0, BLOCK // {CODED})",
        "inside = q < rows * per_row",
        f"first_column = (q % per_row) * {CODED}",
        "o = (q // per_row) * columns + first_column",
        _LANES,
        "i = o[:, None, None] + lane",
        "mask = (first_column[:, None, None] + lane < columns) & inside[:, None, None]",
    ]


def noise(narrow: Narrow, width: Widths) -> list[str]:
    """Return code that computes the noise."""
    if not narrow.noise:
        return [] if narrow.coded else ["i = o + tl.arange(0, BLOCK)"]
    if narrow.coded:
        return [
            "if ODD:  # blocks may begin with the second entry of a pair",
            "    pair = ((start + i) >> 1).to(tl.uint32)",
            *("    " + line for line in _pairs(narrow, width)),
            "    z = tl.where(((start + i) & 1) == 0, even, odd)",
            "else:",
            "    pair = (((start + o) >> 1)[:, None] + tl.arange(0, 128)[None, :]).to(tl.uint32)",
            *("    " + line for line in _pairs(narrow, width)),
            "    z = tl.join(even, odd)",
        ]
    # Two columns, one per entry of a pair, so that no thread has to pass its normals to another.
    return [
        "i = o + 2 * tl.arange(0, BLOCK // 2)[:, None] + tl.arange(0, 2)[None, :]",
        "pair = (((start + o) >> 1) + tl.arange(0, BLOCK // 2)).to(tl.uint32)",
        *_pairs(narrow, width),
        "z = tl.join(even, odd)",
    ]


def _pairs(narrow: Narrow, width: Widths) -> list[str]:
    """Return code that computes the noise of pairs of entries."""
    text = [f"even, odd = normals(keys + t * {width.keys}, pair)"]
    if narrow.noise > 1:
        text += [
            f"before = tl.load(k + t * {width.scalars} + {width.scalars} - 1)",
            f"last_even, last_odd = normals(keys + t * {width.keys} + 4, pair)",
            "even, odd = even - before * last_even, odd - before * last_odd",
        ]
    return text


def _loads(narrow: Narrow, wanted: list[int], mask: str) -> list[str]:
    """Return code that loads the inputs of the wanted values."""
    rule: Rule = narrow.rule
    other = f"{mask}, other=0.0" if mask else ""
    kinds = [rule.nodes[place] for place in sorted(reached(rule, wanted))]
    text = []
    for kind, *number in kinds:
        if kind == "w":
            text.append(f"w = tl.load(w_ + i{other}).to(tl.float32)")
        elif kind == "g":
            text.append(f"g = tl.load(g_ + i{other}).to(tl.float32) * factor")
        elif kind == "curvature":
            text.append(f"c = tl.load(c_ + i{other}) * factor")
        elif kind == "state" and narrow.coded and number[0] in narrow.states:
            n = number[0]
            scale = f"tl.load(q{n}_ + q, mask=inside, other=0.0)[:, None, None]"
            text.append(f"s{n} = decoded(tl.load(s{n}_ + i, mask=mask, other=0), {scale})")
        elif kind == "state":
            text.append(f"s{number[0]} = tl.load(s{number[0]}_ + i{other}).to(tl.float32)")
    return text


def _read(node: Node) -> str:
    inputs = {"w": "w", "g": "g", "curvature": "c", "noise": "z"}
    return inputs.get(node[0]) or {"state": "s{}", "reduced": "r{}", "scalar": "k{}"}[node[0]].format(node[1])


def update(narrow: Narrow, width: Widths) -> list[str]:
    """Return code that computes and stores new parameters and state."""
    masked = _update(narrow, width, ", mask=mask")
    if narrow.coded:
        return masked
    return [
        "if (o >= 0) & (o + BLOCK <= entries):",
        *("    " + line for line in _update(narrow, width, "")),
        "else:",
        "    mask = (i >= 0) & (i < entries)",
        *("    " + line for line in masked),
    ]


def _update(narrow: Narrow, width: Widths, mask: str) -> list[str]:
    rule = narrow.rule
    changed = {n: place for n, place in enumerate(rule.new_state) if place is not None}
    wanted = [rule.new_weight, *changed.values()]
    text = [_INDEX] if narrow.slots else []
    keys = f"keys + t * {width.keys}"
    text += _loads(narrow, wanted, mask)
    text += narrow.added(lines(rule, wanted, _read, TRITON), keys, narrow.slots, narrow.first_key)
    for n, place in changed.items():
        if n in narrow.states and narrow.coded:
            text += [f"tl.store(s{n}_ + i, code{n}{mask})", f"tl.store(q{n}_ + q, scale{n}, mask=inside)"]
            continue
        value = f"v{place}.to(tl.bfloat16)" if n in narrow.states else f"v{place}"
        text.append(f"tl.store(s{n}_ + i, {value}{mask})")
    new = f"v{rule.new_weight}"
    if narrow.weight is not None:
        new = f"rounded({new}, {keys} + {narrow.first_key + 2 * narrow.slots.index(narrow.weight)}, index)"
    return [*text, f"tl.store(w_ + i, {new}.to(WT){mask})"]


def _observed(narrow: Narrow, mask: str) -> list[str]:
    """Return code that computes the values to reduce."""
    wanted = list(narrow.rule.observed)
    text = [_INDEX] if narrow.observed else []
    computed = lines(narrow.rule, wanted, _read, TRITON)
    return [*text, *_loads(narrow, wanted, mask), *narrow.added(computed, "early_keys_", narrow.observed, 0)]


def _whole(operation: str, value: str, narrow: Narrow) -> str:
    """Return the reduction of an array."""
    function = "tl.max" if operation == "max" else "tl.sum"
    for axis in (2, 1) if narrow.coded else ():
        value = f"{function}({value}, {axis})"
    return f"{function}({value}, 0)"


def observe_blocks(narrow: Narrow) -> list[str]:
    """Return code that reduces within one block."""
    rule = narrow.rule
    if not rule.reductions:
        return []
    if narrow.coded:
        text = [*_coded_blocks(), *_reduced_block(narrow, ", mask=mask")]
    else:
        text = [
            f"o = (b - number_at(table, {FIRST_BLOCK}, T, t)) * BLOCK",
            "i = o + tl.arange(0, BLOCK)",
            "if o + BLOCK <= entries:",
            *("    " + line for line in _reduced_block(narrow, "")),
            "else:",
            "    mask = i < entries",
            *("    " + line for line in _reduced_block(narrow, ", mask=mask")),
        ]
    for n in range(len(rule.reductions)):
        if n in atomic(rule):
            # Integers in the same order as the floats with these bits; −0 is replaced by 0.
            text += [
                f"bits = tl.where(a{n} == 0, 0.0, a{n}).to(tl.int32, bitcast=True)",
                f"tl.atomic_max(slots + {n} * A + t, tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF))",
            ]
        else:
            text.append(f"tl.store(partial + {n} * P + b, a{n})")
    return text


def _reduced_block(narrow: Narrow, mask: str) -> list[str]:
    text = _observed(narrow, mask)
    for n, ((operation, _), place) in enumerate(zip(narrow.rule.reductions, narrow.rule.observed, strict=True)):
        value = summand(operation, place)
        if mask:
            value = f"tl.where(mask, {value}, {neutral(operation)})"
        text.append(f"a{n} = {_whole(operation, value, narrow)}")
    return text


def observe_rows(narrow: Narrow) -> list[str]:
    """Return code that reduces within one row."""
    rule = narrow.rule
    text = [
        f"columns = entries // number_at(table, {ROWS_OF}, T, t)",
        f"o = (b - number_at(table, {FIRST_ROW}, T, t)) * columns",
    ]
    shape = "BLOCK"
    loop = ["for c in range(0, columns, BLOCK):", "    j = c + tl.arange(0, BLOCK)", "    mask = j < columns"]
    if narrow.coded:
        text += [
            *_ALIGNED_ROWS,
            f"per_row = (columns + {CODED - 1}) // {CODED}",
            f"first_block = (b - number_at(table, {FIRST_ROW}, T, t)) * per_row",
            _LANES,
        ]
        shape = f"BLOCK // {CODED}, 128, 2"
        loop = [
            f"for first_of_row in range(0, per_row, BLOCK // {CODED}):",
            f"    of_row = first_of_row + tl.arange(0, BLOCK // {CODED})",
            "    q, inside = first_block + of_row, of_row < per_row",
            f"    j = of_row[:, None, None] * {CODED} + lane",
            "    mask = j < columns",
        ]
    numbered = list(enumerate(zip(rule.reductions, rule.observed, strict=True)))
    for n, ((operation, _), _) in numbered:
        text.append(f"e{n} = tl.full([{shape}], {neutral(operation)}, tl.float32)")
    text += loop
    body = ["i = o + j", *_observed(narrow, ", mask=mask")]
    for n, ((operation, _), place) in numbered:
        value = f"tl.where(mask, {summand(operation, place)}, {neutral(operation)})"
        body.append(f"e{n} = tl.maximum(e{n}, {value})" if operation == "max" else f"e{n} += {value}")
    text += ["    " + line for line in body]
    for n, ((operation, over), _) in numbered:
        value = _whole(operation, f"e{n}", narrow)
        if over == "unit":
            value = {"norm": f"tl.sqrt({value})", "mean": f"{value} / columns"}.get(operation, value)
        text.append(f"tl.store(partial + {n} * P + b, {value})")
    return text
