"""Colours of the page: those of the figures, with lighter variants for dark mode."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from upgd.experiments.analysis.figures import luminance
from upgd.methods import colours as of_methods

__all__ = ["Colours", "colours", "contrast"]

_DARK_PAGE = "#12161c"


class Colours(NamedTuple):
    """The colours of one method in light and dark mode."""

    light: str
    dark: str


def colours(methods: Sequence[str]) -> dict[str, Colours]:
    """Return a pair of colours for each method."""
    return {
        method: Colours(light, of_methods.dark_colour(method) or _lightened(light))
        for method, light in of_methods.colours(methods).items()
    }


def contrast(one: str, other: str) -> float:
    """Return the contrast ratio of two colours, from 1 to 21, as defined by the Web Content Accessibility Guidelines."""
    low, high = sorted(luminance(np.array(_parts(colour)) / 255) for colour in (one, other))
    return (high + 0.05) / (low + 0.05)


def _lightened(colour: str) -> str:
    """Mix the colour with white until it is visible on the dark page."""
    for share in range(20):
        mixed = _mixed(colour, share / 20)
        if contrast(mixed, _DARK_PAGE) >= 5:
            return mixed
    return "#ffffff"


def _mixed(colour: str, white: float) -> str:
    return "#" + "".join(f"{round(part + (255 - part) * white):02x}" for part in _parts(colour))


def _parts(colour: str) -> list[int]:
    """Return the red, green and blue parts of a colour, from 0 to 255."""
    return [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
