"""The official data sets: download addresses and checksums.

Checksums are SHA-256, of the published files (``.gz``) and of their unpacked content; either is accepted. The files behind
the checksums of MNIST's ``.gz`` files and CIFAR-10's batches also match the MD5 sums published on the CIFAR-10 page and in
torchvision.
"""

from dataclasses import dataclass
from typing import Literal

__all__ = ["OFFICIAL", "Download", "Part", "Source"]

Split = Literal["train", "test"]


@dataclass(frozen=True)
class Part:
    """A file of a data set. Files are identified by shape and checksum, not by name."""

    split: Split
    content: Literal["images", "labels", "batch"]
    shape: tuple[int, ...]
    checksums: frozenset[str]
    number: int = 0

    def __str__(self) -> str:
        return f"{self.split} {self.content}" + (f" {self.number}" if self.number else "")


@dataclass(frozen=True)
class Download:
    """A file that is available from several web servers."""

    name: str
    size: int
    sha256: str
    mirrors: tuple[str, ...]


@dataclass(frozen=True)
class Source:
    """An official data set."""

    name: str
    classes: int
    parts: tuple[Part, ...]
    downloads: tuple[Download, ...]
    transposed: bool = False


def _idx(split: Split, count: int, images: tuple[str, ...], labels: tuple[str, ...]) -> tuple[Part, Part]:
    return (
        Part(split, "images", (count, 28, 28), frozenset(images)),
        Part(split, "labels", (count,), frozenset(labels)),
    )


_MNIST_MIRRORS = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
    "https://azureopendatastorage.blob.core.windows.net/mnist/",
    "https://raw.githubusercontent.com/fgnt/mnist/master/",
)
_MNIST_FILES = (
    ("train-images-idx3-ubyte.gz", 9_912_422, "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609"),
    ("train-labels-idx1-ubyte.gz", 28_881, "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c"),
    ("t10k-images-idx3-ubyte.gz", 1_648_877, "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6"),
    ("t10k-labels-idx1-ubyte.gz", 4_542, "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6"),
)

MNIST = Source(
    name="mnist",
    classes=10,
    parts=(
        *_idx(
            "train",
            60_000,
            (_MNIST_FILES[0][2], "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db"),
            (_MNIST_FILES[1][2], "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5"),
        ),
        *_idx(
            "test",
            10_000,
            (_MNIST_FILES[2][2], "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7"),
            (_MNIST_FILES[3][2], "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2"),
        ),
    ),
    downloads=tuple(
        Download(name, size, sha256, tuple(mirror + name for mirror in _MNIST_MIRRORS))
        for name, size, sha256 in _MNIST_FILES
    ),
)

EMNIST = Source(
    name="emnist",
    classes=47,
    parts=(
        *_idx(
            "train",
            112_800,
            ("74295e75e4e9fa2c102147460ee7eb763653d5132d883a84fb88932bfb8d2db4",),
            ("b46d41e5156a0a8aaaa4d18979fdd1588850fa8571018acffd5d93b325a7d6ed",),
        ),
        *_idx(
            "test",
            18_800,
            ("117fc12b015e37ea98bfb2cbba3f77c3782c056cdbd219b87abfc8661d7135db",),
            ("a67cac948379b67270b9a4d0a01c8ec661598accf2f2b1964340b7c83cb175cd",),
        ),
    ),
    downloads=(
        Download(
            "gzip.zip",
            561_753_746,
            "fb9bb67e33772a9cc0b895e4ecf36d2cf35be8b709693c3564cea2a019fcda8e",
            (
                "https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip",
                "https://www.itl.nist.gov/iaui/vip/cs_links/EMNIST/gzip.zip",
            ),
        ),
    ),
    transposed=True,
)

_CIFAR10_BATCHES = (
    "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
    "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
    "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
    "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
    "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
)
_CIFAR10_TEST = "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b"

CIFAR10 = Source(
    name="cifar10",
    classes=10,
    parts=(
        *(
            Part("train", "batch", (10_000, 3, 32, 32), frozenset({sha256}), number)
            for number, sha256 in enumerate(_CIFAR10_BATCHES, 1)
        ),
        Part("test", "batch", (10_000, 3, 32, 32), frozenset({_CIFAR10_TEST})),
    ),
    downloads=(
        Download(
            "cifar-10-binary.tar.gz",
            170_052_171,
            "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
            (
                "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
                "https://cave.cs.toronto.edu/kriz/cifar-10-binary.tar.gz",
                "https://mindspore-website.obs.cn-north-4.myhuaweicloud.com/notebook/datasets/cifar-10-binary.tar.gz",
            ),
        ),
    ),
)

OFFICIAL = {source.name: source for source in (MNIST, EMNIST, CIFAR10)}
