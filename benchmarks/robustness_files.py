"""Damaged files: what comes of reading them. Part of robustness.py.

Every kind of file that the package reads is changed, as bytes and by its structure: values of its JSON, tensors under a right
checksum, lines of a table, names in an archive. A reader may refuse it in one line that names it, or read it; an error of any
other kind is raw, and changed bytes that a checksum covers may not be read at all. Nothing may take 5 seconds or a gigabyte.
"""

from __future__ import annotations

import io
import json
import os
import random
import shutil
import signal
import tempfile
import time
import traceback
import warnings
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
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
from pace.files import read_tensors, save_tensors
from pace.images import decode, open_images
from pace.metrics.scores import Score, Scores
from pace.observing.store import ObservationStore

SLOW, LARGE, HANGING = 5.0, 1 << 30, 120  # seconds of the processor, bytes, seconds
AT_ONCE = 250  # files that a process damages before another goes on
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


def spoiled_bytes(content: bytes, draw: random.Random) -> bytes:
    at, size = draw.randrange(max(1, len(content))), draw.choice([1, 8, 100])
    noise = draw.randbytes(size)
    return draw.choice(
        [
            lambda: content[:at] + bytes([content[at] ^ 1 << draw.randrange(8)]) + content[at + 1 :],
            lambda: content[:at],
            lambda: content[:at] + content[at + size :],
            lambda: content[:at] + noise + content[at:],
            lambda: content[:at] + noise + content[at + size :],
            lambda: content[:at] + bytes(size) + content[at + size :],
            lambda: content[:at] + b"\xff" * size + content[at + size :],
            lambda: content + noise,
            lambda: content * 2,
            lambda: noise,
        ]
    )()


def spoiled_value(value: Any, draw: random.Random) -> Any:
    """The same JSON with something else in one place."""
    if isinstance(value, (dict, list)) and value and draw.random() < 0.85:
        changed = value.copy()
        key = draw.choice(list(value)) if isinstance(value, dict) else draw.randrange(len(value))
        if draw.random() < 0.15:
            del changed[key]
        else:
            changed[key] = spoiled_value(value[key], draw)
        return changed
    deep: list[Any] = []
    for _ in range(300):
        deep = [deep]
    return draw.choice(
        [None, True, -1, 0, 7, 10**30, 0.5, -1e300, "", "x", "../../x", "\ud800", "\0", [], {}, [[]], {"x": 1}, deep]
    )


def spoiled_tensors(tensors: dict[str, torch.Tensor], draw: random.Random) -> dict[str, torch.Tensor]:
    name = draw.choice(sorted(tensors))
    tensor, rest = tensors[name], {key: value for key, value in tensors.items() if key != name}
    change = draw.randrange(8)
    if change == 0:
        return rest
    if change == 1:
        return rest | {name + "x": tensor}
    whole = tensor.double()
    values = [torch.full_like(whole, draw.choice([torch.nan, torch.inf, -1e30, 1e30, 0.0, -1.0])), whole[None]]
    values += [tensor[:-1] if tensor.ndim else tensor.reshape(1), torch.cat([whole.reshape(-1)] * 2), whole.long()]
    return rest | {name: [*values, tensor.to(torch.complex64)][change - 2]}


def spoiled_lines(text: str, draw: random.Random) -> str:
    lines = [line.split(" ") for line in text.splitlines()]
    line = draw.choice(lines)
    line[draw.randrange(len(line))] = draw.choice(
        ["", "x", "-1", "0", "9" * 5000, "nan", "1e400", "../../../etc/passwd", "\0"]
    )
    return "\n".join(map(" ".join, lines[: draw.choice([len(lines), len(lines) - 1])])) + "\n"


