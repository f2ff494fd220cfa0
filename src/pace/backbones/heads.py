"""Predictions for models without a classifier: heads that read pooled features."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pace.atomic import write_atomically
from pace.backbones.backbone import Backbone
from pace.backbones.batches import Pixels
from pace.images import ImageSet, normalize
from pace.progress import progress


def linear_probe(features: Any, labels: Any, *, strength: float = 1.0, max_iter: int = 1000) -> nn.Linear:
    """A linear classifier on frozen features, fitted by logistic regression.

    Parameters
    ----------
    features : (M, p)
        Pooled features, e.g. of ``backbone.pooled(images)``. They are standardised for the fit; the returned layer
        reads them as they are.
    labels : (M,)
        Classes 0 … N − 1, each at least once.
    strength
        1 / C of scikit-learn: how strongly large weights are penalised.
    """
    from sklearn.linear_model import LogisticRegression

    x = torch.as_tensor(features).detach().cpu().double().numpy()
    y = torch.as_tensor(labels).detach().cpu().numpy()
    if x.ndim != 2 or y.shape != x.shape[:1]:
        raise ValueError(f"expected features (images, p) and labels (images,); found {x.shape} and {y.shape}")
    classes = np.unique(y)
    if len(classes) < 2 or not np.array_equal(classes, np.arange(len(classes))):
        raise ValueError(
            f"labels: expected 0 … N − 1, N ≥ 2, each at least once; found {len(classes)} from {classes[:8]}"
        )
    mean, deviation = x.mean(0), x.std(0)
    deviation[deviation == 0] = 1
    probe = LogisticRegression(C=1 / strength, max_iter=max_iter).fit((x - mean) / deviation, y)
    weight, bias = probe.coef_ / deviation, probe.intercept_ - (probe.coef_ / deviation) @ mean
    if len(classes) == 2:  # scikit-learn gives one logit for two classes
        weight, bias = np.concatenate([-weight, weight]) / 2, np.concatenate([-bias, bias]) / 2
    layer = nn.Linear(x.shape[1], len(classes))
    with torch.no_grad():
        layer.weight.copy_(torch.from_numpy(weight))
        layer.bias.copy_(torch.from_numpy(bias))
    return layer.eval().requires_grad_(False)


def fit_probe(backbone: Backbone, images: ImageSet, batch_size: int = 64) -> nn.Linear:
    """A linear classifier from the model's pooled features to the labels of `images`."""
    if images.labels is None:
        raise ValueError("probe: needs labels; expected a dataset or a folder of class folders")
    pixels = Pixels(images, backbone.preprocessing, backbone.device, keep=False)
    features = []
    with progress("computing features", len(images)) as advance:
        for rows, batch in pixels.batches(range(len(images)), batch_size):
            features.append(backbone.pooled(normalize(batch, backbone.preprocessing)).cpu())
            advance(len(rows))
    return linear_probe(torch.cat(features), images.labels).to(backbone.device)


def save_probe(head: nn.Module, path: Path) -> None:
    from safetensors.torch import save

    write_atomically(
        path, save({name: weight.detach().cpu().contiguous() for name, weight in head.state_dict().items()})
    )


def load_probe(path: Path) -> nn.Linear:
    from safetensors.torch import load_file

    weights = load_file(path)
    n_classes, features = weights["weight"].shape
    head = nn.Linear(features, n_classes)
    head.load_state_dict(weights)
    return head.eval().requires_grad_(False)


class ZeroShot(nn.Module):
    """Scaled cosine of image features with one text feature per class."""

    text_features: Tensor

    def __init__(self, text_features: Tensor, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.register_buffer("text_features", F.normalize(text_features.detach().float(), dim=-1))

    def forward(self, features: Tensor) -> Tensor:
        return self.scale * F.normalize(features.float(), dim=-1) @ self.text_features.T


def zero_shot(text_features: Tensor, scale: float = 100.0) -> nn.Module:
    """A head from the text features (N, p) of N class descriptions, as CLIP classifies.

    `scale` is the model's own ``logit_scale.exp()``, near 100 for most CLIPs.
    """
    if text_features.ndim != 2:
        raise ValueError(f"text_features: expected shape (classes, p); found {tuple(text_features.shape)}")
    return ZeroShot(text_features, float(scale))
