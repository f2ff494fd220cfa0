"""PACE, the estimator: learn concepts from observations, explain images with them."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from dataclasses import replace
from os import PathLike
from typing import Any

import numpy as np
from sklearn.exceptions import ConvergenceWarning

from pace.fitting.arguments import alpha_of, check_pair, plain_parameters, plan_of, prior_strength_of, settings_of
from pace.fitting.checkpoints import Checkpoint, likeness
from pace.fitting.distributed import Team
from pace.fitting.loop import Course, Loop, online_rate
from pace.fitting.start import find_start
from pace.learned import Learned, as_numpy
from pace.model.concepts import Concepts, bound_of, update
from pace.model.effective import learn_intervals
from pace.model.gaussians import Prior
from pace.model.learning import expect_all
from pace.model.precision import undisturbed
from pace.model.settings import Settings
from pace.observations import Observations
from pace.progress import progress

# Parameters that change no more than rounding, so that a checkpoint may be resumed with others.
_NO_MATTER = ("memory", "device", "distributed", "progress")
_INTERVAL_IMAGES = 200  # from which intervals are learned
_BACKGROUND = 0.5  # of the attention that its area would have: a part with less is background


class PACE(Learned):
    """Probabilistic concept explainer for vision transformers.

    Parameters
    ----------
    n_concepts : int or "auto"
        K, the number of concepts; "auto" finds it (docs/number-of-concepts.md) and leaves `selection_`.
    parts : int, "auto" or None
        P, the number of parts: an image is a mixture of parts, in an image every part has one kind, and a concept is a kind
        of a part (docs/parts.md). "auto" is 8 parts, or K / 3 if that is fewer, from 12 concepts up and if parts differ between
        images; else, and with None, concepts are the paper's, which are no kinds.
    max_concepts : int
        Upper limit for "auto"; a fit that reaches it warns.
    covariance : {"full", "diag", "tied", "low_rank"}
        Covariance of a concept: its own; diagonal; one shared by all concepts; diagonal plus 16 directions.
    updates : {"exact", "paper"}
        Coordinate ascent on the bound, or the rules as printed in the paper (docs/model.md says where they differ).
    alpha : float, array (K,), "learn" or None
        Dirichlet prior of θ, in patches. None is 0.1 (and 0.1 / J with the paper's rules, where an image weighs one patch).
    prune : bool or "auto"
        Leave concepts empty where the patches ask for less than half of `n_concepts`, since concepts that cannot be told apart
        would share patches at random. Needs the exact rules and a learned α. "auto" prunes only if the prediction follows from
        the few that are left, with "tied" covariances and at least 1000 images, and not in `partial_fit`. `selection_` then
        says what was found.
    n_init : int
        Starts to try, three epochs each on a sample of images; the one with the best bound goes on.
    max_iter : int
        Upper limit for epochs.
    refine : int or "auto"
        Steps, after EM, in which faithfulness and stability shape the kinds of parts (docs/parts.md); flat concepts stay as
        they are. Needs "tied" covariances, the exact rules, and predictions or perturbed views. "auto" is 600 steps with
        these three and at least 100 images, else 0.
    minibatch : int or None
        Learn online from this many images at a time (online variational Bayes): nothing is kept of an image, so memory does
        not grow with their number. None learns from all images in every epoch.
    memory : int, str or None
        Budget on the device, in bytes or like "8GB". None is most of what a GPU has free, and no limit on a CPU.
    distributed : bool
        Share the images among the processes of torch.distributed, all of which call `fit` (docs/scaling.md).
    seed : int
        The same seed and input give bitwise the same result on a CPU.
    device, dtype : str or None, str
        None is the device of the embeddings if that is a GPU, else a GPU if there is one, else the CPU. "float32" or "float64".
    progress : bool or None
        Show a progress bar; None shows it on a terminal when the work takes longer than a second.
    """

    def __init__(
        self,
        n_concepts: int | str = 100,
        *,
        parts: int | str | None = "auto",
        max_concepts: int = 300,
        covariance: str = "tied",
        updates: str = "exact",
        alpha: Any = "learn",
        prune: bool | str = "auto",
        n_init: int = 4,
        max_iter: int = 100,
        refine: int | str = "auto",
        minibatch: int | None = None,
        memory: int | str | None = None,
        distributed: bool = False,
        seed: int = 0,
        device: Any = None,
        dtype: Any = "float32",
        progress: bool | None = None,
    ):
        self.n_concepts = n_concepts
        self.parts = parts
        self.max_concepts = max_concepts
        self.covariance = covariance
        self.updates = updates
        self.alpha = alpha
        self.prune = prune
        self.n_init = n_init
        self.max_iter = max_iter
        self.refine = refine
        self.minibatch = minibatch
        self.memory = memory
        self.distributed = distributed
        self.seed = seed
        self.device = device
        self.dtype = dtype
        self.progress = progress

    @undisturbed
    def fit(
        self,
        observations: Observations,
        y: object = None,
        *,
        perturbed: Observations | None = None,
        checkpoint: str | PathLike[str] | None = None,
        checkpoint_every: float = 60.0,
        keep_checkpoint: bool = False,
    ) -> PACE:
        """Learn the concepts. Ctrl-C keeps the last full epoch and leaves a usable model.

        With the exact rules the bound rises with every epoch, from six tokens an image up.

        `checkpoint` is a folder for how far the fit has come, written after an epoch (with `minibatch`, a step) at most every
        `checkpoint_every` seconds. A fit of the same data with the same parameters goes on from there, to the same bits on a
        CPU. When the fit is done the folder is removed; with `keep_checkpoint` it holds the end until you remove it.
        """
        settings = settings_of(self, observations)
        check_pair(observations, perturbed)
        plan = plan_of(self, observations, perturbed, settings)
        team = Team.of_all(settings.device) if self.distributed else Team()
        about = self._about(observations, perturbed) if checkpoint is not None or team.size > 1 else {}
        team.refuse_unlike(about)
        saver = None if checkpoint is None else Checkpoint(checkpoint, checkpoint_every, about, team)
        pair = None if plan.as_they_are else perturbed  # which EM learns from
        shown = self.progress if team.rank == 0 else False
        with saver or nullcontext():
            with progress("learning concepts", len(observations), shown, rounds=True) as advance:

                def start() -> Course:
                    say = lambda note: advance(0, note)  # noqa: E731
                    return find_start(self, observations, pair, settings, say, views_of_places=perturbed)

                course = Loop(observations, perturbed, settings, plan, team, saver, advance).run(start)
            # Only now does the model change, so that a fit that fails leaves the one before it.
            self._concepts, self._prior, self._statistics = course.concepts, course.prior, course.statistics
            self.lower_bounds_, self.n_iter_ = course.bounds, len(course.bounds)
            self.n_steps_ = 0 if self.minibatch is None else self.n_iter_
            self.converged_, self.interrupted_ = course.converged, course.interrupted
            self.refinement_ = course.refinement
            self.selection_ = course.selection
            self._describe(observations, settings)
            self._warn_of_the_end(len(observations))
            if saver is not None and course.finished:
                saver.write(course.tensors(), {}) if keep_checkpoint else saver.remove()
        return self

    def _warn_of_the_end(self, n_images: int) -> None:
        """Say what a user should know of a fit that ended otherwise than asked."""
        if n_images == 1:
            warnings.warn("there was one image to learn from; its concepts say little about others", stacklevel=4)
        found, given = self.selection_, len(self._concepts)
        if found is not None and found.n_concepts < given:
            message = (
                f"{found.n_concepts} of {given} concepts are in use: the patches ask for no more; prune=False uses all"
            )
            warnings.warn(message, UserWarning, stacklevel=4)
        if self.interrupted_:
            usable = "the model is usable" if self.n_iter_ else "the concepts are where learning would have started"
            unit = "epochs" if self.minibatch is None else "minibatches"
            message = f"interrupted after {self.n_iter_} {unit}; {usable}"
            warnings.warn(message, ConvergenceWarning, stacklevel=4)
        elif not self.converged_:
            message = f"the bound still rises after {self.max_iter} epochs; raise max_iter"
            warnings.warn(message, ConvergenceWarning, stacklevel=4)

    @undisturbed
    def partial_fit(
        self, observations: Observations, y: object = None, *, perturbed: Observations | None = None
    ) -> PACE:
        """Learn from one more batch of images; memory does not grow with the number of batches (online EM)."""
        settings = settings_of(self, observations)
        check_pair(observations, perturbed)
        if self.__sklearn_is_fitted__():
            concepts, prior = self._go_on(observations, settings)
            past, steps, bounds, selection = self._statistics, self.n_steps_, self.lower_bounds_, self.selection_
            if past is None and bounds:
                raise ValueError(
                    "this model was saved without its statistics; save(path, statistics=True) to go on later"
                )
        else:
            begin = find_start(self, observations, perturbed, settings, whole=False, views_of_places=perturbed)
            if begin.interrupted:
                raise KeyboardInterrupt
            concepts, prior, selection = begin.concepts, begin.prior, begin.selection
            past, steps, bounds = None, 0, []
        fresh = expect_all(observations, perturbed, concepts, settings)
        bound = bound_of(fresh, concepts, prior, float(fresh.images))
        total, steps = fresh, steps + 1
        if past is not None:
            past = past.map(lambda t: t.to(settings.device))
            total = past.blended(fresh, online_rate(steps))
        self._concepts, self._prior = update(concepts, total, prior, settings), prior
        self._statistics, self.lower_bounds_, self.selection_ = total, [*bounds, bound], selection
        self.n_steps_, self.n_iter_ = steps, len(self.lower_bounds_)
        self.converged_, self.interrupted_ = False, False
        self.refinement_ = np.empty((0, 3))
        self._describe(observations, settings)
        return self

    def _go_on(self, observations: Observations, settings: Settings) -> tuple[Concepts, Prior]:
        """The concepts and their prior, with α and the prior's weight as they are given now."""
        self._check_fits(observations)
        self._check_unchanged(observations)
        concepts = self._concepts.to(settings.device, settings.dtype)
        if not settings.learn_alpha:
            concepts = replace(concepts, alpha=alpha_of(self, len(concepts.alpha), observations, settings))
        strength = prior_strength_of(self, observations, settings)
        return concepts, Prior(self._prior.covariance.to(settings.device), strength)

    def _check_unchanged(self, observations: Observations) -> None:
        """Parameters that shape the concepts, and whether there are predictions, cannot change between batches."""
        if observations.n_classes and not self._concepts.label_head.shape[1]:
            raise ValueError("predictions: the model was fitted without any; clone it to learn from them")
        fitted = {
            "n_concepts": len(self._concepts),
            "covariance": self._concepts.gaussians.name,
            "updates": self.updates_,
        }
        for name, value in fitted.items():
            if getattr(self, name) != value and not (name == "n_concepts" and self.n_concepts == "auto"):
                raise ValueError(f"{name}: this model was fitted with {value!r}; clone it to learn with another")

    def _about(self, observations: Observations, perturbed: Observations | None) -> dict[str, Any]:
        """What a fit is of: its data, and the parameters that decide what comes out."""
        idle = _NO_MATTER if self.n_concepts == "auto" else (*_NO_MATTER, "max_concepts")
        parameters = {name: value for name, value in plain_parameters(self).items() if name not in idle}
        return {"observations": likeness(observations), "perturbed": likeness(perturbed), **parameters}

    def _describe(self, observations: Observations, settings: Settings) -> None:
        scale = observations.n_tokens / settings.image_weight(observations.n_tokens)
        known = self._statistics
        self.concept_weights_ = np.full(len(self._concepts), np.nan) if known is None else as_numpy(known.held) * scale
        self.evidence_ = np.zeros(self.label_head_.shape) if known is None else as_numpy(known.evidence())
        self._names = None
        self.updates_ = settings.updates
        self.n_features_in_, self.prefix_tokens_ = observations.dim, observations.prefix_tokens
        self.origin_ = observations.origin
        self._learn_intervals(observations)

    def _learn_intervals(self, observations: Observations) -> None:
        """How alike neighbours are and which shares are usual, in some of the images: what intervals are made of. Also which
        parts are background."""
        self.neighbours_, self.share_prior_, self.background_ = None, self.alpha_, None
        if self.updates_ == "paper":
            return
        chosen = np.unique(np.linspace(0, len(observations) - 1, _INTERVAL_IMAGES).astype(np.int64))
        some = self.explain(observations[chosen])
        assert some.phi is not None
        assert some.weights is not None
        layout = some.grid, some.prefix_tokens
        phi, gamma = some.by_part(some.phi), some.by_part(some.gamma)
        if self.part_of_ is not None:
            seen, weights = phi[:, some.prefix_tokens :], some.weights[:, some.prefix_tokens :]
            attended = np.einsum("mj,mjp->p", weights / weights.sum(), seen)
            self.background_ = attended < _BACKGROUND * seen.mean((0, 1))
        self.neighbours_, self.share_prior_ = learn_intervals(phi, gamma, some.weights, *layout)
