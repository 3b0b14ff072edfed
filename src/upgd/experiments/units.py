"""Units of work: chunks of learners that one device computes side by side, and where an unfinished one goes on."""

import hashlib
import json
import logging
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from upgd import __version__
from upgd.experiments.declare import Experiment
from upgd.population import Learner
from upgd.store import Key

__all__ = ["ENGINE", "Checkpoints", "Snapshot", "Unit", "plan"]

#: The version of what the engine computes. Whoever changes numbers on purpose raises it, and old results stay what they are.
ENGINE = 2

log = logging.getLogger("upgd.experiments")


@dataclass(frozen=True)
class Unit:
    """Learners that are computed together, and all that another process needs to know to do so."""

    problem: str
    options: dict[str, Any]
    network: str
    steps: int
    learners: tuple[Learner, ...]

    @property
    def learner_steps(self) -> int:
        """How much work it is."""
        return self.steps * len(self.learners)

    def key(self, learner: Learner) -> Key:
        """What a learner's result is stored under."""
        return Key(
            problem=self.problem,
            options=self.options,
            network=self.network,
            method=learner.method,
            settings=learner.settings(),
            seed=learner.seed,
            steps=self.steps,
            engine=ENGINE,
        )

    @cached_property
    def digests(self) -> frozenset[str]:
        """The keys of its learners."""
        return frozenset(self.key(learner).digest for learner in self.learners)

    @cached_property
    def name(self) -> str:
        """A name for its files, the same on every machine."""
        return hashlib.sha256("".join(self.key(learner).digest for learner in self.learners).encode()).hexdigest()[:24]

    def without(self, digests: Collection[str]) -> "Unit":
        """The unit without the learners that have these keys."""
        return replace(self, learners=tuple(one for one in self.learners if self.key(one).digest not in digests))

    def describe(self) -> str:
        """For whom to watch: its methods and how many learners it has."""
        methods = ", ".join(dict.fromkeys(learner.method for learner in self.learners))
        return f"{methods} × {len(self.learners)}"

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Unit":
        values = json.loads(text)
        return cls(**values | {"learners": tuple(Learner(**learner) for learner in values["learners"])})


def whole(experiment: Experiment) -> Unit:
    """The experiment as a single unit."""
    return Unit(
        experiment.problem, dict(experiment.options), experiment.network, experiment.steps, experiment.learners()
    )


def plan(unit: Unit, workers: int, most: int, *, mixed: bool = False) -> list[Unit]:
    """Divide a unit into units of at most ``most`` learners, with work for all workers.

    Units of different kinds take turns, so that a comparison has all its methods early. Learners whose computation has the
    same shape stay together. Those of different shapes share a unit only if units are ``mixed``: for a device that works on
    several groups at the same time.
    """
    kinds: dict[Any, list[Learner]] = {}
    for learner in unit.learners:
        kinds.setdefault(learner.kind, []).append(learner)
    size = max(1, min(most, -(-len(unit.learners) // workers)))
    together = [[learner for learners in kinds.values() for learner in learners]] if mixed else kinds.values()
    pieces = [sorted(_even_pieces(own, -(-len(own) // size)), key=len, reverse=True) for own in together]
    return [
        Unit(unit.problem, unit.options, unit.network, unit.steps, tuple(piece))
        for turn in zip_longest(*pieces, fillvalue=())
        for piece in sorted(turn, key=len, reverse=True)
        if piece
    ]


def _even_pieces(learners: Sequence[Learner], pieces: int) -> list[Sequence[Learner]]:
    bounds = [len(learners) * i // pieces for i in range(pieces + 1)]
    return [learners[a:b] for a, b in pairwise(bounds)]


@dataclass(frozen=True)
class Snapshot:
    """An unfinished unit: where its population is, and how many seconds it took to come there."""

    state: dict[str, Tensor]
    seconds: float


class Checkpoints:
    """A folder with the snapshots of unfinished units. Files appear whole or not at all."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def beside(cls, store: Path) -> "Checkpoints":
        """Those of a store's sweeps."""
        return cls(store.with_name(f"{store.name}.checkpoints"))

    def save(self, unit: Unit, snapshot: Snapshot) -> None:
        """Keep where a unit is; the snapshot before this one stays until all of it is on the disk."""
        content = {"state": snapshot.state, "seconds": snapshot.seconds, "package": __version__}
        try:
            self.folder.mkdir(exist_ok=True)
            _write_whole(self._description(unit.name), lambda file: file.write(unit.to_json().encode()))
            _write_whole(self._file(unit.name), lambda file: torch.save(content, file))
        except OSError as error:
            raise OSError(
                f"unfinished work cannot be saved in {self.folder} ({error.strerror or error}); what was finished is kept: "
                "make room, or give yourself the right to write there, and give the same command again"
            ) from error

    def load(self, unit: Unit) -> Snapshot | None:
        """Where the unit was, if somebody has begun it; a file of another version, or a damaged one, means the beginning."""
        try:
            content = torch.load(self._file(unit.name), weights_only=True)
            if content["package"] != __version__:
                raise ValueError(f"it is of upgd {content['package']}, this is {__version__}")
            return Snapshot(content["state"], content["seconds"])
        except FileNotFoundError:
            return None
        except Exception as error:  # torch raises whatever its reader stumbles over
            log.warning("%s cannot be read (%s); its learners begin again", self._file(unit.name), error)
            return None

    def unfinished(self, missing: Unit, finished: Callable[[frozenset[str]], bool]) -> list[Unit]:
        """The units of these learners that somebody has begun; what is left behind by the dead or finished is removed."""
        begun: list[Unit] = []
        for path in self.folder.glob("*.partial"):
            path.unlink(missing_ok=True)
        for path in sorted(self.folder.glob("*.json")):
            try:
                unit = Unit.from_json(path.read_text())
            except (ValueError, TypeError, KeyError, OSError) as error:
                log.warning("%s cannot be read (%s); its learners begin again", path, error)
                continue
            if unit.digests <= missing.digests and not any(unit.digests & other.digests for other in begun):
                begun.append(unit)
            elif finished(unit.digests):
                self.remove(unit)
        return begun

    def remove(self, unit: Unit) -> None:
        """Forget a unit; and the folder, when nothing is left in it."""
        self._file(unit.name).unlink(missing_ok=True)
        self._description(unit.name).unlink(missing_ok=True)
        if self.folder.is_dir() and not any(self.folder.iterdir()):
            self.folder.rmdir()

    def _file(self, name: str) -> Path:
        return self.folder / f"{name}.pt"

    def _description(self, name: str) -> Path:
        return self.folder / f"{name}.json"


def _write_whole(path: Path, write: Callable[[IO[bytes]], Any]) -> None:
    partial = path.with_suffix(f".{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
