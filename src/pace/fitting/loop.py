"""The course of a fit: epochs over all images, or steps over minibatches, then refining. It can be left and resumed anywhere.

Every step is the same three operations: an E-step leaves statistics, those of all processes are added up, and an M-step turns
them into concepts. All that a fit knows between two batches is in its `Course`, which is what a checkpoint holds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pace.fitting.checkpoints import Checkpoint, Saved
from pace.fitting.distributed import Team
from pace.model.feeding import Chunk, Feed, Lazy, Visits, bytes_per_image
from pace.model.gaussians import Prior
from pace.model.learning import Concepts, Expectation, Memory, Settings, mixtures, under, update
from pace.model.objective import Bound
from pace.model.refining import Refinement, refine
from pace.model.selecting import Selection
from pace.model.statistics import Statistics
from pace.observations import Observations
from pace.progress import Advance


class Start(NamedTuple):
    """Where a fit begins."""

    concepts: Concepts
    prior: Prior
    selection: Selection | None = None  # how the number of concepts was found
    interrupted: bool = False  # before all starts were compared


_ROUNDS = 6  # of mixing, in a shuffle
_LOOKED_AT = 1000  # images by which it is told whether the prediction follows from the concepts
_FAITHFUL = 0.99  # the share of them for which it must


@dataclass(frozen=True)
class Plan:
    """How long to learn, and in which way."""

    family: str
    epochs: int
    least_gain: float  # of the bound, in an epoch
    minibatch: int | None  # images in a step; None: all of them, remembering each
    rate: Callable[[int], float]  # weight of the t-th minibatch, t = 1, 2, …
    past: Statistics | None  # what is known before the first
    seed: int
    refinement: Refinement | None
    refine_anyway: bool  # also where concepts are better left as they are

    def pairs_of(self, perturbed: Observations | None) -> Observations | None:
        """The views that EM learns from beside the images: none where refining comes after it, which is where they count."""
        return perturbed if self.refinement is None else None


@dataclass
class Course:
    """How far a fit has come."""

    concepts: Concepts
    prior: Prior
    selection: Selection | None = None
    statistics: Statistics | None = None  # what the concepts were learned from
    bounds: list[Bound] = field(default_factory=list)
    steps: int = 0  # minibatches so far
    converged: bool = False
    interrupted: bool = False
    finished: bool = False
    # The pass under way: rounds done, and the sums and memories of this process.
    rounds: int = 0
    sums: Statistics | None = None
    memory: Memory | None = None
    # Refining: what it was doing, then what it came to; the last pass for these is under way.
    refining: dict[str, Tensor] | None = None
    refined: Concepts | None = None
    refinement: npt.NDArray[np.float64] = field(default_factory=lambda: np.empty((0, 3)))


class Fitting:
    """One fit. `run` returns how it ended."""

    def __init__(
        self,
        observations: Observations,
        perturbed: Observations | None,
        settings: Settings,
        plan: Plan,
        team: Team,
        checkpoint: Checkpoint | None,
        advance: Advance,
        keep: bool = False,
    ):
        self._observations, self._perturbed, self._settings, self._plan = observations, perturbed, settings, plan
        self._team, self._checkpoint, self._advance, self._keep = team, checkpoint, advance, keep
        self._look_at(plan.pairs_of(perturbed))

    def run(self, start: Callable[[], Start]) -> Course:
        """From the start or, where there is a checkpoint, from there. Ctrl-C ends it with what was learned so far.

        At the end the checkpoint is removed or, to be kept, holds the end. Of several processes none can stop alone: there
        Ctrl-C is raised.
        """
        saved = None if self._checkpoint is None else self._checkpoint.load()
        self._course = self._begin(start) if saved is None else self._restored(saved)
        if self._course.refined is not None:
            self._look_at(self._perturbed)
        course = self._course
        if course.finished:
            return course
        try:
            if not course.interrupted:
                self._pause()  # the start may have taken long
                self._forget()  # what the start looked at, which a resumed fit has not seen
                if course.refined is None:
                    self._learn()
                if self._plan.refinement is not None:
                    self._refine(self._plan.refinement)
        except KeyboardInterrupt:
            if self._team.size > 1:
                raise
            if course.refined is not None:
                course.concepts = course.refined  # with the H and β of EM
            course.interrupted = True
        course.finished = not course.interrupted
        if self._checkpoint is not None and course.finished:
            if self._keep:
                self._checkpoint.write(self._saved())
            else:
                self._checkpoint.remove()
        return course

    def _look_at(self, perturbed: Observations | None) -> None:
        """From here on, at the images and these views of them."""
        self._pair = perturbed
        self._views = [self._observations] if perturbed is None else [self._observations, perturbed]
        self._negatives = None if perturbed is None else self._settings.negatives
        self._visits = Visits(len(self._observations), self._negatives, self._team.rank, self._team.size)

    def _forget(self) -> None:
        for view in self._views:
            if isinstance(view, Lazy):
                view.forget()

    # -- the two ways to learn ------------------------------------------------------------------------------------------

    def _learn(self) -> None:
        with self._feed() as self._source:
            if self._plan.minibatch is None:
                self._learn_from_all()
            else:
                self._learn_online(self._plan.minibatch)

    def _learn_from_all(self) -> None:
        """Full-batch EM: every image goes on where the last epoch left it, so that the bound cannot fall."""
        course = self._course
        while len(course.bounds) < self._plan.epochs and not course.converged:
            statistics = self._pass(course.concepts, self._note(len(course.bounds)))
            bound = bound_of(statistics, course.concepts, course.prior, len(self._observations))
            course.concepts = update(course.concepts, statistics, course.prior, self._settings)
            course.statistics = statistics
            course.bounds.append(bound)
            course.converged = self._no_longer_rises([bound.total for bound in course.bounds])
            self._pause()

    def _learn_online(self, size: int) -> None:
        """Online variational Bayes: the concepts are learned anew after every minibatch, from a running average.

        Every epoch visits the images in an order of its own. Nothing is kept of an image.
        """
        course, total = self._course, len(self._observations)
        in_epoch = -(-total // size)
        while course.steps < self._plan.epochs * in_epoch and not course.converged:
            epoch, number = divmod(course.steps, in_epoch)
            chosen = self._minibatch(course.steps, size)
            visits = Visits(len(chosen), self._negatives, self._team.rank, self._team.size)
            expectation = Expectation(self._source, course.concepts, self._settings, self._chunk)
            fresh = expectation.no_statistics()
            report = self._report(self._note(epoch))
            expectation.add(visits, 0, len(visits), fresh, None, report, chosen, self._upcoming(course.steps + 1, size))
            fresh = self._team.total(fresh)
            bound = bound_of(fresh, course.concepts, course.prior, total)
            if course.statistics is not None:
                fresh = course.statistics.blended(fresh, self._plan.rate(course.steps + 1), total)
            course.concepts = update(course.concepts, fresh, course.prior, self._settings)
            course.statistics = fresh
            course.bounds.append(bound)
            course.steps += 1
            if number == in_epoch - 1:
                course.converged = self._no_longer_rises(self._epoch_bounds(size, in_epoch))
            self._pause()

    def _minibatch(self, step: int, size: int) -> npt.NDArray[np.int64]:
        total = len(self._observations)
        epoch, number = divmod(step, -(-total // size))
        places = np.arange(number * size, min((number + 1) * size, total))
        return shuffled(places, total, (self._plan.seed, epoch))

    def _upcoming(self, step: int, size: int) -> npt.NDArray[np.int64]:
        """The images this process will ask for first at that step."""
        chosen = self._minibatch(step, size)
        visits = Visits(len(chosen), self._negatives, self._team.rank, self._team.size)
        first = visits.part(0, min(self._chunk.units, len(visits))) if len(visits) else None
        return chosen[:0] if first is None else chosen[first.images]

    def _epoch_bounds(self, size: int, in_epoch: int) -> list[float]:
        """Of the last two epochs, the bound averaged over images."""
        totals = np.array([bound.total for bound in self._course.bounds]).reshape(-1, in_epoch)[-2:]
        images = np.full(in_epoch, float(size))
        images[-1] = len(self._observations) - size * (in_epoch - 1)
        return list(totals @ images / len(self._observations))

    def _no_longer_rises(self, bounds: list[float]) -> bool:
        return len(bounds) > 1 and bool(abs(bounds[-1] - bounds[-2]) < self._plan.least_gain)

    def _refine(self, refinement: Refinement) -> None:
        """Refine, if that is needed; then look at every image once more, and at its perturbed view."""
        course = self._course
        if course.refined is None:
            if self._not_needed():
                course.refined = course.concepts
            else:
                course.refined, course.refinement = refine(
                    self._observations, self._perturbed, course.concepts, self._settings, refinement, self._plan.seed,
                    lambda images: self._advance(images, "refining"), course.refining, self._pause, self._team,
                )  # fmt: skip
            course.refining, course.memory = None, None
            self._look_at(self._perturbed)
            self._forget()
            self._measure()
            self._pause()
        assert course.refined is not None
        with self._feed() as self._source:
            statistics = self._pass(course.refined, "refining")
        heads = update(course.refined, statistics, course.prior, self._settings)
        course.concepts, course.statistics = replace(heads, gaussians=course.refined.gaussians), statistics

    def _not_needed(self) -> bool:
        """What the first process finds, for all."""
        if self._plan.refine_anyway or self._course.refining is not None:
            return False
        looks, course = self._team.rank == 0, self._course
        follows = looks and prediction_follows(self._observations, course.concepts, self._settings)
        return any(self._team.gathered(follows))

    # -- passes ---------------------------------------------------------------------------------------------------------

    def _pass(self, concepts: Concepts, note: str) -> Statistics:
        """The E-step for all images by all processes, with pauses."""
        course, visits, every = self._course, self._visits, self._round
        expectation = Expectation(self._source, concepts, self._settings, self._chunk)
        if course.sums is None:
            course.sums, course.rounds = expectation.no_statistics(), 0
        for number in range(course.rounds, -(-visits.largest_share // every)):
            done, until = (min(rounds * every, len(visits)) for rounds in (number, number + 1))
            expectation.add(visits, done, until, course.sums, course.memory, self._report(note))
            course.rounds = number + 1
            self._pause()
        statistics, course.sums, course.rounds = self._team.total(course.sums), None, 0
        return statistics

    def _feed(self) -> Feed:
        """Images on the device for good, where they and the rest fit into the memory there; else batch by batch."""
        feed = Feed(self._views, self._settings.device, self._settings.dtype)
        if feed.near or self._settings.memory is None or self._plan.minibatch is not None or not len(self._visits):
            return feed
        images, k = self._visits.own_images, len(self._course.concepts)
        data = images * sum(bytes_per_image(view) for view in self._views)
        remembered = 2 * len(self._views) * images * k * self._settings.dtype.itemsize
        room = self._settings.working_memory(self._course.concepts.gaussians) / 2 - remembered
        if data <= room:
            try:
                return feed.kept(self._visits, self._chunk.units)
            except torch.OutOfMemoryError:  # somebody else took it
                torch.cuda.empty_cache()
        return feed

    def _note(self, epoch: int) -> str:
        bounds = self._course.bounds
        return f"epoch {epoch + 1}" + (f", bound {bounds[-1].total:.2f}" if bounds else "")

    def _report(self, note: str) -> Callable[[int], object]:
        """Progress is shown by the first process, for all."""
        return lambda images: self._advance(images * self._team.size, note)

    # -- beginning, pausing, resuming -------------------------------------------------------------------------------------

    def _begin(self, start: Callable[[], Start]) -> Course:
        """The first process finds where to start, for all."""
        interrupted, found = False, {}
        if self._team.rank == 0:
            begin = start()
            if begin.interrupted and self._team.size > 1:
                raise KeyboardInterrupt
            interrupted, strength = begin.interrupted, torch.tensor(begin.prior.strength, dtype=torch.float64)
            found = begin.concepts.tensors() | {
                "prior.covariance": begin.prior.covariance,
                "prior.strength": strength,
                **_selection_tensors(begin.selection),
            }
        found = self._team.from_first(found)
        prior = Prior(found.pop("prior.covariance").to(self._settings.device), float(found.pop("prior.strength")))
        course = Course(self._concepts(found), prior, _selection(found), self._plan.past, interrupted=interrupted)
        if self._plan.minibatch is None:
            course.memory = self._no_memory(len(course.concepts))
        self._advance(len(self._observations))
        self._course = course
        self._measure()
        return course

    def _measure(self) -> None:
        """How many images fit into memory at a time."""
        chunk = self._settings.chunk(self._observations, self._pair, self._course.concepts.gaussians)
        # Free memory may differ between GPUs, but pauses have to come at the same time everywhere.
        self._round = min(self._team.gathered(chunk.units))
        self._chunk = Chunk(self._round)

    def _pause(self, refining: Callable[[], dict[str, Tensor]] | None = None) -> None:
        """A good moment for a checkpoint, with where refining is if that is under way."""
        if self._checkpoint is not None and self._checkpoint.due():
            if refining is not None:
                self._course.refining = refining()
            self._checkpoint.write(self._saved())

    def _saved(self) -> Saved:
        course = self._course
        numbers = {"steps": course.steps, "converged": course.converged, "rounds": course.rounds, "round": self._round,
                   "finished": course.finished}  # fmt: skip
        bounds = torch.tensor([tuple(bound) for bound in course.bounds], dtype=torch.float64).reshape(-1, 3)
        common = course.concepts.tensors() | {
            "prior.covariance": course.prior.covariance,
            "prior.strength": torch.tensor(course.prior.strength, dtype=torch.float64),
            "bounds": bounds,
            "refinement": torch.from_numpy(course.refinement),
            **_selection_tensors(course.selection),
        }
        # Copies, since what refining leaves alone is the concepts' own, and a file holds nothing twice.
        common |= {f"refining.{name}": tensor.clone() for name, tensor in (course.refining or {}).items()}
        if course.refined is not None:
            common |= {f"refined.{name}": tensor.clone() for name, tensor in course.refined.tensors().items()}
        if course.statistics is not None:
            common |= {f"statistics.{name}": tensor for name, tensor in course.statistics.tensors().items()}
        own = {"chunk": torch.tensor(self._chunk.units)}
        if course.sums is not None:
            own |= {f"sums.{name}": tensor for name, tensor in course.sums.tensors().items()}
        if course.memory is not None and not course.finished:
            own["memory"] = course.memory.state
        return Saved(numbers, common, own)

    def _restored(self, saved: Saved) -> Course:
        numbers, common, own, device = saved.numbers, saved.common, saved.own, self._settings.device
        refined, statistics, sums = under("refined.", common), under("statistics.", common), under("sums.", own)
        course = Course(
            self._concepts(common),
            Prior(common["prior.covariance"].to(device), float(common["prior.strength"])),
            _selection(common),
            statistics=Statistics.from_tensors(statistics).map(lambda t: t.to(device)) if statistics else None,
            bounds=[Bound(*row) for row in common["bounds"].tolist()],
            steps=numbers["steps"],
            converged=numbers["converged"],
            finished=numbers.get("finished", False),
            rounds=numbers["rounds"],
            sums=Statistics.from_tensors(sums).map(lambda t: t.to(device)) if sums else None,
            refining=under("refining.", common) or None,
            refined=self._concepts(refined) if refined else None,
            refinement=common["refinement"].numpy(),
        )
        if "memory" in own:
            course.memory = self._no_memory(len(course.concepts))
            course.memory.state.copy_(own["memory"])
        self._round, self._chunk = numbers["round"], Chunk(int(own["chunk"]))
        self._advance(len(self._observations) * (1 + len(course.bounds)))
        return course

    def _concepts(self, tensors: dict[str, Tensor]) -> Concepts:
        return Concepts.from_tensors(self._plan.family, tensors).to(self._settings.device, self._settings.dtype)

    def _no_memory(self, n_concepts: int) -> Memory:
        own, tokens = self._visits.own_images, self._observations.n_tokens
        return Memory(len(self._views), own, n_concepts, tokens, self._settings)


def prediction_follows(observations: Observations, concepts: Concepts, settings: Settings) -> bool:
    """Whether it can be read off the concepts as they are, from half of some images for the other half."""
    from pace.metrics import faithfulness

    some = observations[np.linspace(0, len(observations) - 1, min(_LOOKED_AT, len(observations))).astype(np.int64)]
    size = settings.images_per_batch(some.n_tokens, 1, concepts.gaussians)
    gamma, guess = [], []
    for _, batch in some.batches(size, settings.device, settings.dtype):
        assert batch.predictions is not None
        gamma.append(mixtures(batch, concepts, settings).cpu())
        guess.append(batch.predictions.argmax(1).cpu())
    theta, said = torch.nn.functional.normalize(torch.cat(gamma), p=1.0).numpy(), torch.cat(guess).numpy()
    known, asked = slice(0, None, 2), slice(1, None, 2)
    if len(np.unique(said[known])) < 2:
        return True
    return float(faithfulness(theta[known], said[known], theta[asked], said[asked])) >= _FAITHFUL


def _selection_tensors(selection: Selection | None) -> dict[str, Tensor]:
    return {} if selection is None else {f"selection.{name}": t for name, t in selection.tensors().items()}


def _selection(tensors: dict[str, Tensor]) -> Selection | None:
    found = under("selection.", tensors)
    return Selection.from_tensors(found) if found else None


def bound_of(statistics: Statistics, concepts: Concepts, prior: Prior, images: float) -> Bound:
    """The bound per image, with the share of the concepts' log prior that falls to one of so many."""
    embedding, faithful, stable = (statistics.bound / statistics.images).tolist()
    return Bound(embedding + concepts.gaussians.log_prior(prior) / images, faithful, stable)


def shuffled(places: npt.NDArray[np.int64], n: int, key: tuple[int, ...]) -> npt.NDArray[np.int64]:
    """What stands at these places of 0 … n - 1 in an order that the key decides.

    Computed place by place (a Feistel network, repeated while it leads beyond n), since a permutation of all images would need
    memory for each of them.
    """
    half = np.uint64(max(1, ((n - 1).bit_length() + 1) // 2))
    low = (np.uint64(1) << half) - np.uint64(1)
    keys = np.random.default_rng(key).integers(0, 2**64, _ROUNDS, dtype=np.uint64)
    found = places.astype(np.uint64)
    outside = np.ones(len(found), bool)
    while outside.any():
        left, right = found[outside] >> half, found[outside] & low
        for round_key in keys:
            mixed = (right + round_key) * np.uint64(0x9E3779B97F4A7C15)
            mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
            left, right = right, left ^ ((mixed >> np.uint64(32)) & low)
        found[outside] = (left << half) | right
        outside = found >= n
    return found.astype(np.int64)
