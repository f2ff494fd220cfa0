"""Hostile names of files and classes, through every output: pages, terminal, tables, figures, PDF, JSON. Part of robustness.py.

A fit, its scores, an explanation, a report and a benchmark of images and classes with such names. No page may hold an element
or an attribute that a page of plain names does not hold, nothing printed a sign that steers a terminal. Every file is parsed.
"""

from __future__ import annotations

import csv
import io
import json
import os
import random
import shutil
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
from robustness_work import command

import pace
from pace.notebook import explanation_html, model_html
from pace.showing import figures

SIGNS = [
    "<script>alert(1)</script>", "<img src=x onerror=alert(1)>", "</script>", "<!--", "]]>", "&lt;b&gt;", "\"onload='x'",
    "{{7*7}}", "{% raw %}", "\x1b[2J", "\x1b]0;title\x07", "\x9b31m", "\r", "\n", "\t", "\b\b", "\u202eevil", "\u2028",
    "\ufeff", "\udcff",
    "[red]x[/red]", "[/x]", ":warning:", "$\\frac{$", "$x^2$", "=cmd|' !A0", "@SUM(1)", "+1", ",", ";", '"', "'", "`",
    "|", "*", "%s%n", "{0}", "\\", "$(id)", "θ", "漢字", "é", "😀", "javascript:alert(1)", "a" * 60, " ", ".", "..", "-rf",
    "--help", "~", "#", "?", "NUL",
]  # fmt: skip
_OF_THE_BENCHMARK = "--backbone color --no-finetune --hidden-images 0"
ELEMENTS = {"script", "iframe", "object", "embed", "base", "link", "form", "a"}  # counted: names must add none


class Elements(HTMLParser):
    """How many elements of each kind, and attributes that run code, a page has."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found = Counter[str]()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found[tag] += tag in ELEMENTS or tag == "img"
        self.found.update(name for name, _ in attrs if name.startswith("on"))


def named(draw: random.Random) -> str:
    name = "".join(draw.choice(SIGNS) for _ in range(draw.randrange(1, 5))).replace("/", "∕").lstrip(".")
    return os.fsencode(name)[:200].decode("utf-8", "surrogateescape").replace("\0", "") or "x"


def pictures(folder: Path, names: list[str]) -> None:
    """Two classes, each with half of the images; plain ones get the numbers that hostile ones have in their names."""
    from PIL import Image

    for number, name in enumerate(names[2:]):
        place = folder / f"{number % 2}{names[number % 2]}"
        place.mkdir(parents=True, exist_ok=True)
        noise = np.random.default_rng(number).integers(0, 255, (64, 64, 3), np.uint8)
        with (place / f"{number}{name}.png").open("wb") as file:
            Image.fromarray(noise).save(file, "png")


def outputs(names: list[str]) -> Iterator[tuple[str, Any]]:
    """What comes out where images and classes have these names: what it is, and something that they must not change."""
    folder, said = Path("named"), io.StringIO()
    for split in ("train", "test"):
        pictures(folder / split, names)
    one = sorted((folder / "test").rglob("*.png"))[0]
    shutil.copy(one, Path("picture" + one.name[1:]))
    with redirect_stdout(said), redirect_stderr(said):
        for text, out in (
            ("fit --images named --model color --head probe --concepts 3 --starts 1 --epochs 2", "fit"),
            ("evaluate --run fit --bootstrap 2", "scores"),
            ("report --run fit", "page"),
            (f"benchmark --datasets named --methods position -k 2 --bootstrap 2 {_OF_THE_BENCHMARK}", "tables"),
        ):  # fmt: skip
            code = command(text, Path(out))
            assert code == 0 or out == "tables", said.getvalue()
        for more in ((), ("--json",)):
            code = command(["explain", str(one), "--run", "fit", *more], Path(f"told{len(more)}"))
            assert code == 0, said.getvalue()
    yield "terminal", all(c.isprintable() or c == "\n" for c in said.getvalue().replace("\r\n", "\n"))
    for page in (Path("page/report.html"), Path("told0/report.html")):
        yield f"HTML {page}", Elements(page.read_text(encoding="utf-8")).found
    for file in sorted(Path().rglob("*.json")):
        json.loads(file.read_text(encoding="utf-8"), parse_constant=lambda text: 1 / 0)
    explainer = pace.load_run("fit", device="cpu")
    explanation = explainer([str(path) for path in sorted((folder / "test").rglob("*.png"))[:4]])
    for page in (explanation_html(explanation), model_html(explainer.concepts, explainer.class_names)):
        yield "HTML notebook", Elements(page).found
    explanation.to_csv("table.csv")
    with Path("table.csv").open(encoding="utf-8", errors="strict", newline="") as file:
        yield "CSV", [len(row) for row in csv.reader(file)]
    json.dumps(explanation.to_dict(), allow_nan=False).encode()
    for ending in ("svg", "pdf", "png"):
        figures.save(explanation.figure(0), f"figure.{ending}")
    tags = (element.tag.rpartition("}")[2] for element in ElementTree.parse("figure.svg").iter())
    yield "SVG", Counter(tag for tag in tags if tag in ELEMENTS)
    yield "PDF", (Path("figure.pdf").read_bytes()[:5], b"/JavaScript" in Path("figure.pdf").read_bytes())
    for table in sorted(Path("tables").glob("results.*")):
        text = table.read_text(encoding="utf-8")
        if table.suffix == ".md":
            yield "Markdown", Elements(text).found


def names(count: int, seed: int, until: float, jobs: Sequence[str]) -> dict[str, Any]:
    draw, tally, wrong, before = random.Random(seed), Counter(names=0), dict[str, str](), Path.cwd()
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as place:
        os.chdir(tempfile.mkdtemp(dir=place))
        expected = list(outputs([f"n{number}" for number in range(14)]))
        while tally["names"] < count and time.monotonic() < until:
            drawn = [named(draw) for _ in range(14)]
            tally["names"] += len(drawn)
            os.chdir(tempfile.mkdtemp(dir=place))
            try:
                for (what, found), (_, plain) in zip(outputs(drawn), expected, strict=True):
                    tally["outputs"] += 1
                    if found != plain:
                        wrong.setdefault(what, f"{drawn!r}: {found}, with plain names {plain}"[:1500])
            except Exception as error:
                wrong.setdefault(f"raw {type(error).__name__}", f"{drawn!r}: {str(error)[-1500:]}")
        os.chdir(before)
    return {**tally, "wrong": wrong}
