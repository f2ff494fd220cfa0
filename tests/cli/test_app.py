"""What every command has in common: help, JSON, errors, Ctrl-C."""

from __future__ import annotations

import inspect
import re
import shlex
from pathlib import Path
from shutil import copy

import pytest
from in_process import MODEL, Pace, invoke
from typer.main import get_command

from pace import __version__
from pace.cli.app import app
from pace.progress import progress

COMMANDS = sorted(get_command(app).commands)
DOCS = Path(__file__).parents[2] / "docs" / "cli.md"


def parses(line: str) -> None:
    """Every option exists and every value is of its type; nothing is run."""
    program, name, *arguments = shlex.split(line, comments=True)
    assert program == "pace"
    if "--config" not in arguments:  # would be read
        get_command(app).commands[name].make_context(name, arguments, resilient_parsing=False)


def examples(text: str) -> list[str]:
    return [line.strip() for line in text.replace("\\\n", " ").splitlines() if re.match(r"\s*pace [a-z]+", line)]


def test_pace_alone_lists_the_commands_and_has_a_version():
    outcome = invoke()
    assert outcome.code == 0
    assert all(command in outcome.out for command in COMMANDS)
    assert "..." not in outcome.out.partition("Commands:")[2]  # every command is told of in one line
    assert [line.split()[1] for line in examples(outcome.out)] == ["fit", "explain", "evaluate", "report"]
    assert invoke("--version").out == f"pace {__version__}\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example_that_parses_and_the_options_of_every_command(command: str):
    text, _, options = invoke(command, "--help").out.partition("Options:")
    found = examples(text)
    assert any(line.startswith(f"pace {command}") for line in found)
    for line in found:
        parses(line)
    makes_none = command in ("runs", "compare", "name", "find", "serve")
    of_runs = () if makes_none else ("--config", "--out")
    assert all(option in options for option in ("--json", "--debug", *of_runs))
    assert not re.search(r"<[a-z]", options)  # as in <int range>


def test_the_page_about_the_command_line_has_every_command_and_its_examples_parse():
    text = DOCS.read_text(encoding="utf-8")
    lines = [line for block in re.findall(r"^```bash\n(.*?)^```", text, re.S | re.M) for line in examples(block)]
    for line in lines:
        parses(line)
    assert {line.split()[1] for line in lines} >= set(COMMANDS)


def test_names_and_defaults_are_the_librarys():
    from pace.backbones import finetune
    from pace.cli.runs import DATASETS
    from pace.images.datasets import DATASETS as known
    from pace.images.datasets import GENERATED

    assert {*known, *GENERATED} == set(DATASETS)
    theirs = inspect.signature(finetune).parameters
    ours = {option.name: option.default for option in get_command(app).commands["finetune"].params}
    for name in ("epochs", "lr", "layer_decay", "validation", "batch_size", "seed"):
        assert ours[name] == theirs[name].default


def test_names_with_brackets_are_shown_as_they_are_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    from pace.cli import output

    monkeypatch.setattr(output, "on_terminal", lambda _: True)
    with output.busy("loading [/x]"):
        pass  # rich would take it for the end of a style
    with progress("opening [/x]", 1, show=True) as advance:
        advance(1)
    assert "opening [/x]" in capsys.readouterr().err


def test_a_gpu_is_taken_where_there_is_one_apples_too(monkeypatch: pytest.MonkeyPatch):
    import torch

    from pace.cli.opening import device_of

    for cuda, apple, expected in ((True, True, "cuda"), (False, True, "mps"), (False, False, "cpu")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda here=cuda: here)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda here=apple: here)
        assert device_of("auto").type == expected


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nothing"], "No such command 'nothing'"),
        (["fit", "--nothing"], "No such option"),
        (
            ["fit", "--concepts", "few"],
            "'--concepts' / '-k': expected a whole number of at least 1 or 'auto'; found few",
        ),
        (["fit", "-k", "1.5"], "found 1.5"),
        (["fit", "--covariance", "round"], "'full', 'diag', 'tied' or 'low_rank'; found round"),
        (["fit", "--alpha", "-1"], "expected one positive number"),
        (["fit", "--refine", "abc"], "expected a whole number of at least 0 and at most 1000000 or 'auto'"),
        (["fit", "--memory", "abc"], "expected bytes or a size like '8GB' or '8GiB'; found abc"),
        (["fit", "--layer", "last"], "expected a block, two by a comma, or auto; found last"),
        (["extract", "--images", "color"], "--model"),
        (["explain"], "PICTURE"),
        (["explain", "flat/0.png", "--level", "90"], "less than or equal to 1"),
    ],
)
def test_a_mistyped_command_is_one_line_and_code_2(arguments: list[str], says: str):
    outcome = invoke(*arguments)
    assert outcome.code == 2
    assert says in outcome.error
    assert "--help" in outcome.error
    assert outcome.out == ""


