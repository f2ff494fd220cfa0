"""The code in the README and in docs/ runs as it stands, and its commands are ones that `pace` understands."""

import re
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: Path, languages: str) -> list[str]:
    return re.findall(rf"^```(?:{languages})\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.S | re.M)


def commands(page: Path) -> list[list[str]]:
    """Every `pace …` in the shell blocks of a page, without what precedes it (`pip install uv && uv run`)."""
    lines = "\n".join(blocks(page, "bash|sh")).replace("\\\n", " ").splitlines()
    words = [shlex.split(line, comments=True) for line in lines]
    return [line[line.index("pace") + 1 :] for line in words if "pace" in line]


def name(page: Path) -> str:
    return page.name


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=name)
def test_the_python_blocks_of_a_page_run_in_order(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for block in blocks(page, "python"):
        exec(compile(block, page.name, "exec"), names)  # noqa: S102


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)], ids=name)
def test_the_commands_of_a_page_are_understood(page):
    typer = pytest.importorskip("typer")
    from pace.cli.app import app

    known = typer.main.get_command(app)
    for first, *rest in commands(page):
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


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_and_scripts_that_a_page_names_exist(page):
    text = page.read_text(encoding="utf-8")
    links = [target for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", text) if "://" not in target]
    scripts = re.findall(r"\b(?:benchmarks|scripts|tests)/[\w/]+\.(?:py|md)\b", text)
    missing = [
        str(path) for path in [page.parent / link for link in links] + [ROOT / s for s in scripts] if not path.exists()
    ]
    assert not missing
