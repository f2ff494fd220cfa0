"""Files that are damaged and processes that are killed: what comes of them.

    uv run python benchmarks/robustness.py --damaged 10000 --kills 1000

Every file that the package reads is changed: bytes, values of its JSON, tensors under a right checksum. A reader may refuse it
in one line that names it, or read it; an error of any other kind is raw, and changed bytes that a checksum covers may not be
read at all. Processes are killed at a file-system call drawn by lot, again and again in one folder, until they come to their
end, whose files have to be those of an undisturbed run, bit for bit. They are forked, which needs Linux or macOS.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pace import PACE, Observations
from pace.backbones import color_vit, load_finetuned
from pace.backbones.heads import load_head, save_head
from pace.benchmark.cache import Cache
from pace.benchmark.methods import Method
from pace.benchmark.results import Results, Row
from pace.cli.fits import read_gallery
from pace.cli.opening import images_of
from pace.cli.runs import open_run
from pace.files import read_tensors, reading, save_tensors
from pace.metrics.scores import Score, Scores
from pace.observations import Batch
from pace.observing.store import Index, ObservationStore, StoreWriter

SLOW, HANGING = 5.0, 120  # seconds
IMAGES, TOKENS, DIM, CLASSES = 24, 6, 4, 3
Read = Callable[[], object]


def observed(seed: int = 0) -> Observations:
    draw = torch.Generator().manual_seed(seed)
    centres = torch.randn(5, DIM, generator=draw) * 4
    tokens = centres[torch.randint(5, (IMAGES, TOKENS), generator=draw)]
    tokens = tokens + 0.3 * torch.randn(IMAGES, TOKENS, DIM, generator=draw)
    predictions = torch.randn(IMAGES, CLASSES, generator=draw).softmax(1)
    return Observations(tokens, torch.rand(IMAGES, TOKENS, generator=draw) + 0.1, predictions, (2, 3))


def learn(**more: Any) -> PACE:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return PACE(4, max_iter=4, n_init=1, parts=2, device="cpu", progress=False).fit(observed(), **more)


def store_of(observations: Observations, folder: Path) -> ObservationStore:
    facts = {"model": "tiny", "images": "drawn"}
    with StoreWriter(folder, Index(facts, IMAGES, observations.grid), shard_bytes=300) as writer:
        for gap in writer.gaps:
            for start in range(gap.start, gap.stop, 2):
                batch = observations.batch(slice(start, start + 2))
                writer.append(start, Batch(*(part for part in batch)))
        writer.finish()
    return ObservationStore.open(folder)


class Crash(BaseException):
    """The fit stops, and leaves its checkpoint."""


# -- damaged files ----------------------------------------------------------------------------------------------------


def examples(folder: Path) -> dict[str, tuple[Path, Read]]:
    """One file of every kind, and how it is read."""
    seen, found = observed(), {}
    model = learn()
    model.save(folder / "model.safetensors", statistics=True)

    def use_model() -> object:
        return PACE.load(folder / "model.safetensors", device="cpu").explain(seen).theta

    found["model"] = folder / "model.safetensors", use_model
    store = store_of(seen, folder / "store")

    def read_store() -> object:
        return ObservationStore.open(folder / "store").observations().batch(slice(None)).embeddings.float().numpy()

    found["store's index"] = folder / "store" / "index.json", read_store
    found["shard"] = folder / "store" / store.shards[1].file, read_store
    save_head(torch.nn.Linear(DIM, CLASSES), folder / "head.safetensors")
    found["head"] = (
        folder / "head.safetensors",
        lambda: load_head(folder / "head.safetensors").state_dict()["weight"].numpy(),
    )
    shutil.copy(Path(color_vit.__file__).parent / "color_vit.safetensors", folder / "tuned.safetensors")
    network = color_vit.new_model()

    def tuned() -> object:
        return load_finetuned(network, folder / "tuned.safetensors").accuracy

    found["fine-tuned model"] = folder / "tuned.safetensors", tuned
    checkpoint = folder / "checkpoint"
    learn(checkpoint=checkpoint, checkpoint_every=0, keep_checkpoint=True)

    def resume() -> object:
        shutil.rmtree(folder / "again", ignore_errors=True)
        again = shutil.copytree(checkpoint, folder / "again" / "checkpoint")  # it is replaced when the fit is done
        return learn(checkpoint=again, checkpoint_every=0, keep_checkpoint=True).means_

    for file in sorted(checkpoint.iterdir()):
        found[f"checkpoint's {file.name.partition('-')[0].partition('.')[0]}"] = file, resume
    scores = Scores([Score("sparsity", "Sparsity", 0.5, 0.4, 0.6, "higher", (0, 1), "how few")], ["careful"], "fine")
    images = {
        "images": "x",
        "data_root": None,
        "split": None,
        "limit": None,
        "skip_unreadable": False,
        "max_pixels": None,
        "seed": 0,
    }
    layer = {"layer": 1, "attention_layer": None, "count_cls": False, "head": None}
    names = {"name": "x", "architecture": None, "image_size": None, "normalize": None, "class_names": ["a"]}
    record = {
        "format": "pace-run-1", "command": "fit", "status": "finished", "started": "2025-01-01T00:00:00+00:00",
        "configuration": {"seed": 0}, "results": scores.as_dict(), "images": images | {"count": 2, "fingerprint": "f"},
        "model": names | layer | {"fingerprint": "f"},
    }  # fmt: skip
    (folder / "run").mkdir()
    (folder / "run" / "run.json").write_text(json.dumps(record))
    (folder / "run" / "gallery.json").write_text(json.dumps({"images": [["a.png", "b.png"]] * 4}))

    def use_run() -> object:
        run = open_run(str(folder / "run"), "fit")
        with reading(run.folder / "run.json", "run it again"):
            return str(images_of(run)), str(Scores.from_dict(run.record["results"]))

    found["run.json"] = folder / "run" / "run.json", use_run
    gallery = folder / "run" / "gallery.json"
    found["gallery"] = gallery, lambda: str(read_gallery(open_run(str(folder / "run"), "fit"), 4))
    row = Row("color", Method("pace", "pace"), scores)
    (folder / "results.json").write_text(json.dumps(Results([row], {"color": {}}, {"seed": 0}).as_dict()))
    found["results.json"] = folder / "results.json", lambda: str(Results.load(folder).rows)
    cache = Cache(folder / "cache")
    cache.put("pace", "0", row.as_dict())
    found["benchmark's cache"] = cache.path("pace", "0"), lambda: str(cache.get("pace", "0", Row.from_dict))
    return found


def spoiled_bytes(content: bytes, draw: random.Random) -> bytes:
    at, size = draw.randrange(len(content)), draw.choice([1, 8, 100])
    noise = draw.randbytes(size)
    return draw.choice(
        [
            lambda: content[:at] + bytes([content[at] ^ 1 << draw.randrange(8)]) + content[at + 1 :],
            lambda: content[:at],
            lambda: content[:at] + content[at + size :],
            lambda: content[:at] + noise + content[at:],
            lambda: content[:at] + noise + content[at + size :],
            lambda: content[:at] + bytes(size) + content[at + size :],
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
    return draw.choice([None, True, -1, 0, 7, 10**30, 0.5, -1e300, "", "x", "../../x", [], {}, [[]], {"x": 1}, deep])


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


def spoil(kind: str, file: Path, content: bytes, draw: random.Random) -> bool:
    """Write a damaged version; gives whether a checksum can tell."""
    summed = file.suffix == ".safetensors"
    if draw.random() < 0.4 or (not summed and draw.random() < 0.1):
        damaged = spoiled_bytes(content, draw)
        file.write_bytes(damaged)
        return summed and damaged != content
    if not summed:
        text = json.dumps(spoiled_value(json.loads(content), draw))
        file.write_text("[" * 100_000 if draw.random() < 0.02 else text)
    elif kind == "shard":  # its checksum is in the index
        from safetensors.torch import load, save

        index = file.parent / "index.json"
        damaged = save(spoiled_tensors(load(content), draw))
        file.write_bytes(damaged)
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


def damage(count: int, seed: int, until: float) -> dict[str, Any]:
    """Tallies of what came of so many damaged files, and the first of each wrong outcome."""
    draw, tally, wrong = random.Random(seed), Counter[str](), {}
    os.fsync = lambda _: None  # type: ignore[assignment]  # nobody pulls the plug here
    with tempfile.TemporaryDirectory() as folder:
        found = examples(Path(folder))
        good = {kind: read() for kind, (_, read) in found.items()}
        for number in range(count):
            if time.monotonic() > until:
                break
            kind = sorted(found)[number % len(found)]
            (file, read), before = found[kind], {}
            for one in file.parent.iterdir():
                if one.is_file():
                    before[one] = one.read_bytes()
            covered, began = spoil(kind, file, before[file], draw), time.monotonic()
            try:
                same = np.array_equal(read(), good[kind])  # type: ignore[arg-type]
                outcome = "read, the same" if same else "silent" if covered else "read, something else"
            except (ValueError, OSError) as error:
                line = str(error)
                outcome = "refused" if "\n" not in line and file.parent.name in line and len(line) < 700 else "raw"
                problem = traceback.format_exc()
            except Exception:
                outcome, problem = "raw", traceback.format_exc()
            if time.monotonic() - began > SLOW:
                tally["slow"] += 1
            tally[outcome] += 1
            if outcome in ("raw", "silent"):
                tally[f"{outcome}: {kind}"] += 1
                wrong.setdefault(f"{outcome}: {kind}", problem[-1500:] if outcome == "raw" else "")
            for one in file.parent.iterdir():
                if one.is_file() and one not in before:
                    one.unlink()
            for one, content in before.items():
                one.write_bytes(content)
    return {"tally": dict(sorted(tally.items())), "wrong": wrong}


# -- killed processes -------------------------------------------------------------------------------------------------

_CALLS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate")


def work(folder: Path) -> None:
    """Observations on disk, a fit of them with checkpoints, and its file."""
    observations = store_of(observed(), folder / "store").observations()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = PACE(4, max_iter=4, n_init=1, parts=2, device="cpu", progress=False)
        model.fit(observations, checkpoint=folder / "fit", checkpoint_every=0)
    model.save(folder / "model.safetensors", statistics=True)


def command(folder: Path) -> None:
    """`pace fit` on a few pictures, as a user calls it."""
    from typer.testing import CliRunner

    from pace.cli.app import app

    fit = ["fit", "--images", "photos", "--model", "color", "--concepts", "3", "--starts", "1", "--epochs", "3"]
    done = CliRunner().invoke(app, [*fit, "--checkpoint-every", "0", "--out", str(folder)])
    if done.exit_code:
        raise RuntimeError(done.output)


def in_a_child(what: Callable[[], None], die_at: int | None, folder: Path) -> bool:
    """Whether it came to its end; with `die_at`, it is killed at that file-system call in the folder."""
    child = os.fork()
    if child == 0:
        signal.alarm(HANGING)
        calls = iter(range(1 << 30))

        def count(event: str, arguments: tuple[Any, ...]) -> None:
            named = arguments and isinstance(arguments[0], (str, os.PathLike)) and str(folder) in str(arguments[0])
            if event in _CALLS and named and next(calls) == die_at:
                os.kill(os.getpid(), signal.SIGKILL)

        if die_at is not None:
            sys.addaudithook(count)
        try:
            what()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    if status and not (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL):
        raise RuntimeError(f"a process that was resumed ended with status {status}, in {folder}")
    return status == 0


def contents(folder: Path) -> Iterator[tuple[str, bytes]]:
    for file in sorted(folder.rglob("*")):
        if file.name == "run.json":
            yield file.name, json.dumps(json.loads(file.read_bytes())["results"]).encode()
        elif file.is_file() and file.name != "lock":
            yield str(file.relative_to(folder)), file.read_bytes()


def kill(count: int, seed: int, what: Callable[[Path], None], most_calls: int, until: float) -> dict[str, int]:
    """So many kills; every folder has to end like that of a run that nobody killed."""
    draw, tally = random.Random(seed), Counter(kills=0, finished=0, different=0, failed=0)
    with tempfile.TemporaryDirectory() as place:
        whole = Path(place) / "whole"
        whole.mkdir()
        what(whole)  # here, so that everything is imported
        expected, number = dict(contents(whole)), 0
        while tally["kills"] < count and time.monotonic() < until:
            number += 1
            folder = Path(place) / f"killed-{number}"
            folder.mkdir()
            try:
                while not in_a_child(lambda: what(folder), draw.randrange(most_calls), folder):  # noqa: B023
                    tally["kills"] += 1
                tally["finished"] += 1
                if dict(contents(folder)) != expected:
                    tally["different"] += 1
                    print(f"different: {sorted(dict(contents(folder)))}, expected {sorted(expected)}", file=sys.stderr)
            except RuntimeError as error:
                tally["failed"] += 1
                print(error, sorted(dict(contents(folder))), file=sys.stderr)
            shutil.rmtree(folder)
    return dict(tally)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--damaged", type=int, default=10_000)
    parser.add_argument("--kills", type=int, default=1_000)
    parser.add_argument("--command-kills", type=int, default=50, help="of `pace fit`, which takes longer")
    parser.add_argument(
        "--minutes", type=float, default=600.0, help="for each of the three; what was done until then counts"
    )
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)  # a forked process cannot have the threads of the one it came from
    found: dict[str, Any] = {"seed": given.seed}

    def until() -> float:
        return time.monotonic() + 60 * given.minutes

    if given.kills:
        found["kills"] = kill(given.kills, given.seed, work, 180, until())
    if given.command_kills:
        with tempfile.TemporaryDirectory() as place:
            os.chdir(place)
            from PIL import Image

            for number in range(12):
                folder = Path("photos", "ab"[number % 2])
                folder.mkdir(parents=True, exist_ok=True)
                noise = np.random.default_rng(number).integers(0, 255, (64, 64, 3), np.uint8)
                Image.fromarray(noise).save(folder / f"{number}.png")
            found["kills of pace fit"] = kill(given.command_kills, given.seed, command, 80, until())
            os.chdir("/")
    if given.damaged:
        found["damaged"] = damage(given.damaged, given.seed, until())
    print(json.dumps(found, indent=1))
    return found


if __name__ == "__main__":
    main()
