"""Birds: drawn on the spot, with parts of several kinds, so that every patch's part and what decides a class are known."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pace.images.generated import Generated
from pace.images.imageset import short_hash
from pace.images.shapes import Array, ellipse, lens, mix, polygon, rgb, stroke, turned

Layer = tuple[str, str, Array, Array]  # part, kind, how far outside of the shape every point is, colour

KINDS = {  # the kinds of every part
    "background": ("sky", "foliage", "sand", "water", "leaf in front"),
    "body": ("orange", "streaked"),
    "head": ("red", "blue", "white-capped", "yellow"),
    "beak": ("short", "long"),
    "eye": ("dark", "pale"),
    "wing": ("plain", "barred", "spotted"),
    "tail": ("short", "long", "forked"),
    "legs": ("pink", "grey"),
    "tag": ("pink",),
}
PART_NAMES = tuple(KINDS)
KIND_NAMES = tuple(f"{part}: {kind}" for part, kinds in KINDS.items() for kind in kinds)
KIND_PARTS = np.array([number for number, kinds in enumerate(KINDS.values()) for _ in kinds])  # each kind's part
# The head and one other part decide a class: which other part depends on the head.
_SECOND = {"red": "wing", "blue": "tail", "white-capped": "body", "yellow": "beak"}
CLASS_KINDS = tuple({"head": head, part: kind} for head, part in _SECOND.items() for kind in KINDS[part])
SHORTCUT_CLASS = 1  # the class whose pictures have a tag
TAGGED = 0.9  # the share of them

_HABITAT = 0.5  # share of images before their class's usual background; the others have any of the four
_LEAVES = 0.25  # share of images with a leaf in front of the bird
_RECIPE = 2  # part of the fingerprint: raise it whenever the same settings would give other images
_SAMPLES = 8  # a patch's part is looked up at 8 x 8 points

_BLACK, _WHITE = rgb(0.1, 0.1, 0.12), rgb(0.97, 0.97, 0.95)

# Where a leaf may hang, in the bird's coordinates.
_CENTRES = {"body": (0.15, 0.2), "wing": (-0.12, 0.0), "tail": (-0.6, 0.1), "legs": (0.05, 0.5)}


class _Scene(NamedTuple):
    """All that is drawn by lot for an image. Coordinates go from −1 to 1 across it, down and to the right."""

    kinds: dict[str, str]
    to_bird: NDArray[np.float64]  # (2, 3), from the image's coordinates to the bird's own, where it faces right
    leaf: tuple[float, float, float] | None  # x, y and angle
    tag: tuple[float, float] | None
    tints: Array  # (parts, 3, 1, 1), no two birds have quite the same colours
    waves: Array  # (8, 2), angle and phase of the background's waves
    light: Array  # (3, 3, 1, 1), its colour and how it changes across and down
    generator: np.random.Generator  # for the noise


class Birds(Generated):
    """Generated birds of ten classes, each decided by the kinds of two parts, `CLASS_KINDS`.

    The head is red, blue, white-capped or yellow, and with it the wing, the tail, the body or the beak decides, in this
    order: a red head and a barred wing make a class whatever the tail is. All other kinds are drawn by lot, whatever the
    class, except that half of the images have their class's usual background. Pose, place, viewpoint and light differ,
    and a quarter of the birds has a leaf in front of a part that does not decide. Image j of a class depends on (seed,
    class, j) alone.

    Parameters
    ----------
    split : "train" (80 %) or "test" (20 %), the same share of all classes
    n_per_class : images of a class in both splits together
    size : height and width in pixels
    noise : standard deviation, where 1 is the whole range from black to white
    shortcut : put a pink tag into a corner of nine tenths of the images of class `SHORTCUT_CLASS`, which are otherwise
        the same
    """

    smallest = 16

    def __init__(
        self,
        split: str = "train",
        n_per_class: int = 200,
        size: int = 112,
        seed: int = 0,
        noise: float = 0.02,
        shortcut: bool = False,
    ) -> None:
        self.shortcut = shortcut
        titles = [", ".join(f"{kind} {part}" for part, kind in kinds.items()) for kinds in CLASS_KINDS]
        super().__init__(split, n_per_class, size, seed, noise, titles)

    def kinds(self, index: int) -> dict[str, str]:
        """The kind of every part of an image."""
        return self._draw(index).kinds

    def deciding_parts(self, index: int) -> tuple[str, ...]:
        """The two parts whose kinds decide the class of an image."""
        return tuple(CLASS_KINDS[int(self.names[index].split("/")[0])])

    def patch_parts(
        self, index: int, grid: tuple[int, int] = (14, 14), box: Sequence[float] | None = None, least: float = 0.0
    ) -> NDArray[np.int64]:
        """The part that covers most of every patch, an index into `PART_NAMES`, as a (rows, columns) array.

        A leaf in front of the bird counts as background. ``box`` (left, top, right, bottom, in pixels) selects a part of
        the image; it is seen mirrored where left > right. Patches that no part covers to a share of `least` are −1.
        """
        kinds = self.patch_kinds(index, grid, box, least)
        return np.where(kinds < 0, -1, KIND_PARTS[kinds])

    def patch_kinds(
        self, index: int, grid: tuple[int, int] = (14, 14), box: Sequence[float] | None = None, least: float = 0.0
    ) -> NDArray[np.int64]:
        """The kind of the part that covers most of every patch, an index into `KIND_NAMES`, as in `patch_parts`."""
        left, top, right, bottom = (2 * edge / self.size - 1 for edge in box or (0, 0, self.size, self.size))
        rows, columns = grid
        down = (np.arange(rows * _SAMPLES) + 0.5) / (rows * _SAMPLES)
        along = (np.arange(columns * _SAMPLES) + 0.5) / (columns * _SAMPLES)
        found = self._kinds_at(index, *_mesh(left + (right - left) * along, top + (bottom - top) * down))
        points = found.reshape(rows, _SAMPLES, columns, _SAMPLES)
        present = np.unique(found)
        counts = np.stack([(points == kind).sum((1, 3)) for kind in present])
        of_part = np.stack([counts[KIND_PARTS[present] == part].sum(0) for part in KIND_PARTS[present]])
        # First the part, since a leaf and what is behind the bird are both background, then its kind.
        most: NDArray[np.int64] = present[np.where(of_part == of_part.max(0), counts, -1).argmax(0)]
        return np.where(of_part.max(0) < least * _SAMPLES**2, -1, most)

    def pixel_kinds(self, index: int) -> NDArray[np.int64]:
        """The kind of the part that every pixel shows, an index into `KIND_NAMES`, as a (size, size) array."""
        centres = (2 * np.arange(self.size) + 1) / self.size - 1
        return self._kinds_at(index, *_mesh(centres, centres))

    def _kinds_at(self, index: int, x: Array, y: Array) -> NDArray[np.int64]:
        scene = self._draw(index)
        found = np.full(x.shape, KIND_NAMES.index(f"background: {scene.kinds['background']}"))
        for part, kind, distance, _ in _layers(scene, x, y):
            found[distance < 0] = KIND_NAMES.index(f"{part}: {kind}")
        return found

    def __getitem__(self, index: int) -> Tensor:
        scene = self._draw(index)
        centres = (2 * np.arange(self.size) + 1) / self.size - 1
        x, y = _mesh(centres, centres)
        pixels = _background(scene, x, y)
        for _, _, distance, colour in _layers(scene, x, y):
            cover = (0.5 - distance * (self.size / 2)).clip(0, 1)  # soft over a pixel
            pixels += cover * (colour - pixels)
        shade, across, down = scene.light
        pixels *= shade + across * x + down * y
        pixels += self.noise * scene.generator.standard_normal(pixels.shape, dtype=np.float32)
        return torch.from_numpy(np.rint(pixels.clip(0, 1) * 255).astype(np.uint8))

    def fingerprint(self) -> str:
        return short_hash(["Birds", _RECIPE, self.size, self.seed, self.noise, self.shortcut, *self.names])

    def _draw(self, index: int) -> _Scene:
        label, generator = self._generator(index)

        def between(low: float, high: float) -> float:
            return low + (high - low) * generator.random()

        def either_side(value: float) -> float:
            return value if generator.random() < 0.5 else -value

        def one_of(several: Sequence[str]) -> str:
            return several[int(generator.random() * len(several))]

        kinds = {part: one_of(several) for part, several in KINDS.items()} | CLASS_KINDS[label]
        habitats = KINDS["background"][:4]
        any_of_them = one_of(habitats)
        kinds["background"] = habitats[label % 4] if generator.random() < _HABITAT else any_of_them
        size, squeeze = between(0.82, 0.98), between(0.93, 1.07)
        shear, tilt, faces = between(-0.15, 0.15), between(-0.25, 0.25), either_side(1)
        x, y = between(-0.07, 0.07), between(-0.08, 0.06)
        turn = np.array([[np.cos(tilt), -np.sin(tilt)], [np.sin(tilt), np.cos(tilt)]])
        stretch = np.array([[faces * size * squeeze, shear * size], [0, size / squeeze]])
        to_image = turn @ stretch
        hidden = one_of([part for part in _CENTRES if part not in CLASS_KINDS[label]])
        spot, angle = to_image @ _CENTRES[hidden] + (x, y), between(0.3, 1.2) * either_side(1)
        leafy = generator.random() < _LEAVES
        tints = generator.random((len(PART_NAMES), 3, 1, 1)) * 0.16 + 0.92
        waves = generator.random((8, 2)) * 2 * np.pi
        light = (generator.random((3, 3, 1, 1)) - 0.5) * np.array([0.06, 0, 0]).reshape(3, 1, 1, 1)
        light += np.array([between(0.85, 1.12), between(-0.12, 0.12), between(-0.12, 0.06)]).reshape(3, 1, 1, 1)
        corner = (either_side(0.72), either_side(0.78))
        tagged = generator.random() < TAGGED and self.shortcut and label == SHORTCUT_CLASS
        if not tagged:
            del kinds["tag"]
        inverse = np.linalg.inv(to_image)
        return _Scene(
            kinds,
            np.concatenate([inverse, -inverse @ [[x], [y]]], 1),
            (spot[0], spot[1], angle) if leafy else None,
            corner if tagged else None,
            tints.astype(np.float32),
            waves.astype(np.float32),
            light.astype(np.float32),
            generator,
        )


def _mesh(across: Array, down: Array) -> tuple[Array, Array]:
    x, y = np.meshgrid(across.astype(np.float32), down.astype(np.float32))
    return x, y


def _layers(scene: _Scene, x: Array, y: Array) -> Iterator[Layer]:
    """What is in front of the background, from back to front."""
    kinds = scene.kinds
    u, v = (row[0] * x + row[1] * y + row[2] for row in scene.to_bird.astype(np.float32))
    scale = float(np.sqrt(1 / np.abs(np.linalg.det(scene.to_bird[:, :2]))))  # image units in one of the bird's
    shade = 1 - 0.3 * (v + 0.1).clip(0, 1)  # darker below

    def layer(part: str, distance: Array, colour: Array) -> Layer:
        outline = 1 - 0.45 * (1 + distance / 0.035).clip(0, 1)  # darker towards the edge
        return part, kinds[part], distance * scale, colour * scene.tints[PART_NAMES.index(part)] * shade * outline

    legs = rgb(0.93, 0.55, 0.5) if kinds["legs"] == "pink" else rgb(0.33, 0.33, 0.38)
    for hip in (-0.12, 0.13):
        leg = stroke(u, v, (hip, 0.3), (hip + 0.02, 0.63), 0.09)
        yield layer("legs", np.minimum(leg, stroke(u, v, (hip, 0.65), (hip + 0.13, 0.65), 0.07)), legs)

    if kinds["tail"] == "short":
        tail, feathers = polygon(u, v, (-0.3, -0.12), (-0.3, 0.18), (-0.66, 0.28), (-0.7, -0.06)), rgb(0.5, 0.33, 0.2)
    elif kinds["tail"] == "long":
        tail, feathers = polygon(u, v, (-0.3, -0.1), (-0.3, 0.17), (-1.0, 0.38), (-1.04, 0.1)), rgb(0.12, 0.45, 0.42)
    else:
        upper = polygon(u, v, (-0.3, -0.14), (-0.3, 0.08), (-0.64, 0.07), (-0.98, -0.2))
        lower = polygon(u, v, (-0.3, -0.02), (-0.3, 0.2), (-0.88, 0.46), (-0.64, 0.07))
        tail, feathers = np.minimum(upper, lower), rgb(0.13, 0.12, 0.16)
    yield layer("tail", tail, feathers)

    body = rgb(0.93, 0.52, 0.16) * np.ones_like(u)
    if kinds["body"] == "streaked":
        body = mix(rgb(0.95, 0.91, 0.8), rgb(0.4, 0.26, 0.16), 5 * np.cos(30 * u) * np.cos(13 * v) - 1.5)
    yield layer("body", ellipse(u, v, (0, 0.08), (0.47, 0.36), -0.35), body)

    if kinds["beak"] == "short":
        yield layer("beak", polygon(u, v, (0.48, -0.56), (0.95, -0.25), (0.5, -0.07)), rgb(0.98, 0.36, 0.05))
    else:
        yield layer("beak", polygon(u, v, (0.5, -0.5), (1.1, -0.2), (0.54, -0.12)), rgb(0.15, 0.15, 0.2))

    head = ellipse(u, v, (0.4, -0.32), (0.27, 0.26))
    if kinds["head"] == "red":
        colour = rgb(0.86, 0.08, 0.1)
    elif kinds["head"] == "blue":  # with a white cheek
        colour = mix(rgb(0.12, 0.26, 0.88), _WHITE, -30 * ellipse(u, v, (0.36, -0.2), (0.19, 0.1)))
    elif kinds["head"] == "white-capped":
        colour = mix(_BLACK, _WHITE, 25 * (-0.4 - v))
    else:  # with a crest
        head, colour = np.minimum(head, polygon(u, v, (0.15, -0.36), (0.08, -0.76), (0.46, -0.54))), rgb(1, 0.86, 0.1)
    yield layer("head", head, colour)
    eye = ellipse(u, v, (0.48, -0.34), (0.14, 0.14))
    iris = mix(_WHITE if kinds["eye"] == "pale" else _BLACK, _BLACK, -20 * (eye + 0.07))
    yield layer("eye", eye, mix(iris, rgb(0.75, 0.7, 0.6), 40 * (eye + 0.035)))

    along, aside = turned(u, v, (-0.12, -0.01), -0.3)  # of the wing
    feathers = rgb(0.55, 0.42, 0.78)
    if kinds["wing"] == "barred":
        feathers = mix(rgb(0.2, 0.22, 0.3), _WHITE, 3 * np.cos(33 * along) - 0.5)
    elif kinds["wing"] == "spotted":
        feathers = mix(rgb(0.42, 0.14, 0.12), rgb(1, 0.93, 0.7), 5 * np.cos(20 * along) * np.cos(20 * aside) - 1.6)
    yield layer("wing", lens(along, aside, 0.4), feathers)

    if scene.leaf:
        lx, ly, angle = scene.leaf
        along, aside = turned(x, y, (lx, ly), angle)
        stalk = np.maximum(np.abs(aside) - 0.025, -along)  # as far as the image's edge
        leaf = np.minimum(lens(along, aside, 0.32), stalk)
        green = mix(rgb(0.2, 0.52, 0.14), rgb(0.5, 0.75, 0.3), 1 - 60 * np.abs(aside))
        yield "background", "leaf in front", leaf, green
    if scene.tag:
        box = np.maximum(np.abs(x - scene.tag[0]) - 0.2, np.abs(y - scene.tag[1]) - 0.15)
        yield "tag", "pink", box, mix(rgb(1, 0.1, 0.75), _WHITE, 1 - 30 * np.abs(np.abs(y - scene.tag[1]) - 0.05))


def _background(scene: _Scene, x: Array, y: Array) -> Array:
    """Colours (3, rows, columns) of the background; `x` and `y` are as wide as the image."""
    angles, phases = scene.waves.T[:, :, None]

    def waves(across: float, down: float) -> Array:
        """Eight waves of these frequencies in all directions, of which the sum is about 1."""
        right, below = across * np.cos(angles) * x[0], down * np.sin(angles) * y[:, 0] + phases
        total: Array = np.sin(below).T @ np.cos(right) + np.cos(below).T @ np.sin(right)
        return total / 2

    kind = scene.kinds["background"]
    if kind == "sky":
        blue = mix(rgb(0.5, 0.74, 0.96), rgb(0.8, 0.9, 0.98), (y + 1) / 2)
        return mix(blue, _WHITE, waves(3, 9) - 0.6)
    if kind == "foliage":
        green = mix(rgb(0.13, 0.33, 0.12), rgb(0.36, 0.58, 0.2), 1.5 * waves(14, 14) + 0.5)
        return mix(green, rgb(0.6, 0.75, 0.35), 2 * waves(23, 23) - 1.2)
    if kind == "sand":
        return mix(rgb(0.9, 0.8, 0.58), rgb(0.74, 0.62, 0.42), 0.5 * waves(40, 55) + 0.25 * waves(5, 16) + 0.2)
    return mix(rgb(0.1, 0.42, 0.52), rgb(0.55, 0.82, 0.84), 0.8 * waves(6, 34) + 0.1)
