"""Problems as functions of (seed, step).

Streams are stateless: ``stream.chunk(seeds, start, length)`` returns the same samples regardless of earlier calls, chunk
boundaries, the other seeds requested and the device.

    >>> stream = make("input-permuted-digits")
    >>> chunk = stream.chunk(seeds=[0, 1], start=1_000, length=3)
    >>> chunk.inputs().shape, chunk.targets.shape
    (torch.Size([2, 3, 8, 8]), torch.Size([2, 3]))

``contract`` defines the :class:`Stream` protocol and ``registry`` maps names to problems. ``images``, ``labels`` and
``features`` implement problems over data sets; ``toy`` and ``bits`` generate their inputs. ``loops`` adapts streams to
custom training loops, and ``shuffle`` provides random permutations.
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
