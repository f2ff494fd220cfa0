"""Concepts and words: which word suits a concept, and which concept suits some words, by an image-text model (a CLIP).

A concept is looked at through its most typical patches within their surroundings, each from another image. The score of a word
is how often it suits a crop of this concept better than one of another, 0.5 by chance. A name is the word that has gained most
probability, among all words that are tried, beside the other concepts. It is chosen by every second crop and scored by the
others, so that trying many words does not raise the score.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from importlib.resources import files
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from scipy.special import softmax
from torch import Tensor
from torch.nn.functional import normalize as unit

from pace.backbones import Backbone, ModelChoice, open_model
from pace.backbones.heads import text_features
from pace.editing import LONGEST
from pace.explanation import Array
from pace.images.given import images_from
from pace.images.preparation import normalize, prepare
from pace.naming import use_of
from pace.observations import Observations
from pace.observing.extract import observe
from pace.progress import progress
from pace.showing import summary
from pace.showing.patches import Pictures, grid_of, patch_box

if TYPE_CHECKING:
    from pace.model_explainer import ModelExplainer

GOOD = 0.8  # score of a name that is good; of concepts whose patches have nothing in common, 1 in 1000 gets one
_IMAGES = 500  # to find typical patches in
_CROPS = 16  # of a concept
_AROUND = 7  # a crop reaches a seventh of the picture to every side of its patch
PROMPT = "a close-up photo of {}"
_AT_ONCE = 64


class Suggestion(NamedTuple):
    """A word for a concept."""

    concept: int
    name: str | None  # None where no word is good
    score: float
    closest: str  # the word that suits it best, good or not


class Found(NamedTuple):
    """How well words suit a concept."""

    concept: int
    score: float


class Words:
    """What an image-text model makes of the concepts of a `ModelExplainer`: those in use that are not hidden.

    Parameters
    ----------
    explainer
        The concepts and their model.
    clip
        An image-text model: of open_clip by name, "ViT-B-32/openai", a file or a name that `pace.backbones.load` reads, or the
        model itself. By default the explained model, if it is one.
    images
        To find typical patches in; by default a sample of those of the fit.
    observations
        Of these images, if there are any.
    """

    def __init__(
        self, explainer: ModelExplainer, clip: Any = None, images: Any = None, observations: Observations | None = None
    ) -> None:
        self._model = _opened(clip, explainer.backbone)
        if not (hasattr(self._model, "encode_text") or hasattr(self._model, "get_text_features")):
            text_features(self._model, [], "clip")  # says so before the images are looked at
        if images is None:
            if explainer.images is None:
                raise ValueError("images: needs some to look at the concepts in; those of the fit are not known")
            rows = np.unique(np.linspace(0, len(explainer.images) - 1, _IMAGES).astype(int))
            images = explainer.images.subset(rows.tolist())
            observations = None if observations is None else observations[rows]
        images = images_from(images)
        if len(images) < 4:
            raise ValueError(f"images: expected 4 or more to look at the concepts in; found {len(images)}")
        self.names, use = explainer.concepts.names_, use_of(explainer.concepts.concept_weights_)
        self.concepts = [k for k in use.order if not self.names[k].hidden]
        if len(self.concepts) < 2:
            raise ValueError("words tell concepts apart, and there are less than two in use that are not hidden")
        seen = observe(explainer.backbone, images) if observations is None else observations
        self._crops = _features(self._model, explainer, self.concepts, images, seen)  # (K, n, p), of length 1

    def suggest(self, words: Sequence[str] | str | PathLike[str] | None = None) -> list[Suggestion]:
        """The best of these words for every concept, most used first; by default of the list that comes with the package.

        `words` are words, or a file with one in a line.
        """
        known = list(words) if words is not None and not isinstance(words, (str, PathLike)) else read_words(words)
        chances = softmax(self._model.logit_scale.exp().item() * self._near(known), -1)  # (K, n, words)
        ahead, rest = chances[:, ::2], chances[:, 1::2]
        gained = ahead.mean(1) - ahead.mean((0, 1))
        found = []
        for position, k in enumerate(self.concepts):
            best = int(gained[position].argmax())
            score = _score(rest[:, :, best], position)
            word = re.sub("^(an?|the) ", "", known[best])
            found.append(Suggestion(k, word if score >= GOOD else None, score, word))
        return found

    def find(self, text: str) -> list[Found]:
        """The concepts by how well the text suits them, best first."""
        near = self._near([text])[:, :, 0]
        found = [Found(k, _score(near, position)) for position, k in enumerate(self.concepts)]
        return sorted(found, key=lambda one: -one.score)

    def _near(self, texts: Sequence[str]) -> Array:
        """Cosines (K, n, texts) of the crops with each text."""
        parts = []
        with progress("reading words", len(texts)) as advance:
            for start in range(0, len(texts), _AT_ONCE):
                some = [PROMPT.format(text) for text in texts[start : start + _AT_ONCE]]
                parts.append(unit(text_features(self._model, some, "clip").float(), dim=-1).cpu())
                advance(len(some))
        near: Array = (self._crops @ torch.cat(parts).T).numpy()
        return near


def read_words(file: str | PathLike[str] | None = None) -> list[str]:
    """Words from a file, one in a line, without lines that begin with #; by default those that come with the package."""
    path = files("pace") / "words.txt" if file is None else Path(file).expanduser()
    lines = (" ".join(line.split()) for line in path.read_text(encoding="utf-8").splitlines())
    words = list(dict.fromkeys(line for line in lines if line and not line.startswith("#")))
    if wrong := next((word for word in words if len(word) > LONGEST or not word.isprintable()), None):
        raise ValueError(f"words: {file} has a line that is no name, {wrong[:20]!r} …")
    if len(words) < 2:
        raise ValueError(f"words: expected 2 words or more in {file}, one in a line; found {len(words)}")
    return words