def spoiled_archive(content: bytes, draw: random.Random) -> bytes:
    """A file of PyTorch with another content in one of its members, or another name for it."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(out, "w") as new:
        chosen = draw.choice(old.namelist())
        for name in old.namelist():
            inner = old.read(name)
            if name == chosen:
                name, inner = draw.choice(
                    [(name, spoiled_bytes(inner, draw)), (f"{name}x", inner), (f"../{name}", inner)]
                )
            new.writestr(name, inner)
    return out.getvalue()


def spoil(kind: Kind, content: bytes, draw: random.Random) -> bool:
    """Write a damaged version; gives whether a checksum can tell."""
    file = kind.file
    if draw.random() < 0.4 or file.suffix not in (".json", ".safetensors", ".txt", ".pt"):
        damaged = spoiled_bytes(content, draw)
        file.write_bytes(damaged)
        return kind.summed and damaged != content
    if file.suffix == ".json":
        text = json.dumps(spoiled_value(json.loads(content), draw))
        file.write_text("[" * 100_000 if draw.random() < 0.02 else text)
    elif file.suffix == ".txt":
        file.write_text(spoiled_lines(content.decode(), draw))
    elif file.suffix == ".pt":
        file.write_bytes(spoiled_archive(content, draw))
    elif file.name.startswith(("shard-", "weights")):
        from safetensors.torch import load, save

        damaged = save(spoiled_tensors(load(content), draw))
        file.write_bytes(damaged)
        if kind.summed:  # its checksum is in the index
            index = file.parent / "index.json"
            listed = json.loads(index.read_bytes())
            shard = next(one for one in listed["shards"] if f"{one['start']:09d}" in file.name)
            shard |= {"bytes": len(damaged), "crc32": zlib.crc32(damaged)}
            index.write_text(json.dumps(listed))
    else:
        file.write_bytes(content)
        tensors, header = read_tensors(file, dict, "")
        if draw.random() < 0.4 or not tensors:
            header = spoiled_value(header, draw)
        else:
            tensors = spoiled_tensors(tensors, draw)
        save_tensors(file, tensors, header if isinstance(header, dict) else {"x": header})
    return False


def memory() -> dict[str, int]:
    """Bytes of this process: VmRSS now, VmHWM at most."""
    lines = Path("/proc/self/status").read_text().splitlines() if Path("/proc/self/status").exists() else []
    return {line.split(":")[0]: int(line.split()[1]) << 10 for line in lines if line.startswith(("VmRSS", "VmHWM"))}


def judged(name: str, kind: Kind, read: Read, good: object, draw: random.Random) -> list[str]:
    """What came of one damaged file: outcomes, the first of which is followed by what was said if it is wrong."""
    parent = kind.file.parent
    before = {one: one.read_bytes() for one in parent.iterdir() if one.is_file()}
    covered, problem = spoil(kind, before[kind.file], draw), ""
    if (peak := Path("/proc/self/clear_refs")).exists():
        peak.write_text("5")  # VmHWM begins anew
    began, held = time.process_time(), memory().get("VmRSS", 0)
    try:
        same = np.array_equal(read(), good)  # type: ignore[arg-type]
        outcome = "read, the same" if same else "silent" if covered else "read, something else"
    except (ValueError, OSError) as error:
        line = str(error)
        told = "\n" not in line and len(line) < 2000
        told &= line.startswith("error: ") or any(name in line for name in (kind.file.name, parent.name))
        outcome, problem = "refused" if told else "raw", traceback.format_exc()
    except Exception:
        outcome, problem = "raw", traceback.format_exc()
    found = [f"{outcome}: {name}" if outcome in ("raw", "silent") else outcome]
    found += ["slow"] * (time.process_time() - began > SLOW)
    found += ["large"] * (memory().get("VmHWM", 0) - held > LARGE)
    for one in parent.iterdir():
        if one.is_file() and one not in before:
            one.unlink()
    for one, content in before.items():
        one.write_bytes(content)
    return [*found, problem[-1800:] if outcome == "raw" else ""]


def some(seed: int, numbers: range, found: dict[str, tuple[Kind, list[object]]]) -> Iterator[list[str]]:
    for number in numbers:
        draw = random.Random(f"{seed}-{number}")
        name = _drawn(found, number)
        kind, good = found[name]
        which = draw.randrange(len(kind.reads))
        yield [name, *judged(name, kind, kind.reads[which], good[which], draw)]


def damaged(count: int, seed: int, until: float, names: Sequence[str]) -> dict[str, Any]:
    """Tallies of what came of so many damaged files, and the first of each wrong outcome."""
    tally, wrong = Counter[str](), dict[str, str]()
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place).resolve()
        (folder / "library").mkdir()
        kinds = library(folder / "library")
        groups = [kinds, kinds, kinds, commands()] if "fit" in names else [kinds]  # commands take longer
        ready = [{name: (kind, [read() for read in kind.reads]) for name, kind in group.items()} for group in groups]
        number = 0
        while number < count and time.monotonic() < until:
            group = ready[number // AT_ONCE % len(ready)]
            begin, end = number, min(count, (number // AT_ONCE + 1) * AT_ONCE)
            for name, *outcomes, problem in _forked(seed, range(begin, end), group):
                number += 1
                for outcome in outcomes:
                    tally[outcome.partition(":")[0]] += 1
                    if outcome.startswith(("raw", "silent", "slow", "large")):
                        wrong.setdefault(outcome if ":" in outcome else f"{outcome}: {name}", problem)
            if number < end and time.monotonic() < until:
                name = _drawn(group, number)
                tally["scipy crashed" if name.endswith(".mat") else "crashed"] += 1
                wrong.setdefault(f"crashed: {name}", f"number {number}")
                number += 1
    kinds_of = len({name for group in ready for name in group})
    return {"kinds": kinds_of, "damaged": number, "tally": dict(sorted(tally.items())), "wrong": wrong}


def _drawn(found: dict[str, Any], number: int) -> str:
    return sorted(found)[number % len(found)]


def _forked(seed: int, numbers: range, found: dict[str, tuple[Kind, list[object]]]) -> Iterator[list[str]]:
    """In a process of its own, which may crash."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.fsync = lambda _: None  # type: ignore[assignment]  # nobody pulls the plug here
        with os.fdopen(writing, "w") as pipe:
            for one in some(seed, numbers, found):
                signal.alarm(HANGING)
                print(json.dumps(one), file=pipe, flush=True)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        for line in pipe:
            yield json.loads(line)
    os.waitpid(child, 0)
