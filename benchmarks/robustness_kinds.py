"""The kinds of files that the package reads, and what reads them, for robustness_files.py."""

from __future__ import annotations

import io
import json
import os
import shutil
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from robustness_work import COMMANDS, FIT, command, learn, observed, store_of, workshop

from pace import PACE
from pace.backbones import ModelChoice, color_vit, load_finetuned, open_model
from pace.backbones.heads import load_head, save_head
from pace.benchmark.cache import Cache
from pace.benchmark.methods import Method
from pace.benchmark.results import Results, Row
from pace.images import decode, open_images
from pace.metrics.scores import Score, Scores
from pace.observing.store import ObservationStore

Read = Callable[[], object]


class Kind(NamedTuple):
    file: Path
    reads: list[Read]  # one of which is drawn
    summed: bool = False  # a checksum covers its bytes


def library(folder: Path) -> dict[str, Kind]:
    """What Python reads."""
    seen, found = observed(), dict[str, Kind]()

    def use_model(file: Path) -> object:
        return PACE.load(file, device="cpu").explain(seen).theta

    ways: dict[str, dict[str, Any]] = {
        "kinds": {},
        "flat": {"parts": None},
        "full": {"parts": None, "covariance": "full"},
        "low-rank": {"parts": None, "covariance": "low_rank"},
        "auto": {"n_concepts": "auto", "max_concepts": 5},
    }
    for name, how in ways.items():
        file = folder / f"{name}.safetensors"
        learn(**how).save(file, statistics=True)
        found[f"model, {name}"] = Kind(file, [partial(use_model, file)], True)
    store = store_of(seen, folder / "store")

    def read_store() -> object:
        return ObservationStore.open(folder / "store").observations().batch(slice(None)).embeddings.float().numpy()

    found["store's index"] = Kind(folder / "store" / "index.json", [read_store])
    found["shard"] = Kind(folder / "store" / store.shards[1].file, [read_store], True)
    head = folder / "head.safetensors"
    save_head(torch.nn.Linear(4, 3), head)
    found["head"] = Kind(head, [lambda: load_head(head).state_dict()["weight"].numpy()], True)
    tuned = folder / "tuned.safetensors"
    shutil.copy(Path(color_vit.__file__).parent / "color_vit.safetensors", tuned)
    network = color_vit.new_model()
    found["fine-tuned model"] = Kind(tuned, [lambda: load_finetuned(network, tuned).accuracy], True)
    checkpoint = folder / "checkpoint"
    learn(checkpoint=checkpoint, checkpoint_every=0, keep_checkpoint=True)

    def resume() -> object:
        shutil.rmtree(folder / "again", ignore_errors=True)
        again = shutil.copytree(checkpoint, folder / "again" / "checkpoint")  # it is replaced when the fit is done
        return learn(checkpoint=again, checkpoint_every=0, keep_checkpoint=True).means_

    for file in sorted(checkpoint.iterdir()):
        name = file.name.partition("-")[0].partition(".")[0]
        found[f"checkpoint's {name}"] = Kind(file, [resume], file.suffix == ".safetensors")
    scores = Scores([Score("sparsity", "Sparsity", 0.5, 0.4, 0.6, "higher", (0, 1), "how few")], ["careful"], "fine")
    row = Row("color", Method("pace", "pace"), scores)
    (folder / "results.json").write_text(json.dumps(Results([row], {"color": {}}, {"seed": 0}).as_dict()))
    found["results.json"] = Kind(folder / "results.json", [lambda: str(Results.load(folder).rows)])
    cache = Cache(folder / "cache")
    cache.put("pace", "0", row.as_dict())
    found["benchmark's cache"] = Kind(cache.path("pace", "0"), [lambda: str(cache.get("pace", "0", Row.from_dict))])
    return found | pictures(folder) | datasets(folder) | weights(folder)


def pictures(folder: Path) -> dict[str, Kind]:
    from PIL import Image

    found, noise = dict[str, Kind](), np.random.default_rng(0).integers(0, 255, (40, 30, 3), np.uint8)
    for ending in ("png", "jpg", "gif", "bmp", "tif", "webp", "ppm", "avif"):
        file = folder / f"picture.{ending}"
        try:
            Image.fromarray(noise).save(file)
        except (OSError, ValueError, KeyError):  # not every Pillow writes AVIF
            continue
        found[f"picture, {ending}"] = Kind(file, [lambda file=file: decode(file).numpy()])
    return found


