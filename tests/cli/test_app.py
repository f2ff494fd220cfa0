"""What every command has in common: help, JSON, errors, Ctrl-C."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from in_process import MODEL, QUICK, Pace, invoke
from typer.main import get_command

from pace import __version__
from pace.cli.app import app

COMMANDS = sorted(get_command(app).commands)
DOCS = Path(__file__).parents[2] / "docs" / "cli.md"


def parses(line: str) -> None:
    """Every option exists and every value is of its type; nothing is run."""
    program, name, *arguments = shlex.split(line, comments=True)
    assert program == "pace"
    command = get_command(app).commands[name]
    if "--config" not in arguments:  # would be read
        command.make_context(name, arguments, resilient_parsing=False)


def examples(text: str) -> list[str]:
    return [line.strip() for line in text.replace("\\\n", " ").splitlines() if re.match(r"\s*pace [a-z]+", line)]


def test_pace_alone_says_what_there_is():
    outcome = invoke()
    assert outcome.code == 0
    assert all(command in outcome.out for command in COMMANDS)


def test_the_version_is_the_package_s():
    assert invoke("--version").out == f"pace {__version__}\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example_of_the_command_that_parses(command: str):
    text = invoke(command, "--help").out.partition("Options:")[0]
    found = examples(text)
    assert any(line.startswith(f"pace {command}") for line in found)
    for line in found:
        parses(line)


def test_the_page_about_the_command_line_has_every_command_and_its_examples_parse():
    text = DOCS.read_text(encoding="utf-8")
    lines = [line for block in re.findall(r"^```bash\n(.*?)^```", text, re.S | re.M) for line in examples(block)]
    for line in lines:
        parses(line)
    assert {line.split()[1] for line in lines} >= set(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_can_be_read_by_machines_repeated_and_debugged(command: str):
    text = invoke(command, "--help").out
    assert all(option in text for option in ("--json", "--config", "--debug", "--out"))


def test_defaults_are_the_library_s():
    import inspect

    from pace import PACE
    from pace.backbones import finetune
    from pace.cli.commands import finetune as finetune_command
    from pace.cli.commands import fit as fit_command

    ours, library = inspect.signature(fit_command.fit).parameters, PACE().get_params()
    names = {"concepts": "n_concepts", "epochs": "max_iter", "starts": "n_init"}
    for name in ("concepts", "covariance", "updates", "alpha", "epochs", "starts", "refine", "seed"):
        assert ours[name].default == library[names.get(name, name)]
    ours, theirs = inspect.signature(finetune_command.finetune).parameters, inspect.signature(finetune).parameters
    for name in ("epochs", "lr", "layer_decay", "validation", "batch_size", "seed", "split"):
        assert ours[name].default == theirs[name].default


def test_the_datasets_are_those_that_can_be_opened():
    from pace.cli.runs import DATASETS
    from pace.images.datasets import DATASETS as known

    assert {*known, "color"} == set(DATASETS)


def test_the_normalisations_are_those_that_can_be_asked_for():
    from pace.backbones.preprocessing import NORMALIZATIONS
    from pace.cli.options import Normalization

    assert set(NORMALIZATIONS) == set(Normalization)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nothing"], "No such command 'nothing'"),
        (["fit", "--nothing"], "No such option"),
        (["fit", "--concepts", "few"], "few is neither a whole number of at least 1 nor auto"),
        (["fit", "--n-concepts", "1.5"], "1.5 is neither"),
        (["fit", "--concepts", "0"], "--concepts"),
        (["extract", "--images", "color"], "--model"),
        (["explain"], "pictures"),
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

    monkeypatch.setattr("pace.cli.commands.fit.open_both", broken)
    outcome = pace("fit", "--images", "photos", *MODEL)
    assert outcome.code == 1
    assert "KeyError" in outcome.error
    assert "--debug" in outcome.error
    shown = pace("fit", "--images", "photos", *MODEL, "--debug")
    assert shown.code == 1
    assert "Traceback" in shown.err


def test_ctrl_c_is_one_line_and_130(pace: Pace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("pace.cli.commands.fit.look", interrupted)
    outcome = pace("fit", "--images", "photos", *MODEL, "--out", tmp_path / "run")
    assert (outcome.code, outcome.error) == (130, "stopped: interrupted")


def test_ctrl_c_while_learning_keeps_what_was_learned(
    pace: Pace, workshop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from pace.fitting.loop import Fitting

    passes = []

    def second_pass_is_interrupted(*args: object, **kwargs: object) -> object:
        passes.append(1)
        if len(passes) == 2:
            raise KeyboardInterrupt
        return original(*args, **kwargs)

    original = Fitting._pass
    monkeypatch.setattr(Fitting, "_pass", second_pass_is_interrupted)
    outcome = pace("fit", "--images", "photos", *MODEL, *QUICK, "--out", tmp_path / "run")
    monkeypatch.undo()
    assert outcome.code == 130
    assert "after 1 epochs" in outcome.error
    monkeypatch.chdir(workshop)
    explained = pace("explain", "flat/0.png", "--run", tmp_path / "run", "--out", tmp_path / "explained")
    assert explained.code == 0, explained.err


def test_names_from_files_are_shown_as_they_are_without_escapes(elsewhere: Path, workshop: Path):
    from shutil import copy

    odd = "[bold]\x1b[31mred\n:smile:.png"
    copy(workshop / "flat" / "0.png", elsewhere / odd)
    outcome = invoke("explain", odd, "--run", "shop/fit", "--json")
    assert outcome.document["results"]["images"][0]["picture"] == odd
    assert "\x1b" not in outcome.err
    assert "[bold]" in outcome.err
    assert ":smile:" in outcome.err
    assert "\x1b" not in invoke("explain", odd + "x").error


def test_warnings_are_lines_on_standard_error_and_kept(pace: Pace, tmp_path: Path):
    outcome = pace("fit", "--images", "photos", *MODEL, *QUICK, "--epochs", "1", "--out", tmp_path / "run", "--json")
    warnings = outcome.document["warnings"]
    assert any("still rises after 1 epochs" in warning for warning in warnings)
    assert all(f"warning: {warning}" in outcome.err.splitlines() for warning in warnings)
