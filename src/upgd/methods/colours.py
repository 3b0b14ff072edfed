"""The colour of each method's curves, on light and on dark pages."""

from collections.abc import Iterable

from upgd.methods.registry import METHODS

__all__ = ["colour", "colours", "dark_colour"]

#: For methods without a colour, from Tol's palette for colour-blind readers.
_SPARE = ("#44AA99", "#AA4499", "#999933", "#DDCC77", "#661100", "#6699CC", "#888888")


def colour(method: str) -> str:
    """Return the colour of a method's curves, ``"#rrggbb"``."""
    return colours([method])[method]


def colours(methods: Iterable[str]) -> dict[str, str]:
    """Return the colours of methods that are shown together. Methods without a colour get one that depends on their name, not
    on their order, so that it is the same in most figures; if it is taken, they get another one."""
    names = list(dict.fromkeys(methods))
    chosen = {name: METHODS[name].colour for name in names if name in METHODS and METHODS[name].colour}
    for name in names:
        if name not in chosen:
            first = sum(name.encode())
            turns = [_SPARE[(first + i) % len(_SPARE)] for i in range(len(_SPARE))]
            chosen[name] = next((turn for turn in turns if turn not in chosen.values()), turns[0])
    return {name: chosen[name] for name in names}


def dark_colour(method: str) -> str:
    """Return the method's colour on a dark page; ``""`` if it does not define one."""
    known = METHODS.get(method)
    return known.dark_colour if known is not None else ""
