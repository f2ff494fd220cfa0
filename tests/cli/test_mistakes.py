"""What a user may get wrong, and what the one line then says."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

import pytest
from in_process import MODEL, QUICK, Pace, invoke

from pace.cli.errors import Problem, line_of

FIT = ("fit", "--images", "photos")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("fit",), "--images and --model, or --observations"),
        (
            ("fit", "--images", "flwer", *MODEL),
            "flwer: no such file or folder, and not one of color, birds, flower, cars, cub",
        ),
        (("fit", "--images", "flat/0.png", *MODEL), "flat/0.png: is a file; expected a folder"),
        (("fit", "--images", "flower", *MODEL), "--data-root"),
        (("fit", "--images", "flower", "--data-root", "none", *MODEL), "no setid.mat in none"),
        (("fit", "--images", "photos", "--split", "val", *MODEL), "no split 'val'; found test, train"),
        ((*FIT, *MODEL, "--device", "gpu"), "expected auto, cpu, cuda"),
        ((*FIT, *MODEL, "--layer", "40"), "error: --layer: expected -6 to 5"),
        ((*FIT, *MODEL, "--concepts", "5000"), "--concepts"),
        (("fit", "--observations", "photos"), "no such run"),
        (
            (*FIT, *MODEL, "--observations", "seen", "--limit", "5", "--layer", "0", "--cls"),
            "leave --images, --limit, --architecture, --image-size, --layer, --cls, --model out",
        ),
        ((*FIT, "--model", "vit_tny_patch16_224"), "vit_tiny_patch16_224"),
        ((*FIT, "--model", "nothing.safetensors"), "no such file"),
        ((*FIT, "--model", "tiny.safetensors"), "tiny.safetensors: which architecture is this?"),
        (
            (*FIT, "--model", "tiny.safetensors", "--architecture", "test_vit2", "--image-size", "32"),
            "not the weights of",
        ),
        ((*FIT, "--model", "bad.safetensors", "--architecture", "test_vit"), "bad.safetensors cannot be loaded"),
        ((*FIT, "--model", "photos"), "config.json"),
        ((*FIT, "--model", "fit"), "fit is a run of `pace fit`; expected one of `pace finetune`"),
        ((*FIT, "--model", "[/x]"), "model: [/x] cannot be loaded"),
        ((*FIT, "--model", "[red]x"), "[red]x: timm has no such model"),
        ((*FIT, "--model", ""), "--model: expected"),
        ((*FIT, "--model", "~nobody-here/x"), "~nobody-here/x: no such file of weights"),
        ((*FIT, "--model", "x" * 300), "--model: expected a name, a file or a folder; found 'xxx"),
        ((*FIT, *MODEL, "--head", "nearest"), "--head nearest: expected probe, knn, clusters"),
        ((*FIT, *MODEL, "--classes", "names.txt"), "names.txt"),
        ((*FIT, "--model", "vit_tiny_patch16_224", "--architecture", "test_vit"), "only for a file of weights"),
        ((*FIT, *MODEL, "--head", "probe", "--images", "flat"), "error: --head probe: needs labels"),
        (("fit", "--images", "color", "--model", "color", "--normalize", "half"), "the model color has its own"),
        (("fit", "--images", "birds", "--model", "birds", "--normalize", "half"), "the model birds has its own"),
        ((*FIT, *MODEL, "--concepts", "4", "--max-concepts", "9"), "--max-concepts is for --concepts auto"),
        (("finetune", "--images", "flat", *MODEL), "no labels"),
        (("explain", "nothing.jpg"), "nothing.jpg: no such picture"),
        (("explain", "flat/0.png"), "no run in runs/"),
        (("report", "--run", "fit", "--evaluation", "fit"), "expected one of `pace evaluate`"),
        (("evaluate", "--run", "fit", "--config", "fit"), "is a run of `pace fit`; this is `pace evaluate`"),
    ],
    ids=lambda value: " ".join(value)[:60] if isinstance(value, tuple) else "",
)
def test_a_mistake_is_one_line_that_says_what_would_work(
    elsewhere: Path, workshop: Path, arguments: tuple[str, ...], says: str
):
    (elsewhere / "bad.safetensors").write_bytes(b"no weights at all")
    for name in ("tiny.safetensors", "photos", "flat", "fit"):
        (elsewhere / name).symlink_to(workshop / name)
    outcome = invoke(*arguments)
    assert outcome.code == 1
    assert says in outcome.error


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--refine", "10", "--covariance", "diag"), "error: --refine: needs covariance='tied' and updates='exact'"),
        (("--concepts", "auto", "--updates", "paper"), "error: --concepts: 'auto' needs updates='exact'"),
    ],
)
def test_options_that_do_not_go_together_are_refused_before_anything_is_opened(
    options: tuple[str, ...], says: str, elsewhere: Path, monkeypatch: pytest.MonkeyPatch
):
    def never(*_: object) -> None:
        raise AssertionError("images were opened first")

    monkeypatch.setattr("pace.cli.opening.open_images", never)
    assert says in invoke("fit", "--images", "shop/photos", *MODEL, *options).error
    assert not (elsewhere / "runs").exists()


def test_an_unreadable_picture_is_named_or_left_out(elsewhere: Path, workshop: Path):
    shutil.copytree(workshop / "flat", elsewhere / "mixed")
    (elsewhere / "mixed" / "broken.png").write_bytes(b"no picture")
    outcome = invoke("explain", "mixed", "--run", "shop/fit")
    assert "broken.png cannot be read" in outcome.error
    assert outcome.error.endswith("; --skip-unreadable leaves such files out")
    assert "on_error" not in outcome.error
    outcome = invoke("explain", "mixed", "--run", "shop/fit", "--skip-unreadable", "--json")
    assert len(outcome.document["results"]["images"]) == 7
    assert any("broken.png" in warning for warning in outcome.document["warnings"])


def test_a_run_whose_model_changed_is_refused(elsewhere: Path, workshop: Path):
    from safetensors.torch import load_file, save_file

    weights = load_file(workshop / "tiny.safetensors")
    weights["blocks.0.norm1.weight"] += 1
    save_file(weights, elsewhere / "other.safetensors")
    outcome = invoke("explain", "shop/flat/0.png", "--run", "shop/fit", "--model", "other.safetensors")
    assert "is not the model that shop/fit was made with" in outcome.error


def test_a_run_whose_model_is_gone_says_how_to_name_it(elsewhere: Path, workshop: Path):
    shutil.copytree(workshop / "fit", elsewhere / "moved")
    record = elsewhere / "moved" / "run.json"
    record.write_text(record.read_text().replace("tiny.safetensors", "gone.safetensors"))
    outcome = invoke("explain", "shop/flat/0.png", "--run", "moved")
    assert "gone.safetensors" in outcome.error
    assert "--model" in outcome.error
    assert invoke("explain", "shop/flat/0.png", "--run", "moved", "--model", "shop/tiny.safetensors").code == 0


def test_a_damaged_record_is_one_line(elsewhere: Path):
    (elsewhere / "run").mkdir()
    for content in ("", "[]", "{}", '{"format": "pace-run-1"}', "\x00", "[" * 10**5, "NaN"):
        (elsewhere / "run" / "run.json").write_text(content)
        error = invoke("evaluate", "--run", "run").error
        assert "run.json cannot be used: " in error
        assert "; delete its folder, and run the command again" in error


def test_what_was_learned_survives_a_full_disk(pace: Pace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "somewhere")

    fit = (*FIT, *MODEL, *QUICK, "--out", tmp_path / "run")
    with monkeypatch.context() as patch:
        patch.setattr("pace.explainer.PACE.save", full)
        assert "somewhere; make room, then run the same command again" in pace(*fit).error
    monkeypatch.setattr("pace.fitting.loop.expect", full)  # nothing is learned again
    outcome = pace(*fit)
    assert outcome.code == 0
    assert "resuming from" in outcome.out
    assert (tmp_path / "run" / "concepts.safetensors").is_file()
    assert not (tmp_path / "run" / "checkpoint").exists()


def test_a_missing_library_is_named_and_how_to_install_it():
    assert "pip install 'pace-xai[all]'" in line_of(ModuleNotFoundError("No module named 'timm'", name="timm"))


@pytest.mark.parametrize(
    ("message", "line"),
    [
        ("raise max_iter, or set n_concepts by hand", "raise --epochs, or set --concepts by hand"),
        ("seed: expected 0 or more; found -1", "--seed: expected 0 or more; found -1"),
        ("cars: data_root is needed", "cars: --data-root is needed"),
        ("no seed, device: or memory is a file", "no seed, device: or memory is a file"),
        ("max_iter_, a/n_init/b, n_concepts.png and other_words stay", None),
    ],
)
def test_the_command_line_speaks_of_options(message: str, line: str | None):
    options = {"max_iter": "--epochs", "n_concepts": "--concepts", "n_init": "--starts"}
    options |= {"seed": "--seed", "device": "--device", "data_root": "--data-root"}
    assert line_of(ValueError(message), options) == (line or message)
    assert line_of(Problem(message), options) == message


def test_lines_are_short_and_single():
    line = line_of(ValueError("first\nsecond\x1b[0m " + 2000 * "x"))
    assert "\n" not in line
    assert "\x1b" not in line
    assert len(line) < 700