def test_an_error_is_a_json_document_too(pace: Pace):
    outcome = pace("fit", "--images", "nowhere", *MODEL, "--json")
    assert outcome.code == 1
    assert outcome.error == f"error: {outcome.document['error']}"
    assert pace("fit", "--nothing", "--json").document["error"]


def test_an_unexpected_error_is_one_line_that_says_how_to_see_more(pace: Pace, monkeypatch: pytest.MonkeyPatch):
    def broken(*_: object, **__: object) -> None:
        raise KeyError("what\nnow")

    monkeypatch.setattr("pace.cli.opening.load_model", broken)
    outcome = pace("fit", "--images", "photos", *MODEL)
    assert outcome.code == 1
    assert "KeyError" in outcome.error
    assert "--debug" in outcome.error
    assert "Traceback" in pace("fit", "--images", "photos", *MODEL, "--debug").err


def interrupt(monkeypatch: pytest.MonkeyPatch, epoch: int) -> None:
    """Ctrl-C in this epoch of the next fit, from 0."""
    from pace.fitting import loop

    expect, passes = loop.expect, iter(range(100))

    def interrupted(*args: object, **kwargs: object) -> object:
        if next(passes) == epoch:
            raise KeyboardInterrupt
        return expect(*args, **kwargs)

    monkeypatch.setattr(loop, "expect", interrupted)


def test_ctrl_c_before_anything_is_learned_leaves_nothing_to_use(elsewhere: Path, monkeypatch: pytest.MonkeyPatch):
    interrupt(monkeypatch, 0)
    outcome = invoke("fit", "--config", "shop/fit", "--out", "stopped")
    assert outcome.code == 130
    assert "nothing was learned" in outcome.err
    assert not (elsewhere / "stopped" / "concepts.safetensors").exists()
    assert "no concepts" in invoke("explain", "shop/flat/0.png", "--run", "stopped").error


def test_ctrl_c_while_learning_keeps_what_was_learned(elsewhere: Path, monkeypatch: pytest.MonkeyPatch):
    interrupt(monkeypatch, 1)
    outcome = invoke("fit", "--config", "shop/fit", "--out", "stopped")
    assert outcome.code == 130
    assert outcome.error == "stopped: after 1 epochs; what was learned is in stopped"
    explained = invoke("explain", "shop/flat/0.png", "--run", "stopped")
    assert explained.code == 0, explained.err
    assert "stopped after 1 epochs" in explained.err


def test_names_from_files_are_shown_as_they_are_without_escapes(elsewhere: Path, workshop: Path):
    odd = "[bold]\x1b[31mred\n:smile:.png"
    copy(workshop / "flat" / "0.png", elsewhere / odd)
    outcome = invoke("explain", odd, "--run", "shop/fit", "--json")
    assert outcome.document["results"]["images"][0]["picture"] == odd
    assert "\x1b" not in outcome.err
    assert "[bold]" in outcome.err
    assert ":smile:" in outcome.err
    assert "\x1b" not in invoke("explain", odd + "x").error


def test_warnings_are_lines_on_standard_error_and_kept_and_name_options(elsewhere: Path):
    outcome = invoke("fit", "--config", "shop/fit", "--epochs", "1", "--json")
    warnings = outcome.document["warnings"]
    assert "the bound still rises after 1 epochs; raise --epochs" in warnings
    assert all(f"warning: {warning}" in outcome.err.splitlines() for warning in warnings)
