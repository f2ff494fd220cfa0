"""PACE, the estimator: learn concepts from observations, explain images with them."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from copy import copy
from dataclasses import replace
from os import PathLike
from typing import Any

import numpy as np
import torch
from sklearn.base import BaseEstimator, TransformerMixin
from sklearn.exceptions import ConvergenceWarning, NotFittedError
from torch import Tensor

from pace.explanation import Array, Explanation
from pace.fitting import loop
from pace.fitting.arguments import (
    alpha_of,
    check_origin,
    check_pair,
    check_type,
    plain_parameters,
    plan_of,
    prior_strength_of,
    settings_of,
)
from pace.fitting.checkpoints import Checkpoint, likeness
from pace.fitting.distributed import Team
from pace.fitting.model_file import load_model, save_model
from pace.fitting.start import find_start
from pace.model import merging
from pace.model.concepts import Concepts, bound_of, update
from pace.model.effective import effective_weights, learn_intervals
from pace.model.gaussians import Prior
from pace.model.learning import expect_all, explain_batch
from pace.model.nearest import Patches, nearest
from pace.model.precision import undisturbed
from pace.model.selecting import Selection
from pace.model.settings import SMALLEST_ALPHA, Settings
from pace.model.statistics import Statistics
from pace.naming import Name, concept_names
from pace.observations import Observations
from pace.progress import progress

# Parameters that change no more than rounding, so that a checkpoint may be resumed with others.
_NO_MATTER = ("memory", "device", "distributed", "progress")
_INTERVAL_IMAGES = 200  # from which intervals are learned
_BACKGROUND = 0.5  # of the attention that its area would have: a part with less is background


class PACE(TransformerMixin, BaseEstimator):  # type: ignore[misc]
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

    _concepts: Concepts
    _prior: Prior
    _statistics: Statistics | None
    _names: list[Name] | None = None  # where they are not those that follow from their use
    selection_: Selection | None  # how many concepts were found, where that was asked
    n_steps_: int  # batches of `partial_fit` so far
    prefix_tokens_: int  # that counted beside the patches
    background_: (
        Array | None
    )  # (P,) which parts are background, by the attention they get; None where there are no parts
    concept_weights_: Array  # (K,) patches of the images, not of their perturbed views, that every concept holds
    evidence_: Array  # (K, N) how much likelier a class is where the concept is than in all images, in probability
    origin_: dict[str, str] | None  # model, block, attention block and preprocessing, as `Observations.origin` has them

    # -- learning -----------------------------------------------------------------------------------------------------

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

                def start() -> loop.Course:
                    say = lambda note: advance(0, note)  # noqa: E731
                    return find_start(self, observations, pair, settings, say, views_of_places=perturbed)

                course = loop.run(observations, perturbed, settings, plan, team, saver, start, advance)
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
            total = past.blended(fresh, loop.online_rate(steps))
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

    # -- explaining ---------------------------------------------------------------------------------------------------

    @undisturbed
    def explain(
        self, observations: Observations, *, use_predictions: bool = False, patches: bool = True
    ) -> Explanation:
        """Concept mixtures θ, γ of images and, with `patches`, the concepts φ of every patch.

        The transformer's prediction ŷ is withheld from inference unless `use_predictions`.
        """
        self._check_fits(observations, predictions=use_predictions)
        if use_predictions and self.part_of_ is not None:
            raise ValueError(
                "use_predictions: concepts that are kinds of parts are told without ŷ; fit with parts=None"
            )
        if use_predictions and not (observations.n_classes and self.label_head_.shape[1]):
            raise ValueError("use_predictions=True needs predictions, here and when the model was fitted")
        settings = settings_of(self, observations)
        gamma = np.empty((len(observations), len(self._concepts)), np.float64)
        kind = np.float64 if settings.dtype == torch.float64 else np.float32
        phi = np.empty((*observations.shape[:2], len(self._concepts)), kind) if patches else None
        attention = np.empty(observations.shape[:2])
        concepts = self._fitted().to(settings.device, settings.dtype)
        size = settings.images_per_batch(observations.n_tokens, 1, concepts.gaussians)
        with progress("explaining", len(observations), self.progress) as advance:
            for some, batch in observations.batches(size, settings.device, settings.dtype):
                posterior = explain_batch(batch, concepts, settings, use_predictions=use_predictions, patches=patches)
                gamma[some] = posterior.gamma.cpu().numpy()
                attention[some] = batch.attention.cpu().numpy()
                if phi is not None:
                    phi[some] = posterior.phi.cpu().numpy()
                advance(some.stop - some.start)
        theta = gamma / gamma.sum(1, keepdims=True)
        layout = observations.grid, observations.prefix_tokens
        found = Explanation(
            theta.astype(kind), gamma.astype(kind), phi, *layout, part_of=self.part_of_, called=self.names_
        )
        if settings.updates == "paper":  # its counts sum to 1, whatever the image
            return found
        return replace(found, weights=effective_weights(attention, self.neighbours_, *layout), prior=self.share_prior_)

    def transform(self, observations: Observations) -> Array:
        """θ (M, K), ŷ withheld."""
        return self.explain(observations, patches=False).theta

    def importance(self, theta: Array, classes: Array) -> Array:
        """How much each concept speaks for an image's class (M, K): its share θ times its evidence for the class.

        The evidence for a class is how much higher its probability is in images of the concept than in all, each image
        counted by its share of the concept: `evidence_`, from −1 to 1. Without classes in the fit, the share alone.
        """
        evidence = self.evidence_
        found: Array = theta * evidence[:, classes].T if evidence.shape[1] else theta
        return found

    @undisturbed
    def score(self, observations: Observations, y: object = None, *, perturbed: Observations | None = None) -> float:
        """The bound L = L_e + L_f + L_s per image (L_s with perturbed views only), without the prior on the concepts."""
        self._check_fits(observations)
        check_pair(observations, perturbed)
        settings = settings_of(self, observations)
        statistics = expect_all(observations, perturbed, self._fitted().to(settings.device, settings.dtype), settings)
        return float(statistics.bound.sum() / statistics.images)

    def nearest_patches(self, observations: Observations, concept: int, n: int = 5) -> Patches:
        """The n patches whose embeddings lie closest to μ_k, from different images as long as there are enough."""
        self._check_fits(observations, predictions=False)
        if not 0 <= concept < len(self._concepts):
            raise IndexError(f"concept {concept} of {len(self._concepts)}")
        if n < 1:
            raise ValueError(f"n: expected at least 1; found {n}")
        return Patches(*(row[0] for row in nearest(self.means_[[concept]], observations, n)))

    # -- what was learned ---------------------------------------------------------------------------------------------

    def __sklearn_is_fitted__(self) -> bool:
        return getattr(self, "_concepts", None) is not None and hasattr(self, "concept_weights_")

    @property
    def means_(self) -> Array:
        """μ_k (K, d)."""
        concepts = self._fitted()
        return _numpy(concepts.means.double() + concepts.offset.double(), concepts.means.dtype)

    @property
    def names_(self) -> list[Name]:
        """What the concepts are called."""
        if self._names is not None:
            return list(self._names)
        return concept_names(self.part_of_, self.concept_weights_, self.background_)

    @names_.setter
    def names_(self, names: Sequence[Name]) -> None:
        self._names = list(names)

    @property
    def part_of_(self) -> Array | None:
        """Of which part each concept is a kind (K,); None where concepts are no kinds."""
        nest = self._fitted().nest
        return None if nest is None else _numpy(nest.part_of)

    @property
    def n_parts_(self) -> int:
        """P; as many as concepts where these are no kinds."""
        nest = self._fitted().nest
        return len(self._concepts) if nest is None else len(nest)

    @property
    def covariances_(self) -> Array:
        """Σ_k (K, d, d); (d, d) when tied; the variances (K, d) when diagonal. Of kinds, in the features that tell them."""
        gaussians = self._fitted().gaussians
        return _numpy(gaussians.covariances(), gaussians.means.dtype)

    @property
    def label_head_(self) -> Array:
        """H (K, N), columns η_n in [-1, 1]."""
        return _numpy(self._fitted().label_head)

    @property
    def pair_weights_(self) -> Array:
        """β (K,) in [0, 1]."""
        return _numpy(self._fitted().pair_weights)

    @property
    def alpha_(self) -> Array:
        """α (K,); (P,) of parts."""
        return _numpy(self._fitted().alpha)

    @property
    def empty_concepts_(self) -> Array:
        """Concepts that hold less than one patch of all images; they keep their mean and the pooled covariance.

        Those that pruning left empty stand far from all patches.
        """
        self._fitted()
        return np.flatnonzero(self.concept_weights_ < 1)

    @undisturbed
    def merged(self, *group: int) -> PACE:
        """A copy of the model in which these concepts are one, under the number of the first.

        The others stay as empty concepts, so that no other number changes. It cannot go on learning.
        """
        concepts, part_of = self._fitted(), self.part_of_
        if len(set(group)) < 2 or len(set(group)) < len(group) or not all(0 <= k < len(concepts) for k in group):
            raise ValueError(f"expected two or more different concepts of {len(concepts)} to merge; found {group}")
        if part_of is not None and len(set(part_of[list(group)])) > 1:
            raise ValueError("only kinds of one part can be merged, and these are of different parts")
        held = torch.from_numpy(np.nan_to_num(self.concept_weights_))
        chosen, found = torch.tensor(group), copy(self)
        found._concepts = merging.merged(concepts.to(torch.device("cpu"), concepts.offset.dtype), group, held)
        found._statistics, found._names = None, self.names_
        first, rest = group[0], list(group[1:])
        found.evidence_, found.concept_weights_ = self.evidence_.copy(), self.concept_weights_.copy()
        found.evidence_[first] = merging.mean_of(torch.from_numpy(self.evidence_), chosen, held)
        found.concept_weights_[first], found.concept_weights_[rest] = self.concept_weights_[list(group)].sum(), 0
        if part_of is None:
            found.share_prior_ = self.share_prior_.copy()
            found.share_prior_[first] = self.share_prior_[list(group)].sum()
            found.share_prior_[rest] = SMALLEST_ALPHA
        return found

    def save(self, path: str | PathLike[str], statistics: bool | None = None) -> None:
        """Write the model to a safetensors file, which appears whole or not at all.

        `statistics` keeps what `partial_fit` needs to go on after `load`, about twice the size of the model. None keeps it
        for models that were learned by `partial_fit`.
        """
        self._fitted()
        save_model(self, path, bool(self.n_steps_) if statistics is None else statistics)

    @classmethod
    def load(cls, path: str | PathLike[str], device: Any = None) -> PACE:
        """Read a model that `save` wrote. Where it was fitted does not matter; `device` says where to use it."""
        return load_model(cls, path).set_params(device=device)  # type: ignore[no-any-return]

    # -- in a notebook ------------------------------------------------------------------------------------------------

    def _repr_html_inner(self) -> str:
        """What scikit-learn shows as HTML: its own diagram until there are concepts."""
        from pace.notebook import model_html

        return model_html(self) if self.__sklearn_is_fitted__() else str(super()._repr_html_inner())

    def _repr_mimebundle_(self, **options: Any) -> dict[str, str]:
        bundle: dict[str, str] = super()._repr_mimebundle_(**options)
        return bundle | {"text/html": self._repr_html_inner()} if "text/html" in bundle else bundle

    # -- checks and conversions ---------------------------------------------------------------------------------------

    def _fitted(self) -> Concepts:
        if not self.__sklearn_is_fitted__():
            raise NotFittedError("this PACE model is not fitted yet; call fit(observations) first")
        return self._concepts

    def _check_fits(self, observations: Observations, predictions: bool = True) -> None:
        concepts = self._fitted()
        check_type(observations)
        check_origin(observations.origin, getattr(self, "origin_", None))
        dim, known = len(concepts.offset), concepts.label_head.shape[1]
        if observations.dim != dim:
            raise ValueError(f"embeddings have {observations.dim} dimensions, but the model was fitted with {dim}")
        if predictions and known and observations.n_classes not in (0, known):
            raise ValueError(f"predictions have {observations.n_classes} classes; the model was fitted with {known}")
        if self.prefix_tokens_ != observations.prefix_tokens:
            message = (
                f"{observations.prefix_tokens} instead of {self.prefix_tokens_} tokens before the patches count: "
                "count_cls of the backbone is not what it was when this was fitted"
            )
            warnings.warn(message, UserWarning, stacklevel=4)

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
        self.concept_weights_ = np.full(len(self._concepts), np.nan) if known is None else _numpy(known.held) * scale
        self.evidence_ = np.zeros(self.label_head_.shape) if known is None else _numpy(known.evidence())
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


def _numpy(tensor: Tensor, dtype: torch.dtype | None = None) -> Array:
    return tensor.detach().to("cpu", dtype).numpy().copy()
