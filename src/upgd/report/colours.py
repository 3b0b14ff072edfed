"""Colours for the page: the figures' own, and lighter ones where the page is dark."""

from collections.abc import Sequence
from typing import NamedTuple

from upgd.experiments.figures import COLOURS

__all__ = ["Colours", "colours", "contrast"]

#: For methods that have no colour of their own.
_OTHERS = ("#44AA99", "#AA4499", "#999933", "#117733", "#DDCC77", "#661100", "#6699CC")
_DARK_PAGE = "#12161c"
#: The same hues on a dark page, far enough from it and from one another.
_ON_DARK = {
    "upgd": "#3d9be0",
    "upgd-nonprotecting": "#a6d8f5",
    "ups": "#9d8ff0",
    "ups-even": "#cfcfcf",
    "sgd": "#8f8f8f",
    "sgdw": "#ee6a2c",
    "adamw": "#14b287",
    "pgd": "#f0b3d4",
    "anti-pgd": "#d0679a",
    "shrink-and-perturb": "#f2b52e",
}


class Colours(NamedTuple):
    """One method's, on a light and on a dark page."""

    light: str
    dark: str


def colours(methods: Sequence[str]) -> dict[str, Colours]:
    """A pair of colours for each method."""
    others = iter(_OTHERS * (1 + len(methods) // len(_OTHERS)))
    chosen = {}
    for method in dict.fromkeys(methods):
        light = COLOURS.get(method) or next(others)
        chosen[method] = Colours(light, _ON_DARK.get(method) or _lightened(light))
    return chosen


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
