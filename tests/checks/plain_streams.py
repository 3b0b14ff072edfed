"""Reference implementations of all streams in plain Python, one sample at a time, written from their descriptions.

Integers are Python's, so that nothing overflows; a permutation is a list. Only the layout of the counters (see
``upgd.noise``) and the order of the steps are shared with the package.
"""

import math
import struct
from collections.abc import Sequence
from functools import lru_cache

INITIAL_WEIGHTS, NOISE, TASK, SAMPLE_ORDER, INPUTS, RESET, UNITS, TARGET, LABELS, SUBSET, MIXTURE = range(11)
WORD = 1 << 32


def philox(counter: list[int], key: list[int]) -> list[int]:
    for _ in range(10):
        left, right = counter[0] * 0xD2511F53, counter[2] * 0xCD9E8D57
        counter = [right // WORD ^ counter[1] ^ key[0], right % WORD, left // WORD ^ counter[3] ^ key[1], left % WORD]
        key = [(key[0] + 0x9E3779B9) % WORD, (key[1] + 0xBB67AE85) % WORD]
    return counter


def words(seed: int, purpose: int, step: int, count: int) -> list[int]:
    drawn: list[int] = []
    for block in range((count + 3) // 4):
        drawn += philox([block, step % WORD, step // WORD, purpose], [seed % WORD, seed // WORD % WORD])
    return drawn[:count]


@lru_cache(maxsize=1000)
def permutation(seed: int, task: int, size: int) -> list[int]:
    drawn = words(seed, TASK, task, 2 * size)
    keys = [drawn[2 * i] * WORD + drawn[2 * i + 1] for i in range(size)]
    signed = [key - WORD * WORD if key >= WORD * WORD // 2 else key for key in keys]
    return sorted(range(size), key=lambda i: (signed[i], i))


def turn(word: int, base: int) -> int:
    word ^= word // 2**16
    word = word * 0x7FEB352D % WORD
    word ^= word // 2**15
    word = word * 0x846CA68B % WORD
    word ^= word // 2**16
    return word * base // WORD


@lru_cache(maxsize=1000)
def bases(size: int) -> tuple[int, int, int]:
    root = 1
    while root * root < size:
        root += 1
    candidates = [base for base in range(root, root + root % 2 + root // 8 + 1) if base % 2 == 0] or [root + 1]
    covered = {base: base * ((size + base - 1) // base) for base in candidates}
    high = min(candidates, key=lambda base: (covered[base], base))
    low = covered[high] // high
    rounds = 8
    while rounds * math.log2(max(low, 2)) < 48:
        rounds += 2
    return high, low, rounds


def sample(seed: int, step: int, task_length: int, size: int, purpose: int = SAMPLE_ORDER) -> int:
    """The number of the sample at ``step``."""
    task, within = divmod(step, task_length)
    number_of_pass = task * ((task_length + size - 1) // size) + within // size
    high, low, rounds = bases(size)
    keys = words(seed, purpose, number_of_pass, rounds)
    place = within % size
    while True:
        a, b = divmod(place, low)
        for i in range(0, rounds, 2):
            a = (a + turn(b ^ keys[i], high)) % high
            b = (b + turn(a ^ keys[i + 1], low)) % low
        place = a * low + b
        if place < size:
            return place


def uniform(word: int) -> float:
    return (word + 0.5) / WORD


def normals(seed: int, step: int, count: int) -> list[float]:
    drawn = [uniform(word) for word in words(seed, INPUTS, step, count)]
    out: list[float] = []
    for a, b in zip(drawn[0::2], drawn[1::2], strict=True):
        out += [
            math.sqrt(-2 * math.log(a)) * math.cos(2 * math.pi * b),
            math.sqrt(-2 * math.log(a)) * math.sin(2 * math.pi * b),
        ]
    return out


def rounded(number: float) -> float:
    """To float32 and back."""
    return float(struct.unpack("f", struct.pack("f", number))[0])


def toy_changing_inputs(seed: int, step: int, task_length: int) -> tuple[list[float], list[float]]:
    x = normals(seed, step, 16)
    first = step // task_length % 8 * 2
    return x, [x[first] + x[first + 1]]


def toy_changing_outputs(seed: int, step: int, task_length: int) -> tuple[list[float], list[float]]:
    x = normals(seed, step, 16)
    return x, [x[0] + x[1] if step // task_length % 2 == 0 else -x[0] - x[1]]


def utility_quality(seed: int, step: int, task_length: int) -> tuple[list[float], list[float]]:
    x = [uniform(word) - 0.5 for word in words(seed, INPUTS, step, 5)]
    i, j = permutation(seed, 0, 5)[:2]
    return x, [x[i] + x[j]]


def bit_flipping(seed: int, step: int, task_length: int) -> tuple[list[float], list[float]]:
    slow = [word >> 31 for word in words(seed, TASK, 0, 15)]
    for flip in range(1, step // task_length + 1):
        slow[words(seed, TASK, flip, 1)[0] * 15 // WORD] ^= 1
    x = slow + [word >> 31 for word in words(seed, INPUTS, step, 5)]
    signs = [1 if word >> 31 else -1 for word in words(seed, TARGET, 100, 101)]
    y = signs[100]
    for unit in range(100):
        weights = [1 if word >> 31 else -1 for word in words(seed, TARGET, unit, 21)]
        threshold = 0.7 * 21 - weights.count(-1)
        if sum(w * bit for w, bit in zip(weights, [*x, 1], strict=True)) > threshold:
            y += signs[unit]
    return [float(bit) for bit in x], [float(y)]


def label_permuted_features(
    features: Sequence[Sequence[float]], labels: Sequence[int], seed: int, step: int, task_length: int
) -> tuple[list[float], int]:
    which = sample(seed, step, task_length, len(labels))
    return list(features[which]), permutation(seed, step // task_length, max(labels) + 1)[labels[which]]


def pixels_of(image: Sequence[int], white: int) -> list[float]:
    return [rounded((value / white - 0.5) / 0.5) for value in image]


def class_pair(
    images: Sequence[Sequence[int]], labels: Sequence[int], white: int, seed: int, step: int, task_length: int
) -> tuple[list[float], int]:
    of_class = [[i for i, label in enumerate(labels) if label == one] for one in sorted(set(labels))]
    size = min(map(len, of_class))
    pairs = [(a, b) for a in range(len(of_class)) for b in range(a + 1, len(of_class))]
    task = step // task_length
    pair = pairs[sample(seed, task, len(pairs), len(pairs), TASK)]
    place = sample(seed, step, task_length, 2 * size)
    output = place // size
    image = images[of_class[pair[output]][place % size]]
    return pixels_of(image, white), 1 - output if words(seed, LABELS, task, 1)[0] >> 31 else output


def image(
    family: str, images: Sequence[Sequence[int]], labels: Sequence[int], white: int, classes: int, seed: int, step: int,
    task_length: int, drift: int = 0,
) -> tuple[list[float], int]:  # fmt: skip
    """Flattened pixels and the class. A task of ``random-label`` is one pass over as many images as it has steps."""
    task = step // task_length
    if family == "random-label":
        place = sample(seed, step, task_length, task_length)
        which = sample(seed, place, len(labels), len(labels), SUBSET)
        return pixels_of(images[which], white), words(seed, LABELS, task, task_length)[place] * classes // WORD
    if family == "class-pairs":
        return class_pair(images, labels, white, seed, step, task_length)
    if task > 0 and uniform(words(seed, MIXTURE, step, 1)[0]) >= (step % task_length + 1) / (drift + 1):
        task -= 1
    which = sample(seed, step, len(labels) if family == "stationary" else task_length, len(labels))
    pixels = pixels_of(images[which], white)
    label = labels[which]
    if family == "input-permuted":
        pixels = [pixels[source] for source in permutation(seed, task, len(pixels))]
    if family == "output-permuted":
        label = permutation(seed, task, classes)[label]
    return pixels, label
