"""Predictions for models without a classifier: heads that read pooled features."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pace.backbones.backbone import Backbone
from pace.classifiers import penalised_regression
from pace.files import read_tensors, reading, save_tensors
from pace.images import ImageSet, normalize, to_float
from pace.images.loading import decoded
from pace.progress import progress

_FORMAT = "pace-head-1"
HEADS = ("probe", "knn", "clusters")

# Of Neighbours, as DINO was evaluated.
_NEIGHBOURS, _TEMPERATURE = 20, 0.07
_ITSELF = 1 - 1e-5  # cosine above which an image is the same one
_LEAST = 1e-4  # probability of a class that no neighbour has


def linear_probe(features: Any, labels: Any) -> nn.Linear:
    """A linear classifier on frozen features, fitted by logistic regression.

    Parameters
    ----------
    features : (M, p)
        Pooled features, e.g. of ``backbone.pooled(images)``. They are standardised for the fit; the returned layer
        reads them as they are.
    labels : (M,)
        Classes 0 … N − 1, each at least once.
    """
    x = torch.as_tensor(features).detach().double()
    y = torch.as_tensor(labels).detach().to(x.device).long()
    classes = torch.unique(y).tolist()
    if len(classes) < 2 or classes[0] < 0:
        raise ValueError(f"labels: expected 0 … N − 1, N ≥ 2; found {len(classes)} from {classes[:8]}")
    if absent := (classes[-1] + 1) - len(classes):
        raise ValueError(f"labels: {absent} of {classes[-1] + 1} classes have no image; a probe needs one of each")
    mean, scale = x.mean(0), x.std(0, correction=0)
    scale[scale <= 1e-12 * x.abs().amax(0)] = 1.0
    # As scikit-learn weighs the penalty; its one logit for two classes stands for two that are half as large.
    penalty = (2 if len(classes) == 2 else 1) / len(x)
    weights = penalised_regression(((x - mean) / scale).float(), y, penalty).double()
    weight = weights[:-1] / scale[:, None]
    return _linear(weight.T, weights[-1] - mean @ weight)


def _linear(weight: Tensor, bias: Tensor) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0])
    layer.load_state_dict({"weight": weight, "bias": bias})
    return layer.eval().requires_grad_(False)


class Neighbours(nn.Module):
    """k-NN as self-supervised models are judged by: the 20 most similar images vote, each with weight exp(cosine / 0.07).

    An image is not its own neighbour, so predictions for the images it was made of are not their own labels.
    """

    def __init__(self, features: Tensor, votes: Tensor) -> None:
        super().__init__()
        self.features = nn.Parameter(F.normalize(features.detach().float(), dim=-1), requires_grad=False)
        self.votes = nn.Parameter(votes.detach().float(), requires_grad=False)  # (images, classes), 1 for the label

    def forward(self, features: Tensor) -> Tensor:
        similar = F.normalize(features, dim=-1) @ self.features.T
        near = similar.masked_fill(similar > _ITSELF, -1).topk(min(_NEIGHBOURS, similar.shape[1]))
        weights = (near.values / _TEMPERATURE).softmax(-1)
        return torch.einsum("bk,bkn->bn", weights, self.votes[near.indices]).clamp_min(_LEAST).log()


class ZeroShot(nn.Module):
    """How similar an image's features are to each class's text, as CLIP classifies."""

    def __init__(self, texts: Tensor, scale: float | Tensor = 100.0) -> None:
        super().__init__()
        self.texts = nn.Parameter(F.normalize(texts.detach().float(), dim=-1), requires_grad=False)
        self.scale = nn.Parameter(torch.as_tensor(float(scale)), requires_grad=False)

    def forward(self, features: Tensor) -> Tensor:
        return self.scale * F.normalize(features, dim=-1) @ self.texts.T


def zero_shot(text_features: Tensor, scale: float = 100.0) -> nn.Module:
    """A head from the text features (N, p) of N class descriptions, as CLIP classifies.

    `scale` is the model's own ``logit_scale.exp()``, near 100 for most CLIPs.
    """
    return ZeroShot(text_features, scale)


def zero_shot_from_names(model: Any, names: Sequence[str]) -> nn.Module:
    """The same from names of classes alone, for a CLIP with its texts: of open_clip, or of transformers."""
    texts = [f"a photo of a {name}." for name in names]
    if len(texts) < 2:
        raise ValueError(f"classes: expected the names of 2 classes or more; found {len(texts)}")
    return ZeroShot(text_features(model, texts, "classes"), model.logit_scale.exp())


@torch.no_grad()
def text_features(model: Any, texts: Sequence[str], asked: str) -> Tensor:
    """(texts, p): what a CLIP of open_clip or transformers makes of texts; `asked` is the argument that errors speak of."""
    device = next(model.parameters()).device
    found: Any
    if hasattr(model, "encode_text"):
        tokens = import_module("open_clip").tokenize(texts, getattr(model, "context_length", 77))
        found = model.encode_text(tokens.to(device))
    elif hasattr(model, "get_text_features"):
        tokenizer = import_module("transformers").AutoTokenizer.from_pretrained(model.config._name_or_path)
        found = model.get_text_features(**tokenizer(texts, padding="max_length", return_tensors="pt").to(device))
    else:
        kind, such = type(model).__name__, "a CLIP with its texts, such as openai/clip-vit-base-patch32"
        raise ValueError(f"{asked}: {kind} has no text encoder to compare images with words; expected {such}")
    features: Tensor = getattr(found, "pooler_output", found)
    return features


def fit_head(kind: str, features: Tensor, labels: Any = None) -> nn.Module:
    """A head from the pooled features (M, p) of images: "probe" and "knn" for their labels, "clusters" without any.

    "clusters" is k-means on the features themselves, with as many clusters as there are labels, else one for every 20
    images (2 to 20); a linear classifier then tells them apart.
    """
    if kind == "clusters":
        return linear_probe(features, _clusters(features, labels))
    if labels is None:
        raise ValueError(f"head: {kind} needs labels; expected a dataset or a folder of class folders")
    if kind == "knn":
        return Neighbours(torch.as_tensor(features), F.one_hot(torch.as_tensor(labels).long())).eval()
    return linear_probe(features, labels)


def named_by(kind: str, head: nn.Module, class_names: Sequence[str] | None) -> Sequence[str] | None:
    """What the classes of a fitted head are called: those of the labels, but clusters are nobody's classes."""
    return [f"cluster {number}" for number in range(1, len(head.bias) + 1)] if kind == "clusters" else class_names  # type: ignore[arg-type]


