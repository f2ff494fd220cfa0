"""`write_report`: from a fitted model, its images and observations to one HTML file."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from hashlib import sha256
from importlib.resources import files
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pace import __version__
from pace.atomic import write_atomically
from pace.explainer import PACE
from pace.explanation import Explanation
from pace.images import PreprocessingLike
from pace.observations import Observations
from pace.showing.patches import Images
from pace.showing.report import contents
from pace.showing.report.pictures import encode, read_pictures
from pace.showing.summary import class_names as names_of_classes

if TYPE_CHECKING:
    from pace.metrics import Scores

# Joined in this order into one module: inline modules cannot import each other.
SCRIPTS = (
    "data.js", "dom.js", "shares.js", "parts.js", "concepts.js", "together.js", "map.js", "picker.js", "filters.js",
    "beside.js", "images.js", "classes.js", "csv.js", "number.js", "trust.js", "main.js",
)  # fmt: skip
_ASKS = "connect-src 'self'; "
_LIMIT = 19_000_000  # bytes of the whole file; a report stays under 20 MB


def write_report(
    path: str | PathLike[str],
    model: PACE,
    images: Images,
    observations: Observations,
    *,
    perturbed: Observations | None = None,
    perturbed_images: Images | None = None,
    explanation: Explanation | None = None,
    scores: Scores | None = None,
    without: Sequence[dict[int, dict[str, Any]]] = (),
    class_names: Sequence[str] | None = None,
    preprocessing: PreprocessingLike | None = None,
    title: str = "What the transformer sees",
    first: int | None = None,
) -> Path:
    """Write a report that opens in any browser, from disk, without a network. The file appears whole or not at all.

    Parameters
    ----------
    images
        The images to show, one for each observation: an `ImageSet` (with `preprocessing`), or what the model saw, as a
        tensor (M, 3, H, W) or an array (M, H, W, 3), uint8 or float in [0, 1].
    observations
        What the transformer says about these images, with a grid.
    perturbed, perturbed_images
        The same images perturbed, to be shown beside the originals; without the images, only their θ is.
    explanation
        ``model.explain(observations)``, if you have it already.
    scores
        ``pace.metrics.evaluate(…)``, for the Trust view.
    without
        For the first images: what is predicted without some concepts (of a part, without all its kinds), as
        `pace.ablation.numbers` has it.
    class_names
        Names of the N classes the transformer predicts. By default those of the `ImageSet`, if there are N.
    preprocessing
        How an `ImageSet` was prepared for the model: ``backbone.preprocessing``.
    first
        The image that the page opens on, instead of all concepts.
    """
    path = Path(path)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path.parent}: there is no such folder to write {path.name} to")
    names = names_of_classes(class_names, images, model.label_head_.shape[1])
    shown = _explained(model, observations, explanation)
    pictures = read_pictures(images, len(observations), preprocessing, "images")
    data = {"title": title, "first": first, **contents.learning(model), **contents.trust(scores)}
    data |= contents.of_images(model, images, observations, shown, names, pictures)
    data["without"] = list(without)
    if perturbed is not None:
        if perturbed.shape != observations.shape or perturbed.grid != observations.grid:
            raise ValueError(f"perturbed: expected the same images as {observations}; found {perturbed}")
        moved = _explained(model, perturbed, None)
        data |= contents.beside(shown, moved, perturbed, bool(names))
    if perturbed_images is not None:
        if perturbed is None:
            raise ValueError("perturbed_images: needs perturbed, the observations of these images, as well")
        data["perturbedPictures"] = True
        pictures += read_pictures(perturbed_images, len(observations), preprocessing, "perturbed_images")
        if pictures[0].size != pictures[-1].size:
            raise ValueError(f"perturbed_images: expected {pictures[0].size} pixels; found {pictures[-1].size}")
    encoded = encode(pictures, _LIMIT - len(render(data, [])))
    write_atomically(path, render(data, encoded))
    return path


def _explained(model: PACE, observations: Observations, given: Explanation | None) -> Explanation:
    n_classes = model.label_head_.shape[1]
    if n_classes and observations.n_classes not in (0, n_classes):
        raise ValueError(f"predictions have {observations.n_classes} classes; the model was fitted with {n_classes}")
    explanation = model.explain(observations) if given is None else given
    expected = (len(observations), observations.n_tokens, len(model.means_))
    found = None if explanation.phi is None else explanation.phi.shape
    if found != expected:
        raise ValueError(f"explanation: expected φ of shape {expected}, as model.explain gives it; found {found}")
    return explanation


def render(data: dict[str, Any], pictures: Sequence[str]) -> bytes:
    """The whole HTML file. `pictures` are base64, one per line, outside the JSON so that that is quick to parse.

    With "live" in the data it may ask the server it came from, `pace.serving`.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    live = "live" in data
    style = _static("report.css") + (_static("live.css") if live else "")
    script = "".join(_static(name) for name in [*SCRIPTS[:-1], *(["live.js"] if live else []), SCRIPTS[-1]])
    policy = (
        f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; img-src data:; "
        f"{_ASKS if live else ''}"
        "base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    )
    loader = PackageLoader("pace.showing.report", "templates")
    environment = Environment(autoescape=True, undefined=StrictUndefined, loader=loader)
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    page = environment.get_template("page.html").render(
        title=data["title"],
        version=__version__,
        numbered=data["selection"] is not None,
        live=live,
        policy=policy,
        style=Markup(style),
        script=Markup(script),
        data=data,
        pictures=Markup("\n".join(pictures)),
    )
    return page.encode("utf-8", "replace")  # file names may contain invalid characters


def _static(name: str) -> str:
    return (files("pace.showing.report") / "static" / name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return "sha256-" + b64encode(sha256(text.encode()).digest()).decode()
