"""Print a rule as Triton kernels for the step of an optimizer.

``prepare`` counts the step and computes values that all entries of a tensor share: scalars, and the keys of random numbers.
``observe``, for rules with reductions, computes the values to reduce. Its first programs do the work of ``prepare`` in the
same launch, for ``update`` at this step and for ``observe`` at the next one; they write to the half of a buffer that the
other programs do not read. ``combine`` and ``conclude`` reduce the results of ``observe``, and ``update`` writes parameters
and state.

The other modules print parts of them: ``triton_text.py`` contains the text that all rules share, ``triton_shared.py`` prints
what all entries of a tensor share, ``triton_entries.py`` what is computed for each entry, and ``triton_reductions.py`` the
reductions.
"""

import functools
from collections.abc import Sequence
from types import ModuleType

from upgd.kernels import triton_entries as entries
from upgd.kernels import triton_reductions as reductions
from upgd.kernels import triton_shared as shared
from upgd.kernels.modules import module_of
from upgd.kernels.polynomials import COSINE, LOGARITHM, SINE, TANH
from upgd.kernels.source import indented
from upgd.kernels.steps import scalars_of
from upgd.kernels.triton_shared import Narrow, Slots
from upgd.kernels.triton_text import (
    AMP,
    BLOCKS,
    CODING,
    ENTRIES,
    FIRST_BLOCK,
    FIRST_ROW,
    HEAD,
    KERNELS,
    ROWS_OF,
    START,
    WRITE,
    WRITTEN_AT_ONCE,
)
from upgd.methods.tracing import CannotTrace, Rule
from upgd.noise import MIXERS

__all__ = ["check", "kernels", "kernels_for_writing", "source"]


def source(rule: Rule, noise: int, slots: Slots = (), coded: bool = False) -> str:
    """Return the source of a module for a rule; see :class:`upgd.kernels.triton_shared.Narrow` for the arguments."""
    first, radius, angle = MIXERS
    head = HEAD.format(
        first=first,
        radius=radius,
        angle=angle,
        root_half_of_2_31=0x3F3504F3 + (31 << 23),
        logarithm=_polynomial("p", "m", LOGARITHM),
        cosine=_polynomial("cosine", "z", COSINE),
        tanh=_polynomial("p", "y", TANH),
        sine=_polynomial("sine", "z", SINE),
    )
    narrow = Narrow(rule, noise, slots, coded)
    width = shared.widths(narrow)
    by_unit = any(over == "unit" for _, over in rule.reductions)
    pointers = entries.pointers(narrow)
    early = [f"early_ = early + (tl.load(turn) * T + t) * {width.early}"]
    early += [f"early_keys_ = early_keys + (tl.load(turn) * T + t) * {width.early_keys}"]
    early += [f"k{n} = tl.load(early_ + {i})" for i, n in enumerate(shared.early_scalars(rule))]
    return (
        head
        + (CODING if coded else "")
        + KERNELS.format(
            entries=ENTRIES,
            start=START,
            first_piece=FIRST_ROW if by_unit else FIRST_BLOCK,
            pieces=ROWS_OF if by_unit else BLOCKS,
            settings=indented(shared.settings(rule), 4),
            step=indented(shared.step(narrow), 4),
            count=indented(shared.count(narrow), 8),
            scalars=indented(shared.scalars(rule, scalars_of(rule), f"k + t * {width.scalars}"), 8),
            keys=indented(shared.keys(narrow, width), 8),
            early=indented(shared.early(narrow, width), 4),
            amp=indented(list(AMP), 8),
            amp_of_update=indented(list(AMP), 4),
            pointers=indented(pointers, 12),
            pointers_of_update=indented(pointers, 8),
            shared_early=indented(early, 12),
            shared=indented(
                [f"k{n} = tl.load(k + t * {width.scalars} + {i})" for i, n in enumerate(scalars_of(rule))], 8
            ),
            observe=indented(entries.observe_rows(narrow) if by_unit else entries.observe_blocks(narrow), 12),
            combine=indented(reductions.combine(rule), 4),
            conclude=indented(reductions.conclude(rule), 4),
            flip=indented(_flip(rule), 4),
            place=indented(entries.place(narrow), 8),
            noise=indented(entries.noise(narrow, width), 8),
            reduced=indented(reductions.reduced(rule), 8),
            update=indented(entries.update(narrow, width), 8),
        )
    )


def _polynomial(name: str, of: str, coefficients: Sequence[float]) -> str:
    first, *others = coefficients
    return "\n".join([f"    {name} = {first!r}", *(f"    {name} = {name} * {of} + {c!r}" for c in others)])


def _flip(rule: Rule) -> list[str]:
    """Return code that swaps the halves of the buffer for ``observe``, which ``update`` does not read."""
    return ["if tl.program_id(0) == 0:", "    tl.store(turn, 1 - tl.load(turn))"] if rule.reductions else []


@functools.lru_cache(maxsize=256)
def kernels(rule: Rule, noise: int, slots: Slots = (), coded: bool = False) -> ModuleType:
    """Return the module of a rule's kernels; see :func:`source`."""
    return module_of(source(rule, noise, slots, coded))


@functools.cache
def kernels_for_writing() -> ModuleType:
    """Return the module of the kernel that writes numbers to memory."""
    some = range(WRITTEN_AT_ONCE)
    return module_of(
        WRITE.format(
            arguments=", ".join(f'v{n}: "i64"' for n in some),
            writes="\n".join(f"    tl.store(out + offset + {n}, v{n}, mask={n} < count)" for n in some),
        )
    )


def check(rule: Rule) -> None:
    """Raise :class:`upgd.methods.tracing.CannotTrace` if no kernels can be generated from a rule."""
    if rule.uses("bound"):
        raise CannotTrace("its rule uses the bound of the initial distribution")
    shared.scalars(rule, scalars_of(rule), "k")