def _clusters(features: Tensor, labels: Any) -> Any:
    from sklearn.cluster import KMeans

    if len(features) < 2:
        raise ValueError("head: clusters are of several images; found 1")
    count = min(20, max(2, len(features) // 20)) if labels is None else len(torch.unique(torch.as_tensor(labels)))
    found = KMeans(max(2, count), n_init=4, random_state=0).fit(F.normalize(features.float(), dim=-1).cpu().numpy())
    return np.unique(found.labels_, return_inverse=True)[1]


def pooled_features(backbone: Backbone, images: ImageSet, batch_size: int = 64) -> Tensor:
    """(M, p): the features that a head reads."""
    rows, how, device = range(len(images)), backbone.preprocessing, backbone.device
    chunks = [rows[start : start + batch_size] for start in range(0, len(rows), batch_size)]
    features = []
    with progress("computing features", len(images)) as advance:
        for chunk, pixels in decoded(images, chunks, how, for_gpu=device.type == "cuda"):
            features.append(backbone.pooled(normalize(to_float(pixels.to(device)), how)).cpu())
            advance(len(chunk))
    return torch.cat(features)


def save_head(head: nn.Module, path: Path) -> None:
    save_tensors(path, head.state_dict(), {"format": _FORMAT})


def load_head(path: Path) -> nn.Module:
    remedy = "run the command that made it again"
    weights, _ = read_tensors(path, {"format": _FORMAT}, remedy)
    with reading(path, remedy):
        if not all(bool(torch.isfinite(tensor).all()) for tensor in weights.values()):
            raise ValueError("a number in it is not finite")
        kinds: tuple[Callable[..., nn.Module], ...] = (_linear, Neighbours, ZeroShot)
        head = next(kind for kind in kinds if weights.keys() <= set(signature(kind).parameters))(**weights)
        head.load_state_dict(weights)  # exactly as they were: normalising them anew rounds
        return head.eval()
