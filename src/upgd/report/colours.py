"""Colours for the page: the figures' own, and lighter ones where the page is dark."""

from collections.abc import Sequence
from typing import NamedTuple

from upgd.methods import colours as of_methods

__all__ = ["Colours", "colours", "contrast"]

_DARK_PAGE = "#12161c"


class Colours(NamedTuple):
    """One method's, on a light and on a dark page."""

    light: str
    dark: str


def colours(methods: Sequence[str]) -> dict[str, Colours]:
    """A pair of colours for each method."""
    return {
        method: Colours(light, of_methods.dark_colour(method) or _lightened(light))
        for method, light in of_methods.colours(methods).items()
    }


def contrast(one: str, other: str) -> float:
    """The ratio of two colours' luminances, from 1 to 21, as the Web Content Accessibility Guidelines define it."""
    low, high = sorted(_luminance(colour) for colour in (one, other))
    return (high + 0.05) / (low + 0.05)


def _lightened(colour: str) -> str:
    """Mixed with white until it can be seen on the dark page."""
    for share in range(20):
        mixed = _mixed(colour, share / 20)
        if contrast(mixed, _DARK_PAGE) >= 5:
            return mixed
    return "#ffffff"


def _mixed(colour: str, white: float) -> str:
    parts = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(part + (255 - part) * white):02x}" for part in parts)


def _luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
