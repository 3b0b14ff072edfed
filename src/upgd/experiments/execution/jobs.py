"""Jobs: chunks of learners that one device computes together, and the checkpoints of unfinished jobs."""

import hashlib
import json
import logging
import os
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from upgd import __version__, writing
from upgd.data.registry import names as registered_data
from upgd.experiments.spec import architecture
from upgd.experiments.spec.declare import Experiment, stream_of
from upgd.experiments.spec.engine import ENGINE
from upgd.population import Learner
from upgd.store import Key
from upgd.streams import Stream

__all__ = ["Checkpoints", "Job", "Snapshot", "plan", "whole"]

log = logging.getLogger("upgd.experiments")


@dataclass(frozen=True)
class Job:
    """Learners that are computed together, with everything that another process needs to compute them."""

    problem: str
    options: dict[str, Any]
    network: str
    steps: int
    learners: tuple[Learner, ...]

    @property
    def learner_steps(self) -> int:
        """The number of learner-steps."""
        return self.steps * len(self.learners)

    def key(self, learner: Learner) -> Key:
        """Return the key under which a learner's result is stored."""
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
    def digest_of(self) -> Mapping[Learner, str]:
        """The digest of each learner's key. A part of a job shares the mapping of its job, which may hold more learners."""
        return {learner: self.key(learner).digest for learner in self.learners}

    @cached_property
    def digests(self) -> frozenset[str]:
        """The digests of its learners' keys."""
        return frozenset(self.digest_of[learner] for learner in self.learners)

    @cached_property
    def name(self) -> str:
        """The name of its files, the same on every machine."""
        return hashlib.sha256("".join(self.digest_of[learner] for learner in self.learners).encode()).hexdigest()[:24]

    def part(self, learners: Iterable[Learner]) -> "Job":
        """Return a job with only these learners."""
        part = replace(self, learners=tuple(learners))
        part.__dict__["digest_of"] = self.digest_of  # computing 200,000 digests takes seconds
        return part.like(self)

    @cached_property
    def built(self) -> tuple[Stream, nn.Module]:
        """The stream and the network; they must not be modified."""
        stream = stream_of(self.problem, self.options)
        return stream, architecture.network(self.network, stream)

    def like(self, other: "Job | None") -> "Job":
        """Return the job, reusing the other's stream and network if they are the same and already created."""
        same = other is not None and all(
            getattr(self, name) == getattr(other, name) for name in ("problem", "options", "network")
        )
        if same and "built" in vars(other):
            vars(self)["built"] = vars(other)["built"]
        return self

    def without(self, digests: Collection[str]) -> "Job":
        """Return the job without the learners with these keys."""
        return self.part(one for one in self.learners if self.digest_of[one] not in digests)

    def __reduce__(self) -> tuple[Any, ...]:
        # Do not pickle cached values: a part would send the digests of the whole job to another process.
        return Job, tuple(getattr(self, one.name) for one in fields(self))

    def uses(self) -> list[tuple[str, str]]:
        """Return kind and name of everything that may come from a plugin."""
        methods = dict.fromkeys(learner.method for learner in self.learners)
        data = [("data set", name) for name in registered_data() if self.problem.endswith(f"-{name}")]
        return [("stream", self.problem), *data, ("network", self.network), *(("method", name) for name in methods)]

    def describe(self) -> str:
        """Return a description for messages: its methods and its number of learners."""
        methods = ", ".join(dict.fromkeys(learner.method for learner in self.learners))
        return f"{methods} × {len(self.learners)}"

    def to_json(self) -> str:
        learners = [{"method": one.method, "seed": one.seed, **dict(one.values)} for one in self.learners]
        fields = ("problem", "options", "network", "steps")
        return json.dumps({**{name: getattr(self, name) for name in fields}, "learners": learners})

    @classmethod
    def from_json(cls, text: str) -> "Job":
        values = json.loads(text)
        return cls(**values | {"learners": tuple(Learner(**learner) for learner in values["learners"])})


def whole(experiment: Experiment) -> Job:
    """Return the experiment as a single job."""
    return Job(
        experiment.problem, dict(experiment.options), experiment.network, experiment.steps, experiment.learners()
    )


