"""Problems as functions of (seed, step).

A stream has no state: ``stream.chunk(seeds, start, length)`` gives the same samples whatever was asked before, in
whatever pieces, for one seed or for many, on any device.

    >>> stream = make("input-permuted-digits")
    >>> chunk = stream.chunk(seeds=[0, 1], start=1_000, length=3)
    >>> chunk.inputs().shape, chunk.targets.shape
    (torch.Size([2, 3, 8, 8]), torch.Size([2, 3]))

``registry`` knows the problems by name, ``contract`` says what a stream is. ``images``, ``labels`` and ``features``
are problems over data sets, ``toy`` and ``bits`` compute their inputs. ``loops`` is for training loops of your own,
``shuffle`` permutes.
"""

from upgd.streams.bits import BitFlipping
from upgd.streams.contract import Chunk, Stream, seed_tensor
from upgd.streams.features import LabelPermutedFeatures
from upgd.streams.images import InputPermuted, OutputPermuted, Stationary
from upgd.streams.labels import ClassPairs, RandomLabels
from upgd.streams.loops import StreamDataset, iterate
from upgd.streams.registry import make, names, register
from upgd.streams.toy import ToyChangingInputs, ToyChangingOutputs, UtilityQuality

__all__ = [
    "BitFlipping",
    "Chunk",
    "ClassPairs",
    "InputPermuted",
    "LabelPermutedFeatures",
    "OutputPermuted",
    "RandomLabels",
    "Stationary",
    "Stream",
    "StreamDataset",
    "ToyChangingInputs",
    "ToyChangingOutputs",
    "UtilityQuality",
    "iterate",
    "make",
    "names",
    "register",
    "seed_tensor",
]
