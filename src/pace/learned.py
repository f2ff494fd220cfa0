"""What a fit of PACE leaves: its concepts, explanations of images by them, and its file."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from os import PathLike
from typing import Any, Self

import numpy as np
import torch
from sklearn.base import BaseEstimator, TransformerMixin
from sklearn.exceptions import NotFittedError
from torch import Tensor

from pace.explanation import Array, Explanation
from pace.fitting.arguments import check_origin, check_pair, check_type, settings_of
from pace.fitting.model_file import load_model, save_model
from pace.model import merging
from pace.model.concepts import Concepts
from pace.model.effective import effective_weights
from pace.model.gaussians import Prior
from pace.model.learning import expect_all, explain_batch
from pace.model.nearest import Patches, nearest
from pace.model.precision import undisturbed
from pace.model.selecting import Selection
from pace.model.settings import SMALLEST_ALPHA
from pace.model.statistics import Statistics
from pace.naming import Name, concept_names
from pace.observations import Observations
from pace.progress import progress


class Learned(TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """All of `PACE` but its arguments and how it learns."""

    _concepts: Concepts
    _prior: Prior
    _statistics: Statistics | None
    _names: list[Name] | None = None  # where they are not those that follow from their use
    selection_: Selection | None  # how many concepts were found, where that was asked
    n_steps_: int  # batches of `partial_fit` so far
    prefix_tokens_: int  # that counted beside the patches
    background_: Array | None  # (P,) parts that are background, by the attention they get; None without parts
    concept_weights_: Array  # (K,) patches of the images, not of their perturbed views, that every concept holds
    evidence_: Array  # (K, N) how much likelier a class is where the concept is than in all images, in probability
    origin_: dict[str, str] | None  # model, block, attention block and preprocessing, as `Observations.origin` has them

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

    # -- the concepts -------------------------------------------------------------------------------------------------

    def __sklearn_is_fitted__(self) -> bool:
        return getattr(self, "_concepts", None) is not None and hasattr(self, "concept_weights_")

    @property
    def means_(self) -> Array:
        """μ_k (K, d)."""
        concepts = self._fitted()
        return as_numpy(concepts.means.double() + concepts.offset.double(), concepts.means.dtype)

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
        return None if nest is None else as_numpy(nest.part_of)

    @property
    def n_parts_(self) -> int:
        """P; as many as concepts where these are no kinds."""
        nest = self._fitted().nest
        return len(self._concepts) if nest is None else len(nest)

    @property
    def covariances_(self) -> Array:
        """Σ_k (K, d, d); (d, d) when tied; the variances (K, d) when diagonal. Of kinds, in the features that tell them."""
        gaussians = self._fitted().gaussians
        return as_numpy(gaussians.covariances(), gaussians.means.dtype)

    @property
    def label_head_(self) -> Array:
        """H (K, N), columns η_n in [-1, 1]."""
        return as_numpy(self._fitted().label_head)

    @property
    def pair_weights_(self) -> Array:
        """β (K,) in [0, 1]."""
        return as_numpy(self._fitted().pair_weights)

    @property
    def alpha_(self) -> Array:
        """α (K,); (P,) of parts."""
        return as_numpy(self._fitted().alpha)

    @property
    def empty_concepts_(self) -> Array:
        """Concepts that hold less than one patch of all images; they keep their mean and the pooled covariance.

        Those that pruning left empty stand far from all patches.
        """
        self._fitted()
        return np.flatnonzero(self.concept_weights_ < 1)

    @undisturbed
    def merged(self, *group: int) -> Self:
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
    def load(cls, path: str | PathLike[str], device: Any = None) -> Self:
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


def as_numpy(tensor: Tensor, dtype: torch.dtype | None = None) -> Array:
    return tensor.detach().to("cpu", dtype).numpy().copy()
