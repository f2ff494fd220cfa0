"""`Generated`: images that are drawn when they are asked for, always the same ones."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pace.images.imageset import ImageSet


class Generated(ImageSet):
    """Images named "class/number". Image j of a class depends on (seed, class, j) alone.

    Parameters
    ----------
    split : "train" (80 %) or "test" (20 %), the same share of all classes
    n_per_class : images of a class in both splits together
    size : height and width in pixels
    noise : standard deviation, where 1 is the whole range from black to full colour
    """

    smallest = 2  # pixels

    def __init__(
        self, split: str, n_per_class: int, size: int, seed: int, noise: float, class_names: Sequence[str]
    ) -> None:
        kind = type(self).__name__
        if split not in ("train", "test"):
            raise ValueError(f"{kind}: split {split!r} does not exist; expected train or test")
        if size < self.smallest or n_per_class < 2 or seed < 0 or not 0 <= noise < np.inf:
            expected = f"size ≥ {self.smallest}, n_per_class ≥ 2, seed ≥ 0 and noise ≥ 0"
            raise ValueError(f"{kind}: expected {expected}; found {size=}, {n_per_class=}, {seed=}, {noise=}")
        self.size, self.seed, self.noise = size, seed, noise
        names: list[str] = []
        for label in range(len(class_names)):
            order = np.random.default_rng([seed, label]).permutation(n_per_class)
            train = min(round(0.8 * n_per_class), n_per_class - 1)
            part = order[:train] if split == "train" else order[train:]
            names += [f"{label}/{number:06d}" for number in np.sort(part)]
        super().__init__(names, [int(name.split("/")[0]) for name in names], class_names)

    def _generator(self, index: int) -> tuple[int, np.random.Generator]:
        """The class of an image, and the generator of everything in it."""
        label, number = map(int, self.names[index].split("/"))
        # The key is the image's, so its draws do not depend on which images were made before.
        key = np.array([self.seed, label << 32 | number], np.uint64)
        return label, np.random.Generator(np.random.Philox(key=key))
