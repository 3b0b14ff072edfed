"""A colour for each method, the same everywhere: of its curves on light pages, and on dark ones."""

from collections.abc import Iterable

from upgd.methods.registry import METHODS

__all__ = ["colour", "colours", "dark_colour"]

#: For methods that bring no colour of their own; after Tol, which colour-blind people can tell apart.
_SPARE = ("#44AA99", "#AA4499", "#999933", "#DDCC77", "#661100", "#6699CC", "#888888")


def colour(method: str) -> str:
    """The colour of a method's curves, ``"#rrggbb"``."""
    return colours([method])[method]


def colours(methods: Iterable[str]) -> dict[str, str]:
    """The colours of methods that are shown together. Those without a colour of their own get one by their name, and not by
    their order, so that a method looks the same in most figures; another one where that is taken."""
    names = list(dict.fromkeys(methods))
    chosen = {name: METHODS[name].colour for name in names if name in METHODS and METHODS[name].colour}
    for name in names:
        if name not in chosen:
            first = sum(name.encode())
            turns = [_SPARE[(first + i) % len(_SPARE)] for i in range(len(_SPARE))]
            chosen[name] = next((turn for turn in turns if turn not in chosen.values()), turns[0])
    return {name: chosen[name] for name in names}


def dark_colour(method: str) -> str:
    """Its colour on a dark page; ``""`` if it has none of its own."""
    known = METHODS.get(method)
    return known.dark_colour if known is not None else ""
