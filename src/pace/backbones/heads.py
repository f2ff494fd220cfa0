"""Predictions for models without a classifier: heads that read pooled features."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pace.backbones.backbone import Backbone
from pace.files import read_tensors, reading, save_tensors
from pace.images import ImageSet, normalize, to_float
from pace.images.loading import decoded
from pace.progress import progress

_FORMAT = "pace-probe-1"


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
    from sklearn.linear_model import LogisticRegression
    from sklearn.preprocessing import StandardScaler

    x = torch.as_tensor(features).detach().cpu().double().numpy()
    y = torch.as_tensor(labels).detach().cpu().numpy()
    classes = np.unique(y)
    if len(classes) < 2 or not np.array_equal(classes, np.arange(len(classes))):
        found = f"{len(classes)} from {classes[:8]}"
        raise ValueError(f"labels: expected 0 … N − 1, N ≥ 2, each at least once; found {found}")
    scaler = StandardScaler().fit(x)
    probe = LogisticRegression(max_iter=1000).fit(scaler.transform(x), y)
    weight, bias = probe.coef_ / scaler.scale_, probe.intercept_ - probe.coef_ @ (scaler.mean_ / scaler.scale_)
    if len(classes) == 2:  # scikit-learn gives one logit for two classes
        weight, bias = np.concatenate([-weight, weight]) / 2, np.concatenate([-bias, bias]) / 2
    return _linear(torch.from_numpy(weight), torch.from_numpy(bias))


def _linear(weight: Tensor, bias: Tensor) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0])
    layer.load_state_dict({"weight": weight, "bias": bias})
    return layer.eval().requires_grad_(False)


def fit_probe(backbone: Backbone, images: ImageSet, batch_size: int = 64) -> nn.Linear:
    """A linear classifier from the model's pooled features to the labels of `images`."""
    if images.labels is None:
        raise ValueError("probe: needs labels; expected a dataset or a folder of class folders")
    rows, how, device = range(len(images)), backbone.preprocessing, backbone.device
    chunks = [rows[start : start + batch_size] for start in range(0, len(rows), batch_size)]
    features = []
    with progress("computing features", len(images)) as advance:
        for chunk, pixels in decoded(images, chunks, how, for_gpu=device.type == "cuda"):
            features.append(backbone.pooled(normalize(to_float(pixels.to(device)), how)).cpu())
            advance(len(chunk))
    return linear_probe(torch.cat(features), images.labels).to(device)


def save_probe(head: nn.Module, path: Path) -> None:
    save_tensors(path, head.state_dict(), {"format": _FORMAT})


def load_probe(path: Path) -> nn.Linear:
    remedy = "run the command that made it again"
    tensors, _ = read_tensors(path, {"format": _FORMAT}, remedy)
    with reading(path, remedy):
        if not all(bool(torch.isfinite(tensor).all()) for tensor in tensors.values()):
            raise ValueError("a number in it is not finite")
        return _linear(**tensors)


def zero_shot(text_features: Tensor, scale: float = 100.0) -> Callable[[Tensor], Tensor]:
    """A head from the text features (N, p) of N class descriptions, as CLIP classifies.

    `scale` is the model's own ``logit_scale.exp()``, near 100 for most CLIPs.
    """
    texts, scale = F.normalize(text_features.detach().float(), dim=-1), float(scale)
    return lambda features: scale * F.normalize(features.float(), dim=-1) @ texts.to(features.device).T
