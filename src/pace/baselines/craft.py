"""CRAFT (Fel et al. 2023): concepts are the rows of a non-negative factorisation of rectified patch activations.

A = max(e, 0) ≈ U W · U (n, K) how much of every concept a patch holds · W (K, d) the concepts

The importance of a concept is its total Sobol index: masks m ∈ [0, 1]^K damp the concepts, and the index is the share of the
variance of the predicted class's logit that involves concept k. The recursive step replaces important concepts by their parts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from pace.backbones import Backbone
from pace.baselines.explainer import Explainer, check_counts
from pace.baselines.factorization import coefficients, nmf
from pace.baselines.head import Head, Part
from pace.baselines.references import FACTOR_SAMPLE, SAMPLE, draw_patches, explain_tokens
from pace.explanation import Array, Explanation
from pace.observations import Batch, Observations

_SOBOL_IMAGES, _SOBOL_MASKS = 512, 16  # at most so many images and at least so many masks go through h together
_EXAMPLES = 5  # images per class that the concepts' importance is estimated on
_TOP, _TOP_AT_MOST = 0.1, 2000  # a concept's parts are found in the tenth of the patches that hold most of it


class CRAFT(Explainer):
    """θ is the mean of an image's U or, with explains="importance", its concepts' Sobol indices. φ is U.

    Parameters
    ----------
    n_concepts
        K.
    per_class
        One dictionary for each predicted class, or that of all images for a class never predicted in training.
    explains
        "coefficients" or "importance"; the latter costs designs · (K + 2) forwards of h per image.
    split, designs
        Share of concepts that the recursive step splits in two (K is the number afterwards), and points of the Sobol design.
    sample
        Patches to learn from: by default 100,000, or 300,000 with `per_class`, since each class learns from its own.
    """

    through_model = True

    def __init__(
        self,
        n_concepts: int = 100,
        *,
        per_class: bool = False,
        explains: Literal["coefficients", "importance"] = "coefficients",
        split: float = 0.2,
        designs: int = 32,
        sample: int | None = None,
    ) -> None:
        check_counts(n_concepts=n_concepts, designs=designs, sample=sample)
        if explains not in ("coefficients", "importance"):
            raise ValueError(f"explains: expected 'coefficients' or 'importance'; found {explains!r}")
        if not 0 <= split <= 0.5:
            raise ValueError(f"split: expected a share from 0 to 0.5; found {split}")
        self.n_concepts, self.per_class, self.explains, self.split = n_concepts, per_class, explains, split
        self.designs, self.sample = designs, sample or (SAMPLE if per_class else FACTOR_SAMPLE)
        self.name = "craft" + ("-per-class" if per_class else "") + ("-sobol" if explains == "importance" else "")

    def _fit(self, backbone: Backbone, train: Observations, perturbed: Observations | None, seed: int) -> None:
        self.head_ = Head(backbone, train)
        patches = draw_patches(train, self.sample, self.n_concepts, seed, self.device_)[0].clamp_min_(0)
        classes = self.head_.classes(train).cpu().numpy()
        present = np.unique(classes).tolist()
        examples = {label: np.flatnonzero(classes == label)[:_EXAMPLES] for label in present}
        some = train[np.concatenate(list(examples.values()))]
        self.dictionaries_ = shared = self._dictionary(patches, some, seed)  # (K, d), or (N, K, d) per class
        if self.per_class:
            self.dictionaries_ = shared.repeat(self.head_.n_classes, 1, 1)
            owners = np.repeat(classes, len(patches) // len(train))
            for label in present:
                own = patches[torch.from_numpy(owners == label).to(patches.device)]
                self.dictionaries_[label] = self._dictionary(own, train[examples[label]], seed)
        self.concepts_ = None if self.per_class else shared.cpu().numpy()

    def _explain(self, observations: Observations, seed: int, patches: bool) -> Explanation:
        classes = self.head_.classes(observations).to(self.device_)

        def find(batch: Batch, images: slice) -> Tensor:
            return coefficients(batch.embeddings.clamp_min(0), _of(self.dictionaries_, classes[images]))

        found = explain_tokens(observations, find, self.device_, patches)
        if self.explains == "coefficients":
            return found
        theta = self._importance(observations, self.dictionaries_, seed)
        return replace(found, theta=theta, gamma=theta)

    def importance(self, observations: Observations, explanation: Explanation) -> Array:
        """Total Sobol indices, for designs · (K + 2) forwards of h per image."""
        if self.explains == "importance":
            return explanation.theta
        with torch.inference_mode(False), torch.no_grad():
            return self._importance(observations, self.dictionaries_, seed=0)

    def _dictionary(self, patches: Tensor, examples: Observations, seed: int) -> Tensor:
        """W (K, d) of patches (n, d): a factorisation, and its most important concepts split in two."""
        extra = round(self.split * self.n_concepts)
        if not extra:
            return nmf(patches, self.n_concepts, seed)[1]
        held, whole = nmf(patches, self.n_concepts - extra, seed)
        importance = self._importance(examples, whole, seed).mean(0)
        chosen = torch.from_numpy(np.sort(np.argsort(-importance, kind="stable")[:extra])).to(patches.device)
        kept = torch.ones(len(whole), dtype=torch.bool, device=patches.device)
        kept[chosen] = False
        return torch.cat([whole[kept], _parts(patches, held, whole, chosen, seed).flatten(0, 1)])

    def _importance(self, observations: Observations, dictionary: Tensor, seed: int) -> Array:
        """Total Sobol indices (M, K) of the concepts for every image's predicted class."""
        head, dictionary = self.head_, dictionary.to(self.head_.device)
        parts = head.parts(observations, min(_SOBOL_IMAGES, max(1, head.rows() // _SOBOL_MASKS)))
        return np.concatenate([self._indices(part, dictionary, seed).cpu().numpy() for part in parts])

    def _indices(self, part: Part, dictionary: Tensor, seed: int) -> Tensor:
        own = _of(dictionary, part.targets)
        held = coefficients(part.tokens.clamp_min(0), own)[:, None]  # (B, 1, R, K)

        def damped(masks: Tensor) -> Tensor:
            # What is not factorised stays unchanged, so that the mask of ones gives the model's own logit.
            change = ((masks[None, :, None] - 1) * held).flatten(1, 2) @ own
            return part.tokens[:, None] + change.view(len(part.tokens), len(masks), *part.tokens.shape[1:])

        return total_indices(lambda masks: part.masked(masks, damped), held.shape[-1], self.designs, seed, held.device)


def _parts(patches: Tensor, held: Tensor, dictionary: Tensor, chosen: Tensor, seed: int) -> Tensor:
    """(n, 2, d): two parts of each chosen concept: factors of its top patches after removing all other concepts."""
    top = max(2, min(_TOP_AT_MOST, int(_TOP * len(patches))))
    most = held[:, chosen].topk(min(top, len(patches)), dim=0).indices.T  # (n, top)
    others = held[most]  # (n, top, K)
    others[torch.arange(len(chosen), device=chosen.device), :, chosen] = 0
    return nmf((patches[most] - others @ dictionary).clamp_min(0), 2, seed)[1]


def _of(dictionaries: Tensor, classes: Tensor) -> Tensor:
    """Every image's own (B, K, d), or the shared one (K, d)."""
    return dictionaries if dictionaries.ndim == 2 else dictionaries[classes]


def total_indices(
    values: Callable[[Tensor], Tensor], variables: int, designs: int, seed: int, device: torch.device
) -> Tensor:
    """Total Sobol indices (B, K) of B outputs in K variables, uniform on [0, 1]; `values` turns (S, K) into outputs (B, S).

    Jansen's estimator on a scrambled Sobol sequence, designs · (K + 2) evaluations; 0 for an output that does not vary.
    """
    engine = torch.quasirandom.SobolEngine(2 * variables, scramble=True, seed=seed)  # type: ignore[no-untyped-call]
    first, second = torch.split(engine.draw(designs).to(device), variables, 1)
    swapped = first.repeat(variables, 1, 1)  # variable k of design k comes from the second half
    index = torch.arange(variables, device=device)
    swapped[index, :, index] = second.T
    found = values(torch.cat([first, second, swapped.flatten(0, 1)])).double()
    before, after = found[:, :designs], found[:, 2 * designs :].reshape(-1, variables, designs)
    variance = found[:, : 2 * designs].var(1, correction=0)[:, None]
    effect = (before[:, None] - after).square().mean(2) / 2
    still = variance <= 1e-12 * found[:, :designs].square().mean(1, keepdim=True)
    return torch.where(still, 0.0, effect / variance.clamp_min(1e-300)).float()