def datasets(folder: Path) -> dict[str, Kind]:
    from PIL import Image
    from scipy.io import savemat

    found, picture = dict[str, Kind](), Image.new("RGB", (8, 8))

    def read(name: str) -> object:
        return str([open_images(name, folder / "data", split).labels for split in ("train", "test")])

    flowers = folder / "data" / "flowers-102"
    (flowers / "jpg").mkdir(parents=True)
    for number in range(1, 7):
        picture.save(flowers / "jpg" / f"image_{number:05d}.jpg")
    savemat(flowers / "setid.mat", {"trnid": [[1, 2]], "tstid": [[3, 4]], "valid": [[5, 6]]}, do_compression=True)
    savemat(flowers / "imagelabels.mat", {"labels": [[1, 2, 1, 2, 1, 2]]}, do_compression=True)
    (flowers / "cat_to_name.json").write_text(json.dumps({"1": "rose", "2": "lily"}))
    for name in ("setid.mat", "imagelabels.mat", "cat_to_name.json"):
        found[f"flower's {name}"] = Kind(flowers / name, [partial(read, "flower")])
    cars = folder / "data" / "stanford_cars"
    (cars / "devkit").mkdir(parents=True)
    kind = [("fname", "O"), ("class", "O")]
    for split in ("train", "test"):
        (cars / f"cars_{split}").mkdir()
        for number in (1, 2):
            picture.save(cars / f"cars_{split}" / f"0000{number}.jpg")
        rows = np.array([[("00001.jpg", 1), ("00002.jpg", 2)]], dtype=kind)
        labels = "" if split == "train" else "_withlabels"
        savemat(cars / "devkit" / f"cars_{split}_annos{labels}.mat", {"annotations": rows}, do_compression=True)
    savemat(
        cars / "devkit" / "cars_meta.mat",
        {"class_names": np.array([["Audi", "BMW"]], dtype=object)},
        do_compression=True,
    )
    for name in ("cars_train_annos.mat", "cars_meta.mat"):
        found[f"cars' {name}"] = Kind(cars / "devkit" / name, [partial(read, "cars")])
    cub = folder / "data" / "CUB_200_2011"
    (cub / "images" / "001.Gull").mkdir(parents=True)
    (cub / "parts").mkdir()
    tables = {
        "images": "001.Gull/a.jpg\n001.Gull/b.jpg", "image_class_labels": "1\n1", "train_test_split": "1\n0",
        "bounding_boxes": "0 0 5 5\n1 1 5 5", "classes": "001.Gull", "parts/parts": "back\nbill",
    }  # fmt: skip
    for name in "ab":
        picture.save(cub / "images" / "001.Gull" / f"{name}.jpg")
    for name, text in tables.items():
        lines = [f"{number} {line}" for number, line in enumerate(text.splitlines(), 1)]
        (cub / f"{name}.txt").write_text("\n".join(lines) + "\n")
    (cub / "parts" / "part_locs.txt").write_text("1 1 2 2 1\n1 2 3 3 1\n2 1 0 0 0\n2 2 4 4 1\n")
    for name in (*tables, "parts/part_locs"):
        found[f"cub's {name}.txt"] = Kind(cub / f"{name}.txt", [partial(read, "cub")])
    return found


def weights(folder: Path) -> dict[str, Kind]:
    """As people have them."""
    import timm
    from safetensors.torch import save_file

    model, found = timm.create_model("test_vit", num_classes=2), dict[str, Kind]()
    save_file(model.state_dict(), folder / "weights.safetensors")
    torch.save({"state_dict": model.state_dict(), "epoch": 3}, folder / "weights.pt")
    torch.save(model.state_dict(), folder / "old.pth", _use_new_zipfile_serialization=False)
    for name in ("weights.safetensors", "weights.pt", "old.pth"):
        choice = ModelChoice(folder / name, architecture="test_vit")

        def read(choice: ModelChoice = choice) -> object:
            return open_model(choice)[0].state_dict()["norm.bias"].numpy()

        found[f"weights, {name}"] = Kind(folder / name, [read])
    return found


def commands() -> dict[str, Kind]:
    """What the commands read of runs: each error is one line."""
    os.chdir(workshop())
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        command(COMMANDS["evaluate"], Path("scores"))
        command(COMMANDS["finetune"], Path("tuned"))
        command(f"{FIT} --head probe --model tuned".replace("--model color", ""), Path("probed"))
    Path("classes.txt").write_text("red\ngreen\n")
    fit, ours = FIT.partition(" ")[2], Path("done")
    uses = {
        "explain": "explain photos/a/0.png --run done --no-ablation", "evaluate": COMMANDS["evaluate"],
        "report": COMMANDS["report"], "learn from it": "fit --observations done --concepts 2 --starts 1 --epochs 1",
        "repeat it": f"fit --config done/run.json {fit}",
    }  # fmt: skip

    def runs(text: str) -> Read:
        def read() -> object:
            shutil.rmtree("out", ignore_errors=True)
            said = io.StringIO()
            with redirect_stdout(said), redirect_stderr(said):
                code = command(text, Path("out"))
            errors = [line for line in said.getvalue().splitlines() if line.startswith("error: ")]
            if code:
                if len(errors) != 1 or errors[0].startswith("error: unexpected ") or code not in (1, 2):
                    raise RuntimeError(said.getvalue())
                raise ValueError(errors[0])
            return json.dumps(json.loads(Path("out/run.json").read_bytes())["results"])

        return read

    every, found = [runs(text) for text in uses.values()], dict[str, Kind]()
    for name in (
        "run.json",
        "concepts.safetensors",
        "gallery.json",
        "seen.json",
        "original/index.json",
        "perturbed/index.json",
    ):
        found[f"fit's {name}"] = Kind(ours / name, every, name.endswith(".safetensors"))
    (shard, *_) = (ours / "original").glob("shard-*")
    found["fit's shard"] = Kind(shard, every, True)
    found["evaluation's run.json"] = Kind(Path("scores/run.json"), [runs(f"{uses['report']} --evaluation scores")])
    tuned = [runs(FIT.replace("color", "tuned"))]
    found["fine-tuned run.json"] = Kind(Path("tuned/run.json"), tuned)
    found["fine-tuned weights"] = Kind(Path("tuned/model.safetensors"), tuned, True)
    found["fit's head"] = Kind(Path("probed/head.safetensors"), [runs(uses["explain"].replace("done", "probed"))], True)
    found["names of classes"] = Kind(Path("classes.txt"), [runs(f"{FIT} --classes classes.txt")])
    return found
