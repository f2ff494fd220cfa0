"""What is known about the patches of a dataset: the colours of Color, the parts of Birds, the body parts of CUB."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from pace.images import CUB, Birds, Color, ImageSet, Perturbation, PreprocessingLike, prepare, prepare_points
from pace.images.color import PALETTE
from pace.images.decoding import open_image
from pace.metrics.declare import Array
from pace.progress import progress

_BATCH = 64
_ONE_PART = 2 / 3  # of a patch that its part covers: what a patch with more than one part shows is a matter of opinion


def known_truth(images: ImageSet, preprocessing: PreprocessingLike, grid: tuple[int, int]) -> dict[str, Array]:
    """For `evaluate`: "colours" of Color's patches, "true_parts" and "true_kinds" of Birds', "parts", the patches of CUB's."""
    if isinstance(images, Color):
        return {"colours": true_colors(images, preprocessing, grid)}
    if isinstance(images, Birds):
        return {
            f"true_{name}": true_parts(images, preprocessing, grid, kinds=name == "kinds", least=_ONE_PART)
            for name in ("parts", "kinds")
        }
    return {"parts": visible_parts(images, preprocessing, grid)} if isinstance(images, CUB) else {}


def true_colors(images: Color, preprocessing: PreprocessingLike, grid: tuple[int, int]) -> Array:
    """(M, rows, columns) colours of the patches as the model sees the images."""
    box = _seen_box(images.size, preprocessing)
    return np.stack([images.patch_colors(number, grid, box) for number in range(len(images))])


def seen_colors(
    images: Color, preprocessing: PreprocessingLike, grid: tuple[int, int], perturbation: Perturbation
) -> Array:
    """(M, rows, columns): the colour nearest to the mean of each patch of the perturbed image."""
    palette, found = torch.from_numpy(PALETTE), []
    for rows in torch.arange(len(images)).split(_BATCH):  # type: ignore[no-untyped-call]
        seen = perturbation(sample_images(images, rows.numpy(), preprocessing), rows)
        shades = F.adaptive_avg_pool2d(seen, grid).permute(0, 2, 3, 1)
        found.append((shades[..., None, :] - palette).square().sum(-1).argmin(-1))
    return torch.cat(found).numpy()


def true_parts(
    images: Birds,
    preprocessing: PreprocessingLike,
    grid: tuple[int, int],
    crops: Array | None = None,
    kinds: bool = False,
    least: float = 0.0,
) -> Array:
    """(M, rows, columns): the parts of Birds' patches as the model sees the images, or with `kinds` their kinds.

    Patches that no part covers to a share of `least` are −1. With `crops`, as `Observations.crops` has them, what it sees are
    these parts of the images, mirrored or not.
    """
    left, top, right, bottom = _seen_box(images.size, preprocessing)
    truth = images.patch_kinds if kinds else images.patch_parts
    whole = np.array([[0.0, 0.0, 1.0, 1.0]])
    boxes = np.repeat(whole, len(images), 0) if crops is None else np.asarray(crops, np.float64)
    boxes = np.array([left, top] * 2) + boxes * np.array([right - left, bottom - top] * 2)
    return np.stack([truth(number, grid, box, least) for number, box in enumerate(boxes.tolist())])


def visible_parts(images: CUB, preprocessing: PreprocessingLike, grid: tuple[int, int]) -> Array:
    """(M, parts): the patch that holds each part, −1 where it cannot be seen."""
    points = []
    with progress("placing parts", len(images)) as advance:
        for number in range(len(images)):
            parts = images.parts(number)
            moved = prepare_points(torch.from_numpy(parts[:, :2]), image_size(images, number), preprocessing)
            points.append(np.concatenate([moved.numpy(), parts[:, 2:]], 1))
            advance()
    x, y, visible = np.moveaxis(np.stack(points).astype(np.float64), 2, 0)
    row, column = np.floor(y * grid[0] / preprocessing.size[0]), np.floor(x * grid[1] / preprocessing.size[1])
    inside = (visible > 0) & (row >= 0) & (row < grid[0]) & (column >= 0) & (column < grid[1])
    found: Array = np.where(inside, row * grid[1] + column, -1).astype(np.int64)
    return found


def sample_images(images: ImageSet, rows: Array, preprocessing: PreprocessingLike) -> Tensor:
    """Some images (n, 3, H, W) in [0, 1], as the model sees them."""
    return torch.stack([prepare(images[int(row)], preprocessing) for row in rows])


def _seen_box(size: int, preprocessing: PreprocessingLike) -> tuple[float, float, float, float]:
    """Left, top, right and bottom, in pixels, of what a model sees of an image of this height and width."""
    corners = torch.tensor([[0.0, 0.0], [size, size]])
    (left, top), (right, bottom) = prepare_points(corners, (size, size), preprocessing).tolist()
    across, down = size / (right - left), size / (bottom - top)  # image pixels per input pixel
    height, width = preprocessing.size
    return -left * across, -top * down, (width - left) * across, (height - top) * down


def image_size(images: CUB, number: int) -> tuple[int, int]:
    """Height and width from the file's header: decoding thousands of images would take minutes."""
    with open_image(images.path(images.names[number])) as image:
        turned = image.getexif().get(0x0112, 1) >= 5
        width, height = image.size
    return (width, height) if turned else (height, width)
