"""The fit on one page: `Loop.run` starts, alternates E-step and M-step until the bound stops rising, and refines kinds.

All that a fit knows between two epochs is in its `Course`, which is what a checkpoint holds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pace.fitting.checkpoints import Checkpoint, Saved
from pace.fitting.distributed import Team
from pace.model.concepts import Concepts, bound_of, under, update
from pace.model.feeding import Feed, Visits, bytes_per_image
from pace.model.gaussians import Prior
from pace.model.learning import Memory, expect
from pace.model.objective import Bound
from pace.model.refining_kinds import refine_kinds
from pace.model.selecting import Selection
from pace.model.settings import Settings
from pace.model.statistics import Statistics
from pace.observations import Lazy, Observations
from pace.progress import Advance

_OFFSET, _DECAY = 10.0, 0.7  # of the weight of a minibatch, as usual for online variational Bayes (Hoffman et al. 2010)


Chosen = npt.NDArray[np.int64] | None  # images of a step; None: all of them


@dataclass(frozen=True)
class Plan:
    """How long to learn, and in which way."""

    family: str
    epochs: int
    least_gain: float  # of the bound, in an epoch, for each view
    minibatch: int | None  # images in a step; None: all of them, each of which is remembered
    seed: int
    as_they_are: bool = False  # flat concepts, too, are learned without perturbed views, which come in at the end
    refining_steps: int = 0  # of kinds of parts

    def steps_per_epoch(self, n_images: int) -> int:
        return 1 if self.minibatch is None else -(-n_images // self.minibatch)

    def minibatch_at(self, step: int, n_images: int) -> Chosen:
        """The images of a step: every epoch visits all of them in an order of its own. None: all, in the order given."""
        if self.minibatch is None:
            return None
        epoch, number = divmod(step, self.steps_per_epoch(n_images))
        return _order(self.seed, epoch, n_images)[number * self.minibatch : (number + 1) * self.minibatch]

    def converged(self, bounds: list[Bound], n_images: int, views: int) -> bool:
        """Whether an epoch has just ended in which the bound, averaged over images, no longer rose."""
        steps = self.steps_per_epoch(n_images)
        if len(bounds) % steps or len(bounds) < 2 * steps:
            return False
        images = np.full(steps, float(self.minibatch or n_images))
        images[-1] = n_images - images[:-1].sum()
        before, now = np.reshape([bound.total for bound in bounds[-2 * steps :]], (2, steps)) @ images / n_images
        return bool(abs(now - before) < self.least_gain * views)


@lru_cache(maxsize=2)  # a million images take 10 ms to shuffle, which every step of an epoch would wait for
def _order(seed: int, epoch: int, n_images: int) -> npt.NDArray[np.int64]:
    return np.random.default_rng((seed, epoch)).permutation(n_images)


@dataclass
class Course:
    """How far a fit has come."""

    concepts: Concepts
    prior: Prior
    selection: Selection | None = None  # how the number of concepts was found
    statistics: Statistics | None = None  # what the concepts were learned from
    bounds: list[Bound] = field(default_factory=list)  # after every step
    refinement: npt.NDArray[np.float64] = field(default_factory=lambda: np.empty((0, 3)))
    converged: bool = False
    refined: bool = False
    finished: bool = False
    interrupted: bool = False
    memory: Memory | None = None  # of this process's images

    def tensors(self) -> dict[str, Tensor]:
        """All but the memory, flat, for checkpoints and other processes."""
        parts = {"statistics": self.statistics, "selection": self.selection}
        flat = {f"{name}.{key}": t for name, part in parts.items() if part for key, t in part.tensors().items()}
        return self.concepts.tensors() | flat | {
            "prior.covariance": self.prior.covariance,
            "prior.strength": torch.tensor(self.prior.strength, dtype=torch.float64),
            "bounds": torch.tensor(self.bounds, dtype=torch.float64).reshape(-1, 3),
            "refinement": torch.from_numpy(self.refinement),
            "state": torch.tensor([self.converged, self.refined, self.finished]),
        }  # fmt: skip

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor], family: str, settings: Settings) -> Course:
        given = Concepts.from_tensors(family, tensors)
        concepts = given.to(settings.device, settings.dtype)
        prior = Prior(tensors["prior.covariance"].to(settings.device), float(tensors["prior.strength"]))
        course = cls(concepts, prior, refinement=tensors["refinement"].numpy())
        course.bounds = [Bound(*row) for row in tensors["bounds"].tolist()]
        course.converged, course.refined, course.finished = tensors["state"].tolist()
        if statistics := under("statistics.", tensors):
            course.statistics = given.statistics_from(statistics).map(lambda t: t.to(settings.device))
        if selection := under("selection.", tensors):
            course.selection = Selection.from_tensors(selection)
        return course


def online_rate(step: int) -> float:
    """Weight of the t-th minibatch in the running average, t = 1, 2, …"""
    return float((_OFFSET + step) ** -_DECAY)


@dataclass(frozen=True)
class Loop:
    """What is learned from, how, by which processes, and where it is kept and shown how far they have come."""

    observations: Observations
    perturbed: Observations | None
    settings: Settings
    plan: Plan
    team: Team
    checkpoint: Checkpoint | None
    advance: Advance

    def run(self, start: Callable[[], Course]) -> Course:
        """One fit, from the start or from its checkpoint.

        Ctrl-C ends it with what was learned so far. Of several processes none can stop alone, so there Ctrl-C is raised.
        """
        plan, settings, n_images = self.plan, self.settings, len(self.observations)
        course, saved = self._resumed_or_begun(start)
        # Perturbed views shape the flat concepts of few images; parts and kinds know them from their features.
        ends_with_both = course.concepts.nest is not None or plan.as_they_are
        views = [self.observations] if ends_with_both else self.views
        visits = self._visits(views)
        if course.finished:
            return course
        self._remember(course, saved, views, visits)
        self.advance(n_images * (1 + len(course.bounds) // plan.steps_per_epoch(n_images)))

        def report(images: int) -> None:
            self.advance(images * self.team.size, _note(course, plan, n_images))

        try:
            with self._feed(views, visits, course) as feed:
                last = plan.epochs * plan.steps_per_epoch(n_images)
                while not (course.converged or course.refined or course.interrupted or len(course.bounds) >= last):
                    step = len(course.bounds)
                    chosen, visits = self._visited(step, visits)
                    upcoming = self._first_of(*self._visited(step + 1, visits), feed, course.concepts)
                    fresh = expect(feed, visits, course.concepts, settings, course.memory, report, chosen, upcoming)
                    fresh = self.team.total(fresh)  # the E-step of all processes
                    bound = bound_of(fresh, course.concepts, course.prior, n_images)
                    if plan.minibatch is not None and course.statistics is not None:
                        fresh = course.statistics.blended(fresh, online_rate(step + 1), n_images)
                    course.concepts = update(course.concepts, fresh, course.prior, settings)  # the M-step
                    course.statistics = fresh
                    course.bounds.append(bound)  # only now: Ctrl-C in the M-step keeps the epoch before
                    course.converged = plan.converged(course.bounds, n_images, len(views))
                    self._save(course)
            if ends_with_both and not course.interrupted:
                self._refine(course)
                self._last_pass(course)
        except KeyboardInterrupt:
            if self.team.size > 1:
                raise
            course.interrupted = True
        course.finished = not course.interrupted
        return course

    @property
    def views(self) -> list[Observations]:
        return [view for view in (self.observations, self.perturbed) if view is not None]

    def _resumed_or_begun(self, start: Callable[[], Course]) -> tuple[Course, Saved | None]:
        """From the checkpoint, which is given too, or, for all processes, from the start that the first one finds."""
        family, settings, team = self.plan.family, self.settings, self.team
        saved = None if self.checkpoint is None else self.checkpoint.load()
        if self.checkpoint is not None and saved is not None:
            with self.checkpoint.reading():
                return Course.from_tensors(saved.common, family, settings), saved
        begin = start() if team.rank == 0 else None
        if begin is not None and begin.interrupted and team.size > 1:
            raise KeyboardInterrupt
        course = Course.from_tensors(team.from_first(begin.tensors() if begin else {}), family, settings)
        course.interrupted = begin is not None and begin.interrupted
        self._forget()  # what the start looked at, which a resumed fit has not seen
        return course, None

    def _remember(self, course: Course, saved: Saved | None, views: list[Observations], visits: Visits) -> None:
        """Give the course its memory of every image, as the checkpoint has it or empty."""
        if self.plan.minibatch is None and not course.refined:
            shape = len(views), visits.own_images, views[0].n_tokens
            course.memory = memory = Memory(*shape, course.concepts, self.settings)
            if self.checkpoint is not None and saved is not None and "memory" in saved.own:
                with self.checkpoint.reading():
                    if saved.own["memory"].shape != memory.state.shape:
                        raise ValueError("its memory is of other images")
                    memory.state.copy_(saved.own["memory"])
                memory.fixed = {name: t.to(self.settings.device) for name, t in under("fixed.", saved.own).items()}
        if saved is None and not course.interrupted:
            self._save(course)  # the start may have taken long

    def _refine(self, course: Course) -> None:
        """Refine kinds of parts, unless that is done."""
        if course.refined:
            return
        if course.concepts.nest is not None and self.plan.refining_steps:
            given = self.observations, self.perturbed, course.concepts, self.settings
            steps = self.plan.refining_steps, self.plan.seed, lambda images: self.advance(images, "refining")
            course.concepts, course.refinement = refine_kinds(*given, *steps, self.team.share)
        course.refined, course.memory = True, None
        self._forget()
        self._save(course)

    def _last_pass(self, course: Course) -> None:
        """Learn H and β once more, from the perturbed views as well."""

        def report(images: int) -> None:
            self.advance(images * self.team.size, "last pass")

        visits = self._visits(self.views)
        with self._feed(self.views, visits, course) as feed:
            fresh = self.team.total(expect(feed, visits, course.concepts, self.settings, report=report))
        heads, before = update(course.concepts, fresh, course.prior, self.settings), course.concepts
        learned = replace(heads, gaussians=before.gaussians)
        # Parts stay as they are; what their patches look like is new.
        if before.nest is not None and heads.nest is not None:
            learned = replace(learned, alpha=before.alpha, nest=replace(before.nest, means=heads.nest.means))
        course.concepts, course.statistics = learned, fresh

    def _visits(self, views: list[Observations]) -> Visits:
        negatives = self.settings.negatives if len(views) == 2 else None
        return Visits(len(self.observations), negatives, self.team.rank, self.team.size)

    def _feed(self, views: list[Observations], visits: Visits, course: Course) -> Feed:
        """Images on the device for good, where they and the rest fit into the memory there; else batch by batch."""
        settings = self.settings
        feed = Feed(views, settings.device, settings.dtype)
        if feed.near or settings.memory is None or self.plan.minibatch is not None or not len(visits):
            return feed
        images = visits.own_images
        data = images * sum(bytes_per_image(view) for view in views)
        remembered = 2 * len(views) * images * len(course.concepts) * settings.dtype.itemsize
        if data <= settings.working_memory(course.concepts.gaussians) / 2 - remembered:
            return feed.kept(visits, feed.units_at_once(course.concepts, settings))
        return feed

    def _visited(self, step: int, visits: Visits) -> tuple[Chosen, Visits]:
        """The images of a step, and how they are visited."""
        chosen = self.plan.minibatch_at(step, len(self.observations))
        return chosen, visits if chosen is None else replace(visits, n_images=len(chosen))

    def _first_of(self, chosen: Chosen, visits: Visits, feed: Feed, concepts: Concepts) -> Chosen:
        """The images this process asks for first, so that they can be read ahead; None where all are visited in order."""
        parts = visits.parts(feed.units_at_once(concepts, self.settings))
        return chosen[parts[0].images] if chosen is not None and parts else None

    def _save(self, course: Course) -> None:
        if self.checkpoint is not None and self.checkpoint.due():
            self.checkpoint.write(course.tensors(), {} if course.memory is None else course.memory.tensors())

    def _forget(self) -> None:
        for view in self.views:
            if isinstance(view, Lazy):
                view.forget()


def _note(course: Course, plan: Plan, n_images: int) -> str:
    epoch = len(course.bounds) // plan.steps_per_epoch(n_images) + 1
    return f"epoch {epoch}" + (f", bound {course.bounds[-1].total:.2f}" if course.bounds else "")
