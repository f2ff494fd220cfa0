"""What a user may get wrong, and what the one line then says."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

import pytest
from in_process import MODEL, QUICK, Pace, invoke

from pace.cli.errors import Problem, as_typed, line_of

FIT = ("fit", "--images", "photos")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("fit",), "--images and --model, or --observations"),
        (("fit", "--images", "flwer", *MODEL), "'flwer' is neither a folder nor one of color, flower, cars, cub"),
        (("fit", "--images", "flower", *MODEL), "--data-root"),
        (("fit", "--images", "flower", "--data-root", "none", *MODEL), "none is not a folder"),
        (("fit", "--images", "photos", "--split", "val", *MODEL), "no split 'val'; found test, train"),
        (("fit", "--images", "color", "--split", "val", *MODEL), "split 'val' does not exist"),
        ((*FIT, *MODEL, "--device", "gpu"), "expected auto, cpu or cuda"),
        ((*FIT, *MODEL, "--layer", "40"), "expected -6 to 5"),
        ((*FIT, *MODEL, "--alpha", "much"), "expected a number or learn"),
        ((*FIT, *MODEL, "--concepts", "5000"), "--concepts 5000 is more than the"),
        ((*FIT, *MODEL, "--observations", "fit"), "leave --images and --model out"),
        (("fit", "--observations", "fit"), "is a run of `pace fit`; expected one of `pace extract`"),
        (("fit", "--observations", "photos"), "no such run"),
        ((*FIT, "--model", "vit_tny_patch16_224"), "vit_tiny_patch16_224"),
        ((*FIT, "--model", "nothing.safetensors"), "no such file"),
        ((*FIT, "--model", "tiny.safetensors"), "--architecture"),
        (
            (*FIT, "--model", "tiny.safetensors", "--architecture", "test_vit2", "--image-size", "32"),
            "not the weights of",
        ),
        ((*FIT, "--model", "photos"), "config.json"),
        ((*FIT, "--model", "vit_tiny_patch16_224", "--architecture", "test_vit"), "for a file of weights"),
        ((*FIT, *MODEL, "--probe", "--images", "flat"), "--probe needs labels"),
        (("fit", "--images", "color", "--model", "color", "--normalize", "half"), "the model color has its own"),
        (
            ("fit", "--observations", "seen", "--normalize", "half"),
            "leave --normalize out",
        ),
        (
            ("fit", "--observations", "seen", "--limit", "5", "--layer", "0", "--cls", "--split", "test"),
            "leave --layer, --cls, --split, --limit out",
        ),
        ((*FIT, *MODEL, "--concepts", "4", "--max-concepts", "9"), "--max-concepts is for --concepts auto"),
        (("finetune", "--images", "flat", *MODEL), "no labels"),
        (("explain", "nothing.jpg"), "nothing.jpg: no such picture"),
        (("explain", "flat/0.png", "--level", "90"), "between 0 and 1"),
        (("explain", "flat/0.png", "--run", "photos"), "no such run"),
        (("explain", "flat/0.png"), "no run in runs/"),
        (("report", "--run", "fit", "--evaluation", "fit"), "expected one of `pace evaluate`"),
        (("evaluate", "--run", "fit", "--config", "fit"), "is of `pace fit`; this is `pace evaluate`"),
    ],
    ids=lambda value: " ".join(value)[:60] if isinstance(value, tuple) else "",
)
def test_a_mistake_is_one_line_that_says_what_would_work(
    elsewhere: Path, workshop: Path, arguments: tuple[str, ...], says: str
):
    for name in ("tiny.safetensors", "photos", "flat", "fit"):
        (elsewhere / name).symlink_to(workshop / name)
    outcome = invoke(*arguments)
    assert outcome.code == 1
    assert says in outcome.error
    assert outcome.out == ""


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--alpha", "abc"), "expected a number or learn"),
        (("--alpha", "-1"), "error: --alpha: expected one positive number"),
        (("--refine", "abc"), "expected a whole number of steps or auto"),
        (("--refine", "10", "--covariance", "diag"), "--refine: needs --covariance tied and --updates exact; found"),
        (("--memory", "abc"), "error: --memory: expected bytes or a size like '8GB' or '8GiB'; found 'abc'"),
        (("--concepts", "auto", "--updates", "paper"), "error: --concepts auto needs --updates exact"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_wrong_options_of_a_fit_are_refused_before_anything_is_opened(
    options: tuple[str, ...], says: str, elsewhere: Path, monkeypatch: pytest.MonkeyPatch
):
    def never(*_: object) -> None:
        raise AssertionError("images were opened first")

    monkeypatch.setattr("pace.cli.pictures.ImageChoice.open", never)
    assert says in invoke("fit", "--images", "shop/photos", *MODEL, *options).error
    assert not (elsewhere / "runs").exists()


def test_no_gpu_is_said_so(pace: Pace, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert "finds no GPU" in pace(*FIT, *MODEL, "--device", "cuda").error


def test_a_picture_that_is_none_is_named_or_left_out(elsewhere: Path, workshop: Path):
    shutil.copytree(workshop / "flat", elsewhere / "mixed")
    (elsewhere / "mixed" / "broken.png").write_bytes(b"no picture")
    outcome = invoke("explain", "mixed", "--run", "shop/fit")
    assert "broken.png cannot be read" in outcome.error
    assert "--skip-unreadable" in outcome.error
    outcome = invoke("explain", "mixed", "--run", "shop/fit", "--skip-unreadable", "--json")
    assert len(outcome.document["results"]["images"]) == 7
    assert any("broken.png" in warning for warning in outcome.document["warnings"])


def test_damaged_weights_are_one_line(elsewhere: Path):
    (elsewhere / "bad.safetensors").write_bytes(b"no weights at all")
    outcome = invoke("fit", "--images", "shop/photos", "--model", "bad.safetensors", "--architecture", "test_vit")
    assert "bad.safetensors cannot be loaded" in outcome.error


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
    for content in ("", "[]", "{}", '{"format": "pace-run-1"}', "\x00"):
        (elsewhere / "run" / "run.json").write_text(content)
        assert "is not the record of a pace run" in invoke("evaluate", "--run", "run").error


@pytest.mark.parametrize(
    "name", ["pace.cli.runs.write_atomically", "pace.fitting.model_file.write_atomically"], ids=["record", "concepts"]
)
def test_a_full_disk_is_one_line(pace: Pace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str):
    def full(path: Path, *_: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(name, full)
    outcome = pace(*FIT, *MODEL, *QUICK, "--out", tmp_path / "run")
    assert outcome.code == 1
    assert "No space left on device" in outcome.error
    assert "make room" in outcome.error


def test_what_was_learned_outlives_a_full_disk(pace: Pace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    fit = (*FIT, *MODEL, *QUICK, "--out", tmp_path / "run")
    with monkeypatch.context() as patch:
        patch.setattr("pace.explainer.PACE.save", full)
        assert "make room, then run the same command again" in pace(*fit).error
    monkeypatch.setattr("pace.fitting.loop.Expectation.add", full)  # nothing is learned again
    outcome = pace(*fit)
    assert outcome.code == 0
    assert "going on after" in outcome.out
    assert (tmp_path / "run" / "concepts.safetensors").is_file()
    assert not (tmp_path / "run" / "checkpoint").exists()


def test_missing_libraries_are_named_with_the_extra_that_has_them():
    assert "pip install 'pace-xai[models]'" in line_of(ModuleNotFoundError("No module named 'timm'", name="timm"))


@pytest.mark.parametrize(
    ("python", "typed"),
    [
        ("the bound still rises after 2 epochs; raise max_iter or tol", "the bound still rises after 2 epochs; raise --epochs"),
        ("look at more, or set n_concepts by hand", "look at more, or set --concepts by hand"),
        ("4 of 20 concepts are in use: the patches ask for no more; prune=False uses all",
         "4 of 20 concepts are in use: the patches ask for no more; --no-prune uses all"),
        ("n_init: expected 1", "--starts: expected 1"),
        ("seed: expected 0 or more; found -1", "--seed: expected 0 or more; found -1"),
        ('cars: data_root is needed; on_error="skip"', "cars: --data-root is needed; --skip-unreadable"),
        ("no seed, device: or memory is a file", "no seed, device: or memory is a file"),
        ("max_iter_, a/n_init/b, n_concepts.png, --seed=3 and other_words=2 stay", None),
    ],
)  # fmt: skip
def test_the_command_line_speaks_of_options(python: str, typed: str | None):
    assert as_typed(python) == (typed or python)
    assert line_of(ValueError(python)) == (typed or python)
    assert line_of(Problem(python)) == python


def test_warnings_speak_of_options(pace: Pace, tmp_path: Path):
    outcome = pace(*FIT, *MODEL, *QUICK, "--epochs", "1", "--out", tmp_path / "run")
    assert "warning: the bound still rises after 1 epochs; raise --epochs\n" in outcome.err


def test_lines_are_short_and_single():
    line = line_of(ValueError("first\nsecond\x1b[0m " + 2000 * "x"))
    assert "\n" not in line
    assert "\x1b" not in line
    assert len(line) < 700
