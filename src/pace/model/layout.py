"""What tensors have to look like to be concepts: shapes that fit together, and ranges."""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor

# Shapes: K concepts, d dimensions, N classes, P parts, A entries of α, u and v features that tell parts and kinds.
_SHAPES = {"offset": "d", "alpha": "A", "label_head": "KN", "pair_weights": "K"}
_GAUSSIANS = {
    "full": {"means": "Kv", "precision_cholesky": "Kvv"},
    "tied": {"means": "Kv", "precision_cholesky": "vv"},
    "diag": {"means": "Kv", "variances": "Kv"},
    "low_rank": {"means": "Kv", "variances": "Kv", "factors": "Kvr"},
}
_NEST = {"part_of": "K", "to_parts": "du", "to_kinds": "dv", "kind_shares": "K", "means": "Kd"}
_RANGES = {
    "alpha": (1e-300, 1e30),
    "variances": (1e-300, 1e300),
    "label_head": (-1, 1),
    "pair_weights": (0, 1),
    "kind_shares": (1e-300, 1.000001),
}


def check_layout(family: str, tensors: Mapping[str, Tensor]) -> None:
    """A ValueError unless these are concepts of this covariance family."""
    gaussians = _GAUSSIANS[family]
    expected = _SHAPES | {f"gaussians.{name}": shape for name, shape in gaussians.items()}
    sizes: dict[str, int] = {}
    if "nest.part_of" in tensors:
        expected |= {f"nest.{name}": shape for name, shape in _NEST.items()}
        of_parts = str.maketrans("Kv", "Pu")
        expected |= {f"nest.parts.{name}": shape.translate(of_parts) for name, shape in gaussians.items()}
        sizes["A"] = len(tensors["nest.parts.means"])
    else:  # concepts are their own parts, told by all dimensions
        sizes |= {"A": len(tensors["pair_weights"]), "v": len(tensors["offset"])}
    for name, letters in expected.items():
        tensor, last = tensors[name], name.rpartition(".")[2]
        shape = tuple(sizes.setdefault(letter, size) for letter, size in zip(letters, tensor.shape, strict=False))
        if shape != tensor.shape or len(letters) != tensor.ndim:
            raise ValueError(f"{name} of shape {tuple(tensor.shape)} does not fit the rest")
        if last != "part_of" and not tensor.is_floating_point():
            raise ValueError(f"{name}: expected floating point numbers; found {tensor.dtype}")
        low, high = (0, sizes["A"] - 1) if last == "part_of" else _RANGES.get(last, (-math.inf, math.inf))
        if not bool(((tensor >= low) & (tensor <= high)).all()):
            raise ValueError(f"{name}: expected {low} to {high}")
    if not sizes["K"] or not sizes["d"]:
        raise ValueError("there are no concepts")
