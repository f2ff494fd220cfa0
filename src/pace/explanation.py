"""What PACE says about images: concept mixtures with their uncertainty, and the concepts of every patch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

_SHOWN = 1e-3  # of an image's largest share; a concept with less is in the image only because of its prior


@dataclass(frozen=True, eq=False, repr=False)
class Explanation:
    """Image level θ, γ (M, K) and patch level φ (M, J, K) of M images; rows are distributions over the K concepts.

    q(θ_m) is Dirichlet(γ_m) and θ_m its mean. `phi` is None when only the image level was asked for.
    """

    theta: Array
    gamma: Array
    phi: Array | None = None
    grid: tuple[int, int] | None = None
    prefix_tokens: int = 0

    def __len__(self) -> int:
        return len(self.theta)

    @property
    def n_concepts(self) -> int:
        return int(self.theta.shape[1])

    def interval(self, level: float = 0.9) -> tuple[Array, Array]:
        """Lower and upper end (M, K) of the central credible interval of every θ_mk, from its Beta marginal."""
        from scipy.stats import beta

        if not 0 < level < 1:
            raise ValueError(f"level: expected a probability between 0 and 1; found {level}")
        gamma = self.gamma.astype(np.float64)
        rest = gamma.sum(1, keepdims=True) - gamma
        if self.n_concepts == 1:
            return np.ones_like(gamma), np.ones_like(gamma)
        tail = (1 - level) / 2
        return beta.ppf(tail, gamma, rest), beta.ppf(1 - tail, gamma, rest)

    def top_concepts(self, image: int, n: int = 3) -> Array:
        """The n concepts with the largest share θ of an image, largest first."""
        return np.argsort(-self.theta[image], kind="stable")[:n]

    def shown_concepts(self, image: int, n: int | None = None) -> Array:
        """The concepts that an image shows, largest share first, at most n: a thousandth of the largest share or more."""
        order = self.top_concepts(image, self.n_concepts)
        return order[_is_shown(self.theta[image])[order]][:n]

    def patch_map(self, image: int, concept: int) -> Array:
        """φ of one concept over an image, laid out like the patches (rows, columns)."""
        phi, grid = self._patches()
        return phi[image, self.prefix_tokens :, concept].reshape(grid)

    def aggregate(self, factor: int = 2) -> Explanation:
        """The same explanation with φ averaged over blocks of `factor` x `factor` patches, without prefix tokens.

        Where `factor` does not divide the grid, blocks at the edge are smaller.
        """
        phi, (rows, columns) = self._patches()
        if factor < 1:
            raise ValueError(f"factor: expected at least 1; found {factor}")
        patches = phi[:, self.prefix_tokens :].reshape(len(self), rows, columns, self.n_concepts)
        row_starts, column_starts = np.arange(0, rows, factor), np.arange(0, columns, factor)
        sums = np.add.reduceat(np.add.reduceat(patches, row_starts, 1), column_starts, 2)
        heights, widths = np.diff([*row_starts, rows]), np.diff([*column_starts, columns])
        means = sums / np.outer(heights, widths)[None, :, :, None].astype(phi.dtype)
        grid = (len(row_starts), len(column_starts))
        return replace(self, phi=means.reshape(len(self), -1, self.n_concepts), grid=grid, prefix_tokens=0)

    def __getitem__(self, images: int | slice | Array | list[int]) -> Explanation:
        """The explanation of some of the images, or of one."""
        if isinstance(images, (int, np.integer)):
            images = [int(images)]
        phi = None if self.phi is None else self.phi[images]
        return replace(self, theta=self.theta[images], gamma=self.gamma[images], phi=phi)

    def __repr__(self) -> str:
        level = "image level" if self.phi is None else "image and patch level"
        shown = int(_is_shown(self.theta).any(0).sum()) if len(self) else self.n_concepts
        concepts = f"{self.n_concepts}" if shown == self.n_concepts else f"{shown} of {self.n_concepts}"
        return f"Explanation({len(self)} images, {concepts} concepts, {level})"

    def _repr_html_(self) -> str:
        from pace.notebook import explanation_html

        return explanation_html(self)

    def _patches(self) -> tuple[Array, tuple[int, int]]:
        if self.phi is None:
            raise ValueError("this explanation has no patch level; call explain(observations, patches=True)")
        if self.grid is None:
            raise ValueError("the layout of the patches is unknown; pass grid=(rows, columns) to Observations")
        return self.phi, self.grid


def _is_shown(theta: Array) -> Array:
    """Whether an image shows a concept (…, K). Other methods' attributions may be negative: their size counts."""
    size = np.abs(theta)
    return np.asarray(size >= _SHOWN * size.max(-1, keepdims=True))
