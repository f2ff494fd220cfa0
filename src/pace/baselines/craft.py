"""CRAFT (Fel et al. 2023): concepts are the rows of a non-negative factorisation of rectified patch activations.

A = max(e, 0) ≈ U W · U (n, K) how much of every concept a patch holds · W (K, d) the concepts

The importance of a concept is its total Sobol index: masks m ∈ [0, 1]^K damp the concepts, and the index is the share of the
variance of the predicted class's logit that involves concept k. The recursive step replaces important concepts by their parts.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from pace.baselines.explainer import Explainer, SplitModel, check_counts, point
from pace.baselines.factorization import coefficients, nmf
from pace.baselines.head import Head, Part
from pace.baselines.patches import FACTOR_SAMPLE, SAMPLE, draw_patches, explain_tokens
from pace.baselines.sobol import total_indices
from pace.explanation import Array, Explanation
from pace.observations import Observations

_SOBOL_IMAGES, _SOBOL_MASKS = 512, 16  # at most so many images and at least so many masks go through h together
_TOP, _TOP_AT_MOST = 0.1, 2000  # a concept's parts are found in the tenth of the patches that hold most of it


class CRAFT(Explainer):
    """θ is the mean of an image's U or, with explains="importance", its concepts' Sobol indices. φ is U.

    Parameters
    ----------
    n_concepts
        K.
    per_class
        One dictionary for each predicted class, as CRAFT is meant to be used; concept k then differs between classes. Classes
        that are never predicted in training use the dictionary of all images.
    explains
        "coefficients" or "importance"; the latter costs designs · (K + 2) forwards of h per image.
    split
        Share of concepts that the recursive step splits in two; K is the number after splitting.
    designs
        Points of the Sobol design.
    importance_images
        Images per class that its concepts' importance is estimated on.
    sample
        Patches to learn from: by default 100,000, or 300,000 with `per_class`, since each class learns from its own.
    """

    head_: Head
    dictionaries_: Tensor  # (K, d), or (N, K, d) per class

    def __init__(
        self,
        n_concepts: int = 100,
        *,
        per_class: bool = False,
        explains: Literal["coefficients", "importance"] = "coefficients",
        split: float = 0.2,
        designs: int = 32,
        importance_images: int = 5,
        sample: int | None = None,
        batch_size: int | None = None,
    ) -> None:
        check_counts(n_concepts=n_concepts, designs=designs, importance_images=importance_images)
        check_counts(sample=sample, batch_size=batch_size)
        if explains not in ("coefficients", "importance"):
            raise ValueError(f"explains: expected 'coefficients' or 'importance'; found {explains!r}")
        if not 0 <= split <= 0.5:
            raise ValueError(f"split: expected a share from 0 to 0.5; found {split}")
        self.n_concepts, self.per_class, self.explains, self.split = n_concepts, per_class, explains, split
        self.designs, self.importance_images = designs, importance_images
        self.sample = sample or (SAMPLE if per_class else FACTOR_SAMPLE)
        self.batch_size = batch_size
        self.name = "craft" + ("-per-class" if per_class else "") + ("-sobol" if explains == "importance" else "")

    def _fit(self, backbone: SplitModel, train: Observations, perturbed: Observations | None, seed: int) -> None:
        self.head_ = Head(backbone, train)
        patches = draw_patches(train, self.sample, self.n_concepts, seed, self.device_).clamp_min_(0)
        classes = self.head_.classes(train).cpu().numpy()
        present = np.unique(classes).tolist()
        examples = {label: np.flatnonzero(classes == label)[: self.importance_images] for label in present}
        some = train[np.concatenate(list(examples.values()))]
        self.dictionaries_ = shared = self._dictionary(patches, some, seed)
        if self.per_class:
            self.dictionaries_ = shared.repeat(self.head_.n_classes, 1, 1)
            owners = np.repeat(classes, len(patches) // len(train))
            for label in present:
                own = patches[torch.from_numpy(owners == label).to(patches.device)]
                self.dictionaries_[label] = self._dictionary(own, train[examples[label]], seed)
        self.concepts_ = None if self.per_class else shared.cpu().numpy()
        self._examples, self._seed = (train, examples), seed
        vars(self).pop("importance_", None)  # of an earlier fit

    @cached_property
    def importance_(self) -> Array:
        """(N, K): the concepts' mean importance for every class predicted in training, computed when first used."""
        train, examples = self._examples
        with torch.no_grad():
            by_image = self._importance(train[np.concatenate(list(examples.values()))], self.dictionaries_, self._seed)
        found = np.zeros((self.head_.n_classes, self.n_concepts), np.float32)
        ends = np.cumsum([len(images) for images in examples.values()])[:-1]
        found[list(examples)] = [some.mean(0) for some in np.split(by_image, ends)]
        return found

    def _explain(self, observations: Observations, seed: int, patches: bool) -> Explanation:
        classes = self.head_.classes(observations).to(self.device_)

        def find(tokens: Tensor, images: slice) -> Tensor:
            return coefficients(tokens.clamp_min(0), _of(self.dictionaries_, classes[images]))

        if self.explains == "coefficients":
            return explain_tokens(observations, find, self.n_concepts, self.device_, self.batch_size, patches)
        theta = self._importance(observations, self.dictionaries_, seed)
        if not patches:
            return point(theta, None, observations)
        held = explain_tokens(observations, find, self.n_concepts, self.device_, self.batch_size, patches)
        return replace(held, theta=theta, gamma=theta)

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
        """Total Sobol indices (M, K) of the concepts for every image's predicted class.

        The part of a token that is not factorised stays unchanged, so that the mask of ones gives the model's own logit.
        """
        head, found = self.head_, []
        dictionary = dictionary.to(head.device)
        size = self.batch_size or min(_SOBOL_IMAGES, max(1, head.rows() // _SOBOL_MASKS))
        for part in head.parts(observations, size):
            own = _of(dictionary, part.targets)
            held = coefficients(part.tokens.clamp_min(0), own)[:, None]  # (B, 1, R, K)

            def values(masks: Tensor, part: Part = part, own: Tensor = own, held: Tensor = held) -> Tensor:
                images, outputs = len(part.tokens), []
                for some in torch.split(masks, max(1, head.rows() // images)):
                    change = ((some[None, :, None] - 1) * held).flatten(1, 2) @ own
                    inputs = part.tokens[:, None] + change.reshape(images, len(some), *part.tokens.shape[1:])
                    outputs.append(part.logit(inputs.flatten(0, 1)).view(images, -1))
                return torch.cat(outputs, 1)

            found.append(total_indices(values, dictionary.shape[-2], self.designs, seed, head.device).cpu().numpy())
        return np.concatenate(found)


def _parts(patches: Tensor, held: Tensor, dictionary: Tensor, chosen: Tensor, seed: int) -> Tensor:
    """(n, 2, d): two parts of each chosen concept: factors of its top patches after removing all other concepts."""
    top = max(2, min(_TOP_AT_MOST, int(_TOP * len(patches))))
    most = held[:, chosen].topk(min(top, len(patches)), dim=0).indices.T  # (n, top)
    others = held[most]  # (n, top, K)
    others[torch.arange(len(chosen), device=chosen.device), :, chosen] = 0
    return nmf((patches[most] - others @ dictionary).clamp_min(0), 2, seed)[1]


def _of(dictionaries: Tensor, classes: Tensor) -> Tensor:
    """The dictionary of every image's class (B, K, d), or the shared one (K, d)."""
    return dictionaries if dictionaries.ndim == 2 else dictionaries[classes]