def plan(job: Job, workers: int, most: int, *, mixed: bool = False) -> list[Job]:
    """Split a job into jobs of at most ``most`` learners, with work for all workers.

    Jobs of different kinds alternate, so that results of all methods are available early. Learners whose computation has the
    same shape stay together. Learners of different shapes share a job only if jobs are ``mixed``, for a device that computes
    several groups at the same time.
    """
    kinds: dict[Any, list[Learner]] = {}
    for learner in job.learners:
        kinds.setdefault(learner.kind, []).append(learner)
    size = max(1, min(most, -(-len(job.learners) // workers)))
    together = [[learner for learners in kinds.values() for learner in learners]] if mixed else kinds.values()
    pieces = [sorted(_even_pieces(own, -(-len(own) // size)), key=len, reverse=True) for own in together]
    return [
        job.part(piece)
        for turn in zip_longest(*pieces, fillvalue=())
        for piece in sorted(turn, key=len, reverse=True)
        if piece
    ]


def _even_pieces(learners: Sequence[Learner], pieces: int) -> list[Sequence[Learner]]:
    bounds = [len(learners) * i // pieces for i in range(pieces + 1)]
    return [learners[a:b] for a, b in pairwise(bounds)]


@dataclass(frozen=True)
class Snapshot:
    """An unfinished job: the state of its population, and the seconds spent so far."""

    state: dict[str, Tensor]
    seconds: float


class Checkpoints:
    """A folder with snapshots of unfinished jobs. Files are written atomically.

    The last two snapshots of every job are kept. Snapshots have a digest: a damaged one is renamed, and the job resumes from
    the previous one.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def beside(cls, store: Path) -> "Checkpoints":
        """Return the checkpoints of a store's sweeps; symbolic links are resolved."""
        store = Path(os.path.realpath(store))
        return cls(store.with_name(f"{store.name}.checkpoints"))

    def save(self, job: Job, snapshot: Snapshot) -> None:
        """Save the state of a job; the previous snapshot is kept until this one is completely on disk."""
        content = {
            "job": job.name,
            "state": snapshot.state,
            "seconds": snapshot.seconds,
            "package": __version__,
        }
        current, previous = self._files(job.name)
        partial = current.with_suffix(".partial")
        try:
            self.folder.mkdir(exist_ok=True)
            with writing.whole(self._description(job.name)) as file:
                file.write(job.to_json().encode())
            previous.unlink(missing_ok=True)  # never more than two snapshots
            with writing.whole(partial) as file:
                torch.save(content | {"digest": _digest(content)}, file)
            if current.exists():
                current.replace(previous)
            partial.replace(current)
        except (OSError, RuntimeError) as error:  # torch raises RuntimeError if it cannot write
            partial.unlink(missing_ok=True)
            raise OSError(
                f"unfinished work cannot be saved in {self.folder} ({_reason(error)}); finished results are kept: free some "
                "space or make the folder writable, and run the same command again"
            ) from error

    def load(self, job: Job) -> Snapshot | None:
        """Return the last intact snapshot of a job; None if there is none, or only one of another version."""
        found, warnings = None, []
        for path in self._files(job.name):
            try:
                found = _read(path, job)
                break
            except FileNotFoundError:
                continue
            except _OtherVersion as error:
                warnings.append(f"{path} cannot be used ({error})")
            except Exception as error:  # torch raises many kinds of errors
                warnings.append(f"{path} is damaged ({_reason(error)}) and was {_set_aside(path)}")
        for warning in warnings:
            log.warning(
                "%s; its learners %s", warning, "start again" if found is None else "resume from an earlier one"
            )
        return found

    def unfinished(self, missing: Job, stored: Set[str]) -> list[Job]:
        """Return the unfinished jobs of these learners; files of jobs whose learners are all stored are removed."""
        begun: list[Job] = []
        for path in self.folder.glob("*.partial"):
            path.unlink(missing_ok=True)
        for path in sorted(self.folder.glob("*.json")):
            try:
                job = Job.from_json(path.read_text())
                if job.name != path.stem:
                    raise ValueError("it describes other learners, or learners of another version")
            except (ValueError, TypeError, KeyError, AttributeError, OSError) as error:
                log.warning(
                    "%s cannot be used (%s) and was %s; its learners start again", path, error, _set_aside(path)
                )
                continue
            if job.digests <= missing.digests and not any(job.digests & other.digests for other in begun):
                begun.append(job)
            elif job.digests <= stored:
                self.remove(job)
        return begun

    def remove(self, job: Job) -> None:
        """Remove the files of a job, and the folder if it is empty."""
        for path in (*self._files(job.name), self._description(job.name)):
            path.unlink(missing_ok=True)
        if self.folder.is_dir() and not any(self.folder.iterdir()):
            self.folder.rmdir()

    def _files(self, name: str) -> tuple[Path, Path]:
        """Return the paths of the last snapshot and of the previous one."""
        return self.folder / f"{name}.pt", self.folder / f"{name}.previous"

    def _description(self, name: str) -> Path:
        return self.folder / f"{name}.json"


class _OtherVersion(ValueError):
    """An intact snapshot of another version, which cannot be used."""


def _read(path: Path, job: Job) -> Snapshot:
    content = torch.load(path, weights_only=True)
    if (version := content["package"]) != __version__:
        raise _OtherVersion(f"it is from upgd {version}, this is {__version__}")
    if content.pop("digest", None) != _digest(content):
        raise ValueError("its checksum is wrong")
    if content["job"] != job.name:
        raise ValueError("it is a snapshot of other learners")
    return Snapshot(content["state"], content["seconds"])


def _digest(content: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a snapshot: of every tensor with its name, type and shape, and of all other entries."""
    state: Mapping[str, Tensor] = content["state"]
    said = {name: value for name, value in content.items() if name != "state"}
    said["tensors"] = {name: (str(tensor.dtype), tuple(tensor.shape)) for name, tensor in state.items()}
    digest = hashlib.sha256(json.dumps(said, sort_keys=True).encode())
    for name in sorted(state):
        digest.update(state[name].contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _set_aside(path: Path) -> str:
    """Rename a damaged file so that it is no longer used, and return what was done, in words."""
    aside = path.with_name(f"{path.name}.damaged")
    try:
        path.replace(aside)
    except OSError:
        return "not renamed"
    return f"renamed to {aside.name}"


def _reason(error: BaseException) -> str:
    """Describe an error in one line; if torch failed because of a system error, describe that."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__context__
    if isinstance(cause, OSError) and cause.strerror:
        return cause.strerror
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
