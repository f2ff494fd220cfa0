"""Shapes to draw with: how far every point is outside of them, below 0 inside."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.floating[Any]]
Point = tuple[float, float]


def rgb(red: float, green: float, blue: float) -> Array:
    return np.array([red, green, blue], np.float32).reshape(3, 1, 1)


def mix(first: Array, second: Array, share: Array) -> Array:
    """From the first colour, where `share` is 0 or less, to the second, where it is 1 or more."""
    return first + share.clip(0, 1) * (second - first)


def turned(x: Array, y: Array, centre: Point, angle: float) -> tuple[Array, Array]:
    """Coordinates along and across an axis through `centre`."""
    cos, sin = float(np.cos(angle)), float(np.sin(angle))
    return cos * (x - centre[0]) + sin * (y - centre[1]), cos * (y - centre[1]) - sin * (x - centre[0])


def ellipse(x: Array, y: Array, centre: Point, radii: Point, angle: float = 0.0) -> Array:
    along, aside = turned(x, y, centre, angle)
    distance: Array = (np.hypot(along / radii[0], aside / radii[1]) - 1) * min(radii)
    return distance


def lens(along: Array, aside: Array, radius: float) -> Array:
    """Where two circles meet, each half a radius from the axis: a leaf, a wing."""
    distance: Array = np.hypot(along, np.abs(aside) + radius / 2) - radius
    return distance


def stroke(x: Array, y: Array, start: Point, end: Point, radius: float) -> Array:
    """A thick line with round ends."""
    dx, dy = end[0] - start[0], end[1] - start[1]
    share = (((x - start[0]) * dx + (y - start[1]) * dy) / (dx * dx + dy * dy)).clip(0, 1)
    distance: Array = np.hypot(x - start[0] - share * dx, y - start[1] - share * dy) - radius
    return distance


def polygon(x: Array, y: Array, *corners: Point) -> Array:
    """A convex one."""
    middle, edges = np.mean(corners, axis=0), []
    for (ax, ay), (bx, by) in zip(corners, (*corners[1:], corners[0]), strict=True):
        nx, ny = np.array([by - ay, ax - bx]) / np.hypot(bx - ax, by - ay)
        side = 1.0 if nx * (middle[0] - ax) + ny * (middle[1] - ay) < 0 else -1.0  # outwards
        edges.append(float(side * nx) * (x - ax) + float(side * ny) * (y - ay))
    distance: Array = np.maximum.reduce(edges)
    return distance