def _score(near: Array, position: int) -> float:
    """How often a crop of this concept (of K, n) is nearer than one of another; half where they are equally near."""
    own, others = near[position][:, None], np.delete(near, position, 0).reshape(1, -1)
    return float((own > others).mean() + (own == others).mean() / 2)


def _opened(clip: Any, backbone: Backbone) -> Any:
    if clip is None:
        return backbone.model
    if not isinstance(clip, (str, PathLike)):
        return clip
    name, _, weights = str(clip).partition("/")
    library = import_module("open_clip")
    if name in library.list_models() and not Path(clip).exists():
        tags = library.list_pretrained_tags_by_model(name)
        found = library.create_model(name, pretrained=weights or tags[0])
    else:
        found, _ = open_model(ModelChoice(clip))
    return found.float().eval().requires_grad_(False).to(backbone.device)


@torch.no_grad()
def _features(model: Any, explainer: ModelExplainer, concepts: list[int], images: Any, seen: Observations) -> Tensor:
    """Of crops of every concept (K, n, p)."""
    reader, grid = Backbone(model), grid_of(seen)
    how = replace(reader.preprocessing, crop_ratio=None)  # all of the crop
    pictures = Pictures(images, explainer.backbone.preprocessing)
    typical = summary.typical_patches(explainer.concepts.means_[concepts], seen, min(_CROPS, len(images)))
    places, margin = typical.reshape(-1, 2), max(1, round(max(grid) / _AROUND))
    features = []
    with progress("looking at typical patches", len(places)) as advance:
        for start in range(0, len(places), _AT_ONCE):
            some = []
            for image, patch in places[start : start + _AT_ONCE].tolist():
                pixels = pictures[image]
                window = pixels[patch_box(patch, grid, pixels.shape, margin)]
                some.append(prepare(torch.from_numpy(window).permute(2, 0, 1), how))
            features.append(reader.pooled(normalize(torch.stack(some).to(reader.device), how)).cpu())
            advance(len(some))
    return unit(torch.cat(features).float(), dim=-1).reshape(*typical.shape[:2], -1)
