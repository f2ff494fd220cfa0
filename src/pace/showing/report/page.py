"""The page itself: template, style and script, and a content-security policy that lets nothing else run or load."""

from __future__ import annotations

import hashlib
from base64 import b64encode
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from pace import __version__
from pace.showing.report.encoding import safe_json

# Joined in this order into one module: inline modules cannot import each other.
SCRIPTS = (
    "data.js", "dom.js", "parts.js", "concepts.js", "picker.js", "images.js", "classes.js", "number.js", "trust.js",
    "main.js",
)  # fmt: skip


def render(title: str, data: dict[str, Any], pictures: Sequence[str]) -> bytes:
    """The whole HTML file. `pictures` are base64, one per line, outside the JSON so that that is quick to parse."""
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    style = _static("report.css")
    script = "".join(_static(name) for name in SCRIPTS)
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, loader=PackageLoader("pace.showing.report", "templates")
    )
    page = environment.get_template("page.html").render(
        title=title,
        version=__version__,
        numbered=data["selection"] is not None,
        policy=policy(style, script),
        style=Markup(style),
        script=Markup(script),
        data=Markup(safe_json(data)),
        pictures=Markup("\n".join(pictures)),
    )
    return page.encode("utf-8", "replace")  # file names may contain invalid characters


def policy(style: str, script: str) -> str:
    """This style and this script, pictures that are in the page, and nothing else."""
    return (
        f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    )


def _static(name: str) -> str:
    return (files("pace.showing.report") / "static" / name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return "sha256-" + b64encode(hashlib.sha256(text.encode()).digest()).decode("ascii")
