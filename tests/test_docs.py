"""The code in the README and in docs/ runs as it stands, and its commands are ones that `pace` understands."""

import re
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: Path, languages: str) -> list[str]:
    return re.findall(rf"^```(?:{languages})\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.S | re.M)


def commands(page: Path) -> list[list[str]]:
    """Every `pace …` in the shell blocks of a page, without what stands before it (`pip install uv && uv run`)."""
    lines = "\n".join(blocks(page, "bash|sh")).replace("\\\n", " ").splitlines()
    words = [shlex.split(line, comments=True) for line in lines]
    return [line[line.index("pace") + 1 :] for line in words if "pace" in line]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_python_blocks_of_a_page_run_in_order(page, tmp_path, monkeypatch):
    found = blocks(page, "python")
    if not found:
        pytest.skip("no Python on this page")
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for block in found:
        exec(compile(block, page.name, "exec"), names)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_commands_of_a_page_are_understood(page):
    typer = pytest.importorskip("typer")
    from pace.cli.app import app

    known = typer.main.get_command(app)
    for first, *rest in commands(page):
        if first.startswith("-"):  # an option of `pace` itself
            continue
        assert first in known.commands, f"{page.name}: there is no `pace {first}`"
        if "--config" in rest:  # its file would be read
            at = rest.index("--config")
            del rest[at : at + 2]
        known.commands[first].make_context(first, rest)  # parses, and raises what the user would see; runs nothing


def test_a_mistyped_command_would_be_noticed():
    typer = pytest.importorskip("typer")
    from pace.cli.app import app

    with pytest.raises(Exception, match="no-such-option"):
        typer.main.get_command(app).commands["fit"].make_context("fit", ["--no-such-option"])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}, which is not there"
