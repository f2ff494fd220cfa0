"""The fit on one page: `run` starts, alternates E-step and M-step until the bound stops rising, and refines kinds of parts.

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


def run(
    observations: Observations,
    perturbed: Observations | None,
    settings: Settings,
    plan: Plan,
    team: Team,
    checkpoint: Checkpoint | None,
    start: Callable[[], Course],
    advance: Advance,
) -> Course:
    """One fit, from the start or from its checkpoint.

    Ctrl-C ends it with what was learned so far. Of several processes none can stop alone, so there Ctrl-C is raised.
    """
    n_images = len(observations)
    both = [view for view in (observations, perturbed) if view is not None]
    course, saved = _resumed_or_begun(both, settings, plan, team, checkpoint, start)
    # Perturbed views shape the flat concepts of few images; parts and kinds know them from their features.
    ends_with_both = course.concepts.nest is not None or plan.as_they_are
    views = [observations] if ends_with_both else both
    visits = Visits(n_images, settings.negatives if len(views) == 2 else None, team.rank, team.size)
    if course.finished:
        return course
    _remember(course, saved, views, visits, settings, plan, checkpoint)
    advance(n_images * (1 + len(course.bounds) // plan.steps_per_epoch(n_images)))

    def report(images: int) -> None:
        advance(images * team.size, _note(course, plan, n_images))

    try:
        with _feed(views, visits, course, settings, plan) as feed:
            last = plan.epochs * plan.steps_per_epoch(n_images)
            while not (course.converged or course.refined or course.interrupted or len(course.bounds) >= last):
                step = len(course.bounds)
                chosen, visits = _visited(step, plan, n_images, visits)
                upcoming = _first_of(_visited(step + 1, plan, n_images, visits), feed, course.concepts, settings)
                fresh = expect(feed, visits, course.concepts, settings, course.memory, report, chosen, upcoming)
                fresh = team.total(fresh)  # the E-step of all processes
                bound = bound_of(fresh, course.concepts, course.prior, n_images)
                if plan.minibatch is not None and course.statistics is not None:
                    fresh = course.statistics.blended(fresh, online_rate(step + 1), n_images)
                course.concepts = update(course.concepts, fresh, course.prior, settings)  # the M-step
                course.statistics = fresh
                course.bounds.append(bound)  # only now: Ctrl-C in the M-step keeps the epoch before
                course.converged = plan.converged(course.bounds, n_images, len(views))
                _save(course, checkpoint)
        if ends_with_both and not course.interrupted:
            _refine(course, observations, perturbed, settings, plan, team, checkpoint, advance)
    except KeyboardInterrupt:
        if team.size > 1:
            raise
        course.interrupted = True
    course.finished = not course.interrupted
    return course


def online_rate(step: int) -> float:
    """Weight of the t-th minibatch in the running average, t = 1, 2, …"""
    return float((_OFFSET + step) ** -_DECAY)


def _resumed_or_begun(
    views: list[Observations],
    settings: Settings,
    plan: Plan,
    team: Team,
    checkpoint: Checkpoint | None,
    start: Callable[[], Course],
) -> tuple[Course, Saved | None]:
    """From the checkpoint, which is given too, or, for all processes, from the start that the first one finds."""
    saved = None if checkpoint is None else checkpoint.load()
    if checkpoint is not None and saved is not None:
        with checkpoint.reading():
            return Course.from_tensors(saved.common, plan.family, settings), saved
    begin = start() if team.rank == 0 else None
    if begin is not None and begin.interrupted and team.size > 1:
        raise KeyboardInterrupt
    course = Course.from_tensors(team.from_first(begin.tensors() if begin else {}), plan.family, settings)
    course.interrupted = begin is not None and begin.interrupted
    _forget(views)  # what the start looked at, which a resumed fit has not seen
    return course, None


def _remember(
    course: Course,
    saved: Saved | None,
    views: list[Observations],
    visits: Visits,
    settings: Settings,
    plan: Plan,
    checkpoint: Checkpoint | None,
) -> None:
    """Give the course its memory of every image, as the checkpoint has it or empty."""
    if plan.minibatch is None and not course.refined:
        course.memory = Memory(len(views), visits.own_images, views[0].n_tokens, course.concepts, settings)
        if checkpoint is not None and saved is not None and "memory" in saved.own:
            with checkpoint.reading():
                if saved.own["memory"].shape != course.memory.state.shape:
                    raise ValueError("its memory is of other images")
                course.memory.state.copy_(saved.own["memory"])
            course.memory.fixed = {name: t.to(settings.device) for name, t in under("fixed.", saved.own).items()}
    if saved is None and not course.interrupted:
        _save(course, checkpoint)  # the start may have taken long


def _refine(
    course: Course,
    observations: Observations,
    perturbed: Observations | None,
    settings: Settings,
    plan: Plan,
    team: Team,
    checkpoint: Checkpoint | None,
    advance: Advance,
) -> None:
    """Refine kinds of parts; then learn H and β once more, from the perturbed views as well."""
    views = [view for view in (observations, perturbed) if view is not None]

    if not course.refined:
        if course.concepts.nest is not None and plan.refining_steps:
            given = observations, perturbed, course.concepts, settings, plan.refining_steps, plan.seed
            report = lambda images: advance(images, "refining")  # noqa: E731
            course.concepts, course.refinement = refine_kinds(*given, report, team.share)
        course.refined, course.memory = True, None
        _forget(views)
        _save(course, checkpoint)
    visits = Visits(len(observations), None if perturbed is None else settings.negatives, team.rank, team.size)
    with _feed(views, visits, course, settings, plan) as feed:
        fresh = team.total(
            expect(feed, visits, course.concepts, settings, report=lambda n: advance(n * team.size, "last pass"))
        )
    heads, before = update(course.concepts, fresh, course.prior, settings), course.concepts
    learned = replace(heads, gaussians=before.gaussians)
    if (
        before.nest is not None and heads.nest is not None
    ):  # parts stay as they are; what their patches look like is new
        learned = replace(learned, alpha=before.alpha, nest=replace(before.nest, means=heads.nest.means))
    course.concepts, course.statistics = learned, fresh


def _feed(views: list[Observations], visits: Visits, course: Course, settings: Settings, plan: Plan) -> Feed:
    """Images on the device for good, where they and the rest fit into the memory there; else batch by batch."""
    feed = Feed(views, settings.device, settings.dtype)
    if feed.near or settings.memory is None or plan.minibatch is not None or not len(visits):
        return feed
    images = visits.own_images
    data = images * sum(bytes_per_image(view) for view in views)
    remembered = 2 * len(views) * images * len(course.concepts) * settings.dtype.itemsize
    if data <= settings.working_memory(course.concepts.gaussians) / 2 - remembered:
        return feed.kept(visits, feed.units_at_once(course.concepts, settings))
    return feed


def _visited(step: int, plan: Plan, n_images: int, visits: Visits) -> tuple[Chosen, Visits]:
    """The images of a step, and how they are visited."""
    chosen = plan.minibatch_at(step, n_images)
    return chosen, visits if chosen is None else replace(visits, n_images=len(chosen))


def _first_of(
    visited: tuple[Chosen, Visits], feed: Feed, concepts: Concepts, settings: Settings
) -> npt.NDArray[np.int64] | None:
    """The images this process asks for first, so that they can be read ahead; None where all are visited in order."""
    chosen, visits = visited
    parts = visits.parts(feed.units_at_once(concepts, settings))
    return chosen[parts[0].images] if chosen is not None and parts else None


def _save(course: Course, checkpoint: Checkpoint | None) -> None:
    if checkpoint is not None and checkpoint.due():
        checkpoint.write(course.tensors(), {} if course.memory is None else course.memory.tensors())


def _forget(views: list[Observations]) -> None:
    for view in views:
        if isinstance(view, Lazy):
            view.forget()


def _note(course: Course, plan: Plan, n_images: int) -> str:
    epoch = len(course.bounds) // plan.steps_per_epoch(n_images) + 1
    return f"epoch {epoch}" + (f", bound {course.bounds[-1].total:.2f}" if course.bounds else "")
