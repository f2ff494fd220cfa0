"""What PACE says about images: concept mixtures with their uncertainty, and the concepts of every patch."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass, replace
from io import StringIO
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pace.atomic import write_atomically
from pace.intervals import beta_of_shares, credible
from pace.naming import Name, concept_names, hidden_among

Array = npt.NDArray[Any]

_SHOWN = 1e-3  # of an image's largest share; a concept with less is in the image only because of its prior
_DIGITS = 6  # in files


@dataclass(frozen=True, eq=False, repr=False)
class Explanation:
    """Image level θ, γ (M, K) and patch level φ (M, J, K) of M images; rows are distributions over the K concepts.

    q(θ_m) is Dirichlet(γ_m), which counts every patch, and θ_m its mean. `phi` is None when only the image level was asked for.
    `weights` (M, J) are the effective patches that each token counts for in `interval`, and `prior` (K,) its prior; without
    them intervals are those of q(θ_m).

    Where concepts are kinds of parts, `part_of` (K,) says of which: an image is a mixture of `parts`, and in an image a part is
    mostly of one kind. `prior` is then that of the parts (P,). `called` (K,) is what the model calls its concepts.
    """

    theta: Array
    gamma: Array
    phi: Array | None = None
    grid: tuple[int, int] | None = None
    prefix_tokens: int = 0
    weights: Array | None = None
    prior: Array | None = None
    part_of: Array | None = None
    called: Sequence[Name] | None = None

    def __len__(self) -> int:
        return len(self.theta)

    @property
    def n_concepts(self) -> int:
        return int(self.theta.shape[1])

    @property
    def n_parts(self) -> int:
        """P; as many as concepts where these are not kinds of parts."""
        return self.n_concepts if self.part_of is None else int(self.part_of.max()) + 1

    @property
    def parts(self) -> Array:
        """Share of every part in an image (M, P)."""
        return self.by_part(self.theta)

    @property
    def kinds(self) -> Array:
        """How likely a part is of this kind, in an image (M, K): a concept's share of its part."""
        whole = self.parts[:, self._part_of]
        return np.divide(self.theta, whole, out=np.zeros_like(self.theta), where=whole > 0)

    @property
    def names(self) -> list[Name]:
        """What the concepts are called; parts and kinds have the order of their numbers where `called` is not known."""
        return concept_names(self.part_of, np.zeros(self.n_concepts)) if self.called is None else list(self.called)

    def interval(self, level: float = 0.9) -> tuple[Array, Array]:
        """Lower and upper end (M, K) of the credible interval of every share: the central one, widened to hold θ_mk.

        A concept that is a kind of a part has the part's share if the part is of this kind, else none.
        """
        kinds = None if self.part_of is None else self.kinds.astype(np.float64)
        return self._interval(level, self.theta, kinds)

    def part_interval(self, level: float = 0.9) -> tuple[Array, Array]:
        """Lower and upper end (M, P) of the credible interval of every part's share, as `interval` has it."""
        return self._interval(level, self.parts, None)

    def _interval(self, level: float, shares: Array, kinds: Array | None) -> tuple[Array, Array]:
        if not 0 < level < 1:
            raise ValueError(f"level: expected a probability between 0 and 1; found {level}")
        if self.n_parts == 1 and kinds is None:
            return np.ones_like(shares), np.ones_like(shares)
        return credible(level, shares, self._marginals(), kinds, self._part_of)

    def _marginals(self) -> tuple[Array, Array]:
        """Parameters (M, P) of the Beta distribution of every part's share; without φ as if every patch had one for sure."""
        gamma = self.by_part(self.gamma)
        if self.phi is None or self.weights is None or self.prior is None:
            counts = gamma.astype(np.float64)
            if self.weights is not None and self.prior is not None:
                counts = self.prior + self.parts * self.weights.sum(1, keepdims=True)
            return counts, counts.sum(1, keepdims=True) - counts
        images = zip(self.phi, gamma, self.weights, strict=True)
        found = [beta_of_shares(self.by_part(phi), counts, weights, self.prior) for phi, counts, weights in images]
        both: Array = np.array(found).reshape(len(self), 2, self.n_parts)
        return both[:, 0], both[:, 1]

    @property
    def _part_of(self) -> Array:
        return np.arange(self.n_concepts) if self.part_of is None else self.part_of

    def by_part(self, values: Array) -> Array:
        """Sums (…, P) over the concepts of each part."""
        if self.part_of is None:
            return values
        member = np.eye(self.n_parts, dtype=values.dtype)[self.part_of]
        return np.asarray(values @ member)

    def top_concepts(self, image: int, n: int = 3) -> Array:
        """The n concepts with the largest share θ of an image, largest first."""
        return np.argsort(-self.theta[image], kind="stable")[:n]

    def shown_concepts(self, image: int, n: int | None = None) -> Array:
        """The concepts that an image shows, largest share first, at most n: a thousandth of the largest share or more.

        Hidden ones are left out.
        """
        order = self.top_concepts(image, self.n_concepts)
        shown = _is_shown(self.theta[image]) & ~hidden_among(self.names)
        return order[shown[order]][:n]

    def shown_parts(self, image: int, n: int | None = None) -> Array:
        """The parts that an image shows, largest share first, at most n, as `shown_concepts` has them.

        Those of a hidden kind are left out.
        """
        shares, hidden = self.by_part(self.theta[image]), hidden_among(self.names)
        shown = _is_shown(shares) & [not hidden[self.kind_of(image, part)] for part in range(len(shares))]
        order = np.argsort(-shares, kind="stable")
        return order[shown[order]][:n]

    def kind_of(self, image: int, part: int) -> int:
        """The concept that a part most likely is in an image."""
        return int(np.where(self._part_of == part, self.theta[image], -np.inf).argmax())

    def patch_map(self, image: int, concept: int) -> Array:
        """φ of one concept over an image, laid out like the patches (rows, columns)."""
        phi, grid = self._patches()
        return phi[image, self.prefix_tokens :, concept].reshape(grid)

    def part_map(self, image: int, part: int | None = None) -> Array:
        """φ of a part, over all its kinds, laid out like the patches; without `part`, which part leads in every patch."""
        phi, grid = self._patches()
        maps = self.by_part(phi[image, self.prefix_tokens :])
        return (maps.argmax(1) if part is None else maps[:, part]).reshape(grid)

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
        grid, phi = (len(row_starts), len(column_starts)), means.reshape(len(self), -1, self.n_concepts)
        return replace(self, phi=phi, grid=grid, prefix_tokens=0, weights=None, prior=None)

    def merged(self, groups: Sequence[Sequence[int]]) -> Explanation:
        """The same explanation with every group of concepts as one; concepts in no group go into a last one."""
        rest = np.setdiff1d(np.arange(self.n_concepts), [k for group in groups for k in group])
        groups = [*groups, rest.tolist()] if len(rest) else groups

        def sums(values: Array) -> Array:
            return np.stack([values[..., list(group)].sum(-1) for group in groups], -1)

        flat = self.part_of is None  # what is merged need not be of one part
        phi, prior = (None if values is None else sums(values) for values in (self.phi, self.prior if flat else None))
        weights = self.weights if flat else None
        merged = replace(self, theta=sums(self.theta), gamma=sums(self.gamma), phi=phi)
        return replace(merged, prior=prior, weights=weights, part_of=None, called=None)

    @property
    def image_names(self) -> list[str]:
        return [f"image {m}" for m in range(len(self))]

    def prediction(self, image: int) -> dict[str, Any] | None:
        """Class, name and probability of what the transformer predicts, where that is known."""
        return None

    def _evidence(self, concept: int, image: int) -> float | None:
        """For the predicted class, where that is known."""
        return None

    def to_dict(self, level: float = 0.9, n: int | None = None) -> dict[str, Any]:
        """Plain words and numbers, as JSON has them: of every image its prediction, and its concepts and parts, at most n."""
        by_part, names = self.part_of is not None, self.names
        kinds = [{"part": name.part, "kind": name.kind} if by_part else {} for name in names]
        shares = _rounded(self.theta, *self.interval(level))
        of_parts = _rounded(self.parts, *self.part_interval(level)) if by_part else []

        def row(m: int, k: int, place: int, values: list[Array]) -> dict[str, Any]:
            sure = {end: float(value[m, place]) for end, value in zip(("theta", "low", "high"), values, strict=True)}
            return {"concept": int(k), "name": names[k].long, **kinds[k], **sure, "evidence": self._evidence(k, m)}

        found = []
        for m, name in enumerate(self.image_names):
            picture: dict[str, Any] = {"picture": name, "prediction": self.prediction(m)}
            picture["top_concepts"] = [row(m, k, k, shares) for k in self.shown_concepts(m, n)]
            if by_part:
                picture["top_parts"] = [row(m, self.kind_of(m, p), p, of_parts) for p in self.shown_parts(m, n)]
            picture["theta"] = shares[0][m].tolist()
            if self.phi is not None:
                main = self.phi[m, self.prefix_tokens :].argmax(1)
                picture["patch_concepts"] = main.reshape(self.grid or -1).tolist()
            found.append(picture)
        return {"level": level, "images": found, **({"concepts": kinds} if by_part else {})}

    def to_rows(self, level: float = 0.9) -> list[dict[str, Any]]:
        """One row for every part that an image shows, with its kind, or for every concept, largest share first."""
        rows = []
        for picture in self.to_dict(level)["images"]:
            said = picture["prediction"] or {}
            about = {
                "picture": picture["picture"],
                "prediction": said.get("name"),
                "probability": said.get("probability"),
            }
            rows += [about | row for row in picture.get("top_parts", picture["top_concepts"])]
        return rows

    def to_frame(self, level: float = 0.9) -> Any:
        """`to_rows` as a pandas DataFrame."""
        try:
            from pandas import DataFrame
        except ModuleNotFoundError:
            raise ModuleNotFoundError("to_frame needs pandas (pip install pandas); to_rows has the same rows") from None
        return DataFrame(self.to_rows(level))

    def to_csv(self, path: str | PathLike[str], level: float = 0.9) -> None:
        """`to_rows` as a file that spreadsheets read; a name that begins like a formula gets an apostrophe before it."""
        rows, text = self.to_rows(level), StringIO()
        writer = csv.DictWriter(text, rows[0])
        writer.writeheader()
        for row in rows:
            writer.writerow({name: f"'{value}" if _is_formula(value) else value for name, value in row.items()})
        write_atomically(Path(path), text.getvalue().encode("utf-8", "replace"))  # names of files may be no text

    def images_with(self, concept: int, n: int = 5) -> Array:
        """The images with the largest share of a concept, at most n, largest first: those that show it."""
        order = np.argsort(-self.theta[:, concept], kind="stable")
        found: Array = order[_is_shown(self.theta)[order, concept]][:n]
        return found

    def __getitem__(self, images: int | slice | Array | list[int]) -> Explanation:
        """The explanation of some of the images, or of one."""
        if isinstance(images, (int, np.integer)):
            images = [int(images)]
        phi, weights = (None if values is None else values[images] for values in (self.phi, self.weights))
        return replace(self, theta=self.theta[images], gamma=self.gamma[images], phi=phi, weights=weights)

    def __repr__(self) -> str:
        level = "image level" if self.phi is None else "image and patch level"
        shown = int(_is_shown(self.theta).any(0).sum()) if len(self) else self.n_concepts
        concepts = f"{self.n_concepts}" if shown == self.n_concepts else f"{shown} of {self.n_concepts}"
        parts = "" if self.part_of is None else f" of {self.n_parts} parts"
        return f"Explanation({len(self)} image{'s' * (len(self) != 1)}, {concepts} concepts{parts}, {level})"

    def _repr_html_(self) -> str:
        from pace.notebook import explanation_html

        return explanation_html(self)

    def _patches(self) -> tuple[Array, tuple[int, int]]:
        if self.phi is None:
            raise ValueError("this explanation has no patch level; call explain(observations, patches=True)")
        if self.grid is None:
            raise ValueError("the layout of the patches is unknown; pass grid=(rows, columns) to Observations")
        return self.phi, self.grid


def _rounded(*arrays: Array) -> list[Array]:
    return [values.astype(float).round(_DIGITS) for values in arrays]


def _is_formula(value: object) -> bool:
    """As spreadsheets see it, which would run it."""
    return isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r"))


def _is_shown(theta: Array) -> Array:
    """Whether an image shows a concept (…, K). Other methods' attributions may be negative: their size counts."""
    size = np.abs(theta)
    return np.asarray(size >= _SHOWN * size.max(-1, keepdims=True))
