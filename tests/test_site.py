"""The documentation builds as a site, whole, without a warning and without anything from elsewhere."""

import importlib
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted(page.stem for page in (ROOT / "docs").glob("*.md"))


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    pytest.importorskip("mkdocs")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    nowhere = "http://127.0.0.1:9"  # whatever is asked of a network fails
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "HTTPS_PROXY": nowhere, "HTTP_PROXY": nowhere}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return folder


class Loaded(HTMLParser):
    """What a browser would load to show a page: addresses of scripts, styles, pictures and fonts, but not links to follow."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.addresses += [found[name] for name in ("src", "srcset", "poster") if found.get(name)]
        if tag == "link":
            self.addresses.append(found["href"])


@pytest.mark.parametrize("name", PAGES)
def test_every_page_is_there_and_loads_nothing_from_elsewhere(site, name):
    page = site / f"{name}.html"
    for address in Loaded(page).addresses:
        assert not re.match(r"(?:[a-z]+:)?//", address), address
        assert (page.parent / address.split("#")[0].split("?")[0]).exists(), address


@pytest.mark.parametrize("name", PAGES)
def test_every_page_can_be_reached_from_the_first(site, name):
    assert f'href="{name}.html"' in (site / "index.html").read_text(encoding="utf-8")


def test_styles_load_nothing_from_elsewhere(site):
    for style in site.rglob("*.css"):
        assert not re.search(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//", style.read_text(encoding="utf-8")), style


SHOWN_AS = {"pace.backbones.Backbone": "pace.Backbone"}  # a class is shown once, under its shortest name
IN_WORDS = {
    "__version__",
    "AUGMENT_SEED",
    "COLOR_NAMES",
    "STAGES",
    "Perturb",
    "EXPLAINERS",
    "explainer",
}  # constants, and what prose says
MODULES = ["images", "backbones", "metrics", "showing.figures", "showing.report", "baselines", "demo"]


@pytest.mark.parametrize("module", ["pace", *(f"pace.{name}" for name in MODULES)])
def test_the_api_page_has_every_public_name(site, module):
    page = (site / "api.html").read_text(encoding="utf-8")
    names = [f"{module}.{name}" for name in importlib.import_module(module).__all__ if name not in IN_WORDS]
    missing = [name for name in names if f'id="{SHOWN_AS.get(name, name)}"' not in page]
    assert names
    assert not missing


def test_the_picture_of_the_report_is_small(site):
    assert 10_000 < (site / "assets" / "report.png").stat().st_size < 400_000
