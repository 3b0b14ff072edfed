"""Code that reduces the results of blocks or rows to tensors, and tensors to the learner."""

from upgd.kernels.triton_text import FIRST_ROW, NOTHING, ROWS_OF
from upgd.methods.tracing import Rule

__all__ = ["atomic", "combine", "combines", "conclude", "neutral", "reduced", "summand"]


def atomic(rule: Rule) -> list[int]:
    """Return the reductions if blocks can reduce with atomic operations; none if their results must be combined."""
    alone = all(reduction == ("max", "learner") for reduction in rule.reductions)
    return list(range(len(rule.reductions))) if alone else []


def combines(rule: Rule) -> bool:
    """Return whether the results of blocks or rows must be combined."""
    return not atomic(rule) and any(over != "unit" for _, over in rule.reductions)


def neutral(operation: str) -> str:
    """Return the result of a reduction of nothing."""
    return "float('-inf')" if operation == "max" else "0.0"


def summand(operation: str, place: int) -> str:
    """Return the expression to sum or maximize; NaN counts as infinite in a maximum."""
    if operation == "max":
        return f"tl.where(v{place} == v{place}, v{place}, float('inf'))"
    return f"v{place} * v{place}" if operation == "norm" else f"v{place}"


def combine(rule: Rule) -> list[str]:
    """Return code that reduces blocks or rows to tensors."""
    text = []
    for n, (operation, over) in enumerate(rule.reductions):
        if over == "unit" or n in atomic(rule):
            continue
        add = f"tl.maximum(e{n}, found)" if operation == "max" else f"e{n} + found"
        text += [
            f"e{n} = tl.full([BLOCK], {neutral(operation)}, tl.float64)",
            "for c in range(0, count, BLOCK):",
            f"    found = tl.load(partial + {n} * P + first + c + j, mask=c + j < count, "
            f"other={neutral(operation)}).to(tl.float64)",
            f"    e{n} = {add}",
            f"a{n} = tl.{'max' if operation == 'max' else 'sum'}(e{n}, 0)",
        ]
        if over == "layer":
            text += {"norm": [f"a{n} = tl.sqrt(a{n})"], "mean": [f"a{n} = a{n} / entries"]}.get(operation, [])
        text.append(f"tl.store(layers + {n} * A + t, a{n})")
    return text


def conclude(rule: Rule) -> list[str]:
    """Return code that reduces tensors to the learner."""
    text = []
    for n, (operation, over) in enumerate(rule.reductions):
        if over != "learner":
            continue
        text += [f"e{n} = tl.full([BLOCK], {neutral(operation)}, tl.float64)", "for c in range(0, A, BLOCK):"]
        if n in atomic(rule):  # also reset the slots for the next step
            text += [
                f"    key = tl.load(slots + {n} * A + c + j, mask=c + j < A, other={NOTHING})",
                f"    tl.store(slots + {n} * A + c + j, {NOTHING}, mask=c + j < A)",
                "    found = tl.where(key >= 0, key, key ^ 0x7FFFFFFF).to(tl.float32, bitcast=True).to(tl.float64)",
            ]
        else:
            text.append(f"    found = tl.load(layers + {n} * A + c + j, mask=c + j < A, other={neutral(operation)})")
        if operation == "max":  # a tensor with an infinite or NaN maximum is excluded
            text += [
                "    found = tl.where(tl.abs(found) < float('inf'), found, 0.0)",
                f"    e{n} = tl.maximum(e{n}, tl.where(c + j < A, found, float('-inf')))",
                f"a{n} = tl.max(e{n}, 0)",
            ]
        else:
            text += [f"    e{n} += found", f"a{n} = tl.sum(e{n}, 0)"]
            text += {"norm": [f"a{n} = tl.sqrt(a{n})"], "mean": [f"a{n} = a{n} / entries"]}.get(operation, [])
        text.append(f"tl.store(learner + {n}, a{n}.to(tl.float32))")
    return text


def reduced(rule: Rule) -> list[str]:
    """Return code that loads the results."""
    text = []
    for n, (_, over) in enumerate(rule.reductions):
        if over == "learner":
            text.append(f"r{n} = tl.load(learner + {n})")
        elif over == "layer":
            text.append(f"r{n} = tl.load(layers + {n} * A + t).to(tl.float32)")
        else:
            row = f"number_at(table, {FIRST_ROW}, T, t) + i // (entries // number_at(table, {ROWS_OF}, T, t))"
            text.append(f"r{n} = tl.load(partial + {n} * P + {row}, mask=i < entries, other=0.0)")
    return text
