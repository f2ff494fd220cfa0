"""Extraction: the same observations from every kind of source, in order, resumable, and nothing left running."""

import multiprocessing
import os
import shutil
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import pace.observing.extract
from pace.images import Folder, Perturbation, UnreadableImageError, normalize
from pace.observations import Batch, Observations
from pace.observing.extract import observe, observe_pair
from pace.observing.pipeline import CAN_FORK, ahead, by_processes, by_threads, load_pixels
from pace.observing.store import ObservationStore, StoreWriter

SIZE, COUNT = 8, 21
PREPROCESSING = SimpleNamespace(
    size=(SIZE, SIZE), mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.4), interpolation="bilinear", crop_ratio=1.0
)


class Tiny:
    """A backbone in four lines of arithmetic: 4 x 4 patches, two tokens a side, and a mean token in front."""

    layer = 0
    prefix_tokens = 1
    preprocessing = PREPROCESSING
    device = torch.device("cpu")

    def __init__(self, seed: int = 0) -> None:
        self.seed, self.calls = seed, 0
        self.weight = torch.randn(3, 6, generator=torch.Generator().manual_seed(seed))

    def grid(self, height: int, width: int) -> tuple[int, int]:
        return height // 4, width // 4

    def fingerprint(self) -> str:
        return f"tiny-{self.seed}"

    def __call__(self, images: Tensor) -> Batch:
        self.calls += 1
        patches = torch.nn.functional.avg_pool2d(images, 4).flatten(2).mT
        tokens = torch.cat([patches.mean(1, keepdim=True), patches], 1) @ self.weight
        return Batch(tokens, tokens.norm(dim=-1).softmax(-1), tokens.mean(1).softmax(-1))


@pytest.fixture(scope="module")
def pixels() -> Tensor:
    return torch.randint(0, 256, (COUNT, 3, SIZE, SIZE), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def folder(pixels: Tensor, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from PIL import Image

    path = tmp_path_factory.mktemp("images")
    for number, image in enumerate(pixels):
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(path / f"{number:03d}.png")
    return path


@pytest.fixture
def expected(pixels: Tensor) -> Batch:
    return Tiny()(normalize(pixels / 255, PREPROCESSING))


@pytest.fixture(autouse=True)
def _no_thread_survives() -> Iterator[None]:
    yield
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("pace-")]


def same(observations: Observations, batch: Batch, tolerance: float = 1e-6) -> None:
    found = observations.batch(slice(None), dtype=torch.float32)
    for part, other in zip(found, batch, strict=True):
        assert part is not None
        assert torch.allclose(part, other.float(), atol=tolerance), (part - other).abs().max()


class Streamed(IterableDataset):  # type: ignore[type-arg]
    def __init__(self, pixels: Tensor) -> None:
        self.pixels = pixels

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.pixels)


@pytest.mark.parametrize("kind", ["floats", "uint8", "loader", "pairs", "stream", "folder", "path", "set"])
@pytest.mark.parametrize("stored", [False, True])
def test_every_kind_of_source_gives_the_same_observations(
    kind: str, stored: bool, pixels: Tensor, folder: Path, expected: Batch, tmp_path: Path
) -> None:
    images = {
        "floats": pixels / 255,
        "uint8": pixels,
        "loader": DataLoader(pixels / 255, batch_size=4),  # type: ignore[arg-type]
        "pairs": DataLoader(TensorDataset(pixels, torch.arange(COUNT)), batch_size=5),
        "stream": DataLoader(Streamed(pixels), batch_size=6),
        "folder": str(folder),
        "path": folder,
        "set": Folder(folder),
    }[kind]
    store = tmp_path / "store" if stored else None
    observations = observe(Tiny(), images, batch_size=4, store=store)  # type: ignore[arg-type]
    same(observations, expected, 2e-3 if stored else 1e-6)
    assert (observations.grid, observations.prefix_tokens) == ((2, 2), 1)
    if store is not None:
        assert ObservationStore.open(store).complete


def test_images_of_other_sizes_are_prepared_for_the_model(tmp_path: Path) -> None:
    from PIL import Image

    from pace.images import prepare

    wide = np.random.default_rng(0).integers(0, 256, (10, 31, 3), dtype=np.uint8)
    Image.fromarray(wide).save(tmp_path / "wide.png")
    expected = prepare(torch.from_numpy(wide).permute(2, 0, 1), PREPROCESSING)[None]
    same(observe(Tiny(), tmp_path), Tiny()(normalize(expected, PREPROCESSING)))


@pytest.mark.parametrize("workers", [1, 7])
def test_order_does_not_depend_on_threads_or_batch_size(folder: Path, expected: Batch, workers: int) -> None:
    for batch_size in (1, 5, 100):
        same(observe(Tiny(), folder, batch_size=batch_size, workers=workers), expected)


def test_non_square_tensors_keep_their_size() -> None:
    observations = observe(Tiny(), torch.rand(3, 3, 8, 16))
    assert observations.grid == (2, 4)


def test_the_perturbed_view_is_the_perturbation_of_the_same_images(pixels: Tensor, folder: Path) -> None:
    perturbed = Perturbation(seed=3)(pixels / 255, torch.arange(COUNT))
    expected = Tiny()(normalize(perturbed, PREPROCESSING))
    for batch_size in (4, 50):
        same(observe(Tiny(), folder, perturb=True, seed=3, batch_size=batch_size), expected, 1e-5)
        same(observe(Tiny(), pixels, perturb=Perturbation(seed=3), batch_size=batch_size), expected, 1e-5)


@pytest.mark.parametrize("stored", [False, True])
def test_a_pair_equals_two_observations_and_decodes_once(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stored: bool
) -> None:
    reads: list[int] = []
    images = Folder(folder)
    real = images._image
    monkeypatch.setattr(images, "_image", lambda index: (reads.append(index), real(index))[1])
    pair = observe_pair(Tiny(), images, seed=3, batch_size=4, store=tmp_path / "pair" if stored else None)
    assert sorted(reads) == list(range(COUNT))
    for view, perturb in zip(pair, (None, True), strict=True):
        same(view, observe(Tiny(), images, perturb=perturb, seed=3, batch_size=4).batch(slice(None)), 2e-3)


class InBfloat16(Tiny):
    """Tokens as a model in bfloat16 gives them."""

    def __call__(self, images: Tensor) -> Batch:
        batch = super().__call__(images)
        return batch._replace(embeddings=batch.embeddings.bfloat16())


def test_tokens_keep_their_type_in_memory_and_their_values_in_a_store(
    pixels: Tensor, expected: Batch, tmp_path: Path
) -> None:
    observations = observe(InBfloat16(), pixels, batch_size=4)
    assert observations.embeddings.dtype == torch.bfloat16
    same(observations, expected._replace(embeddings=expected.embeddings.bfloat16()))
    stored = observe(InBfloat16(), pixels, batch_size=4, store=tmp_path).batch(slice(None))
    assert torch.equal(stored.embeddings, observations.embeddings.half())


def test_inference_mode_around_it_changes_nothing(pixels: Tensor, expected: Batch) -> None:
    with torch.inference_mode():
        observations = observe(Tiny(), pixels, batch_size=4)
    same(observations, expected)
    assert not observations.embeddings.is_inference()


@pytest.mark.parametrize("stored", [False, True])
def test_a_wrong_value_is_found_beside_the_model_and_named(pixels: Tensor, tmp_path: Path, stored: bool) -> None:
    class Wrong(Tiny):
        def __call__(self, images: Tensor) -> Batch:
            batch = super().__call__(images)
            if self.calls == 2:
                batch.embeddings[1, 2, 3] = torch.nan
            return batch

    backbone = Wrong()
    with pytest.raises(ValueError, match="in the batch from image 4 on: embeddings of image 1 is NaN or infinite"):
        observe(backbone, pixels, batch_size=4, store=tmp_path / "store" if stored else None)
    assert not stored or len(ObservationStore.open(tmp_path / "store")) == 4


class Broken(Tiny):
    """Fails at one call."""

    def __init__(self, at: int, error: BaseException) -> None:
        super().__init__()
        self.at, self.error = at, error

    def __call__(self, images: Tensor) -> Batch:
        if self.calls == self.at:
            raise self.error
        return super().__call__(images)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("out of memory")])
def test_an_interrupted_extraction_keeps_what_was_computed_and_resumes(
    pixels: Tensor, folder: Path, tmp_path: Path, error: BaseException
) -> None:
    whole = observe(Tiny(), folder, batch_size=4, store=tmp_path / "whole").batch(slice(None))
    with pytest.raises(type(error)):
        observe(Broken(3, error), folder, batch_size=4, store=tmp_path / "parts")
    assert len(ObservationStore.open(tmp_path / "parts")) == 12
    backbone = Tiny()
    resumed = observe(backbone, folder, batch_size=4, store=tmp_path / "parts").batch(slice(None))
    assert backbone.calls == 3  # 9 images left
    for part, other in zip(resumed, whole, strict=True):
        assert part is not None
        assert other is not None
        assert torch.equal(part, other)


def test_a_loader_resumes_where_it_was_also_with_other_batches(pixels: Tensor, expected: Batch, tmp_path: Path) -> None:
    def loader(batch_size: int) -> DataLoader[Tensor]:
        return DataLoader(pixels, batch_size=batch_size)  # type: ignore[arg-type]

    with pytest.raises(RuntimeError):
        observe(Broken(2, RuntimeError()), loader(4), store=tmp_path)
    with pytest.raises(ValueError, match="images was loader of 21 images, first"):
        observe(Tiny(), loader(5), store=tmp_path)  # its first batch is another
    backbone = Tiny()
    same(observe(backbone, loader(4), store=tmp_path), expected, 2e-3)
    assert backbone.calls == 4


def test_a_finished_store_is_returned_without_computing(pixels: Tensor, expected: Batch, tmp_path: Path) -> None:
    observe(Tiny(), pixels, store=tmp_path)
    backbone = Tiny()
    same(observe(backbone, pixels, store=tmp_path), expected, 2e-3)
    assert backbone.calls == 0


def test_a_pair_whose_halves_stopped_at_different_places_is_completed(pixels: Tensor, tmp_path: Path) -> None:
    observe(Tiny(), pixels, batch_size=4, store=tmp_path / "original")
    with pytest.raises(RuntimeError):
        observe(Broken(2, RuntimeError()), pixels, perturb=True, batch_size=4, store=tmp_path / "perturbed")
    backbone = Tiny()
    original, perturbed = observe_pair(backbone, pixels, batch_size=4, store=tmp_path)
    assert backbone.calls == 4  # 13 perturbed images
    assert (len(original), len(perturbed)) == (COUNT, COUNT)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"backbone": Tiny(seed=1)}, "model was tiny-0, now tiny-1"),
        ({"perturb": True}, "perturbation was none, now "),
        ({"images": torch.zeros(COUNT, 3, SIZE, SIZE)}, "images was 21 images, .*, now 21 images, "),
    ],
)
def test_a_store_of_something_else_is_refused(
    pixels: Tensor, tmp_path: Path, change: dict[str, object], message: str
) -> None:
    observe(Tiny(), pixels, store=tmp_path)
    with pytest.raises(ValueError, match=message):
        observe(**{"backbone": Tiny(), "images": pixels, "store": tmp_path, **change})  # type: ignore[arg-type]


def test_memory_does_not_grow_with_the_number_of_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[int] = []
    results: list[weakref.ref[Tensor]] = []

    class Watched(Tiny):
        def __call__(self, images: Tensor) -> Batch:
            batch = super().__call__(images)
            results.append(weakref.ref(batch.embeddings))
            alive.append(sum(result() is not None for result in results))
            return batch

    monkeypatch.setattr(pace.observing.extract, "StoreWriter", partial(StoreWriter, shard_bytes=1000))
    observe(Watched(), torch.rand(300, 3, SIZE, SIZE), batch_size=3, store=tmp_path)
    assert len(alive) == 100
    assert max(alive) <= 6


def test_decoding_stays_a_bounded_number_of_batches_ahead(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images = Folder(folder)
    reads: list[int] = []
    real = images._image
    monkeypatch.setattr(images, "_image", lambda index: (reads.append(index), real(index))[1])
    with pytest.raises(RuntimeError):
        observe(Broken(0, RuntimeError()), images, batch_size=1, workers=2)
    assert len(reads) < 10


class Shuffled(Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Tensor:
        return torch.zeros(3, SIZE, SIZE)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"images": torch.randn(2, 3, SIZE, SIZE)},
            r"expected uint8 or floats in \[0, 1\]; found -.*before normalisation",
        ),
        ({"images": torch.rand(3, SIZE, SIZE)}, r"expected shape \(images, 3, height, width\); found \(3, 8, 8\)"),
        ({"images": torch.zeros(2, 1, SIZE, SIZE)}, "expected shape"),
        ({"images": torch.zeros(0, 3, SIZE, SIZE)}, "expected shape"),
        ({"images": torch.zeros(2, 3, SIZE, SIZE, dtype=torch.int64)}, "expected uint8 or floats"),
        ({"images": [1, 2]}, "expected a tensor, a DataLoader, an ImageSet, a folder or a dataset's name; found list"),
        ({"images": DataLoader(Shuffled(), shuffle=True), "perturb": True}, "this DataLoader shuffles"),
        ({"images": DataLoader([{"image": 1}])}, "expected a DataLoader of tensors, or of pairs.*found dict"),  # type: ignore[arg-type]
        ({"batch_size": 0}, "batch_size: expected 1 or more; found 0"),
        ({"perturb": lambda batch, indices: batch, "store": "store"}, r"needs a method fingerprint\(\)"),
    ],
)
def test_wrong_input_is_explained(
    change: dict[str, object], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = {"images": torch.rand(2, 3, SIZE, SIZE), **change}
    with pytest.raises(ValueError, match=message):
        observe(Tiny(), **arguments)  # type: ignore[arg-type]
    assert not (tmp_path / "store").exists()


def test_workers_must_be_at_least_one(folder: Path) -> None:
    with pytest.raises(ValueError, match="workers: expected 1 or more; found 0"):
        observe(Tiny(), folder, workers=0)


def test_a_loader_of_several_sizes_is_refused() -> None:
    batches = [torch.rand(2, 3, 8, 8), torch.rand(2, 3, 8, 16)]
    with pytest.raises(ValueError, match=r"images from 2 on are \(8, 16\) pixels, the first are \(8, 8\)"):
        observe(Tiny(), DataLoader(batches, batch_size=None))  # type: ignore[arg-type]


def test_a_damaged_image_is_named_and_what_came_before_is_kept(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "images")
    (tmp_path / "images" / "013.png").write_bytes(b"no image")
    with pytest.raises(ValueError, match=r"013\.png cannot be read as an image"):
        observe(Tiny(), tmp_path / "images", batch_size=4, store=tmp_path / "store")
    assert len(ObservationStore.open(tmp_path / "store")) == 12


def test_images_that_cannot_be_read_are_left_out_when_asked(pixels: Tensor, folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "images")
    (tmp_path / "images" / "013.png").write_bytes(b"no image")
    left = torch.cat([pixels[:13], pixels[14:]])
    with pytest.warns(UserWarning, match=r"1 of 21 images cannot be read and are left out: 013\.png"):
        observations = observe(Tiny(), tmp_path / "images", batch_size=4, on_error="skip")
    same(observations, Tiny()(normalize(left / 255, PREPROCESSING)))
    with pytest.warns(UserWarning, match="left out"):
        pair = observe_pair(Tiny(), tmp_path / "images", batch_size=4, on_error="skip")
    assert [len(view) for view in pair] == [COUNT - 1, COUNT - 1]
    with pytest.raises(ValueError, match='on_error: expected "raise" or "skip"; found \'ignore\''):
        observe(Tiny(), folder, on_error="ignore")  # type: ignore[arg-type]


def test_predictions_may_be_missing() -> None:
    class Headless(Tiny):
        def __call__(self, images: Tensor) -> Batch:
            return super().__call__(images)._replace(predictions=None)

    assert observe(Headless(), torch.rand(5, 3, SIZE, SIZE), batch_size=2).predictions is None


@pytest.mark.parametrize(("progress", "shown"), [(True, True), (False, False), (None, False)])
def test_progress_is_shown_when_asked_for(
    pixels: Tensor, progress: bool | None, shown: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    observe(Tiny(), pixels, progress=progress)
    captured = capfd.readouterr()
    assert ("21/21" in captured.err) == shown
    assert captured.out == ""


KILLED = """
import os, signal, sys
sys.path[:0] = {path!r}
import test_extract
from pace.observing.extract import observe

class Mortal(test_extract.Tiny):
    def __init__(self, last):
        super().__init__()
        self.last = last
    def __call__(self, images):
        if self.calls == self.last:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__call__(images)

for last in (3, 9, None):
    pid = os.fork()
    if pid == 0:
        from functools import partial
        import pace.observing.extract
        pace.observing.extract.StoreWriter = partial(pace.observing.extract.StoreWriter, shard_bytes=400)
        observe(Mortal(last), sys.argv[1], batch_size=1, store=sys.argv[2], workers=2)
        os._exit(0)
    assert (os.waitpid(pid, 0)[1] == 0) == (last is None)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_killed_and_resumed_it_gives_the_same_bits(folder: Path, tmp_path: Path) -> None:
    code = KILLED.format(path=[str(Path(__file__).parent), *sys.path])
    ended = subprocess.run(
        [sys.executable, "-c", code, str(folder), str(tmp_path / "killed")], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    ObservationStore.open(tmp_path / "killed").verify()
    resumed = ObservationStore.open(tmp_path / "killed").observations().batch(slice(None))
    whole = observe(Tiny(), folder, batch_size=1, store=tmp_path / "whole").batch(slice(None))
    for part, other in zip(resumed, whole, strict=True):
        assert part is not None
        assert other is not None
        assert torch.equal(part, other)


def test_a_real_backbone_is_observed_from_a_folder_into_a_store(folder: Path, tmp_path: Path) -> None:
    vision_transformer = pytest.importorskip("timm.models.vision_transformer")
    from pace.backbones import Backbone

    torch.manual_seed(0)
    model = vision_transformer.VisionTransformer(
        img_size=16, patch_size=8, embed_dim=12, depth=2, num_heads=2, num_classes=3
    ).train()
    backbone = Backbone(model)
    in_memory = backbone.observe(folder, batch_size=8)
    stored = backbone.observe(folder, batch_size=8, store=tmp_path)
    assert repr(in_memory) == repr(stored) == "Observations(21 images, 4 tokens (2 x 2), d = 12, 3 classes)"
    same(stored, in_memory.batch(slice(None)), 2e-3)
    assert model.training
    with pytest.raises(ValueError, match="layer was 1, now 0"):
        Backbone(model, layer=0).observe(folder, store=tmp_path)
    with pytest.raises(ValueError, match="prefix tokens was 0, now 1"):
        Backbone(model, count_cls=True).observe(folder, store=tmp_path)
    with torch.no_grad():
        model.head.bias += 1
    with pytest.raises(ValueError, match="holds other observations: model was"):
        backbone.observe(folder, store=tmp_path)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("on_device", [False, True])
def test_a_gpu_gives_what_its_model_gives(dtype: torch.dtype, on_device: bool, tmp_path: Path) -> None:
    vision_transformer = pytest.importorskip("timm.models.vision_transformer")
    from pace.backbones import Backbone

    torch.manual_seed(0)
    settings = {"img_size": 32, "patch_size": 4, "embed_dim": 96, "depth": 2, "num_heads": 2, "num_classes": 3}
    model = vision_transformer.VisionTransformer(**settings).eval().to("cuda", dtype)
    backbone = Backbone(model)
    images = torch.randint(0, 256, (1000, 3, 32, 32), dtype=torch.uint8)
    images = images.cuda() if on_device else images
    whole = [
        backbone(normalize(part.cuda().float() / 255, backbone.preprocessing)).embeddings for part in images.split(96)
    ]
    expected = torch.cat(whole).cpu()
    observations = backbone.observe(images, batch_size=96)
    assert observations.embeddings.dtype == dtype
    assert torch.allclose(observations.embeddings, expected, atol=1e-5 if dtype == torch.float32 else 0.05)
    stored = backbone.observe(images, batch_size=96, store=tmp_path).batch(slice(None))
    assert torch.equal(stored.embeddings, observations.embeddings.half())


@pytest.mark.skipif(not CAN_FORK, reason="processes are forked, on Linux alone")
def test_processes_decode_the_same_as_threads_and_end(folder: Path) -> None:
    load = partial(load_pixels, Folder(folder), PREPROCESSING)
    chunks = [range(0, 10), [20, 3, 7], range(10, 21)]
    threads = list(by_threads(load, chunks, (SIZE, SIZE), 2, pinned=False))
    processes = list(by_processes(load, chunks, (SIZE, SIZE), 2, pinned=False))
    for (rows, batch), (other_rows, other) in zip(threads, processes, strict=True):
        assert list(rows) == list(other_rows)
        assert torch.equal(batch, other)
    early = ahead(by_processes(load, chunks, (SIZE, SIZE), 2, pinned=False))
    next(early)
    workers = multiprocessing.active_children()
    early.close()
    assert [worker.exitcode for worker in workers] == [0, 0]


@pytest.mark.skipif(not CAN_FORK, reason="processes are forked, on Linux alone")
def test_memory_that_processes_share_is_not_overwritten_before_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pace.observing.pipeline._PIECE", 1)

    def load(row: int) -> Tensor:
        return torch.full((3, 2, 2), row, dtype=torch.uint8)

    batches = by_processes(load, [range(start, start + 20) for start in range(0, 240, 20)], (2, 2), 2, pinned=False)
    found = torch.cat([batch for _, batch in batches])[:, 0, 0, 0]
    assert found.tolist() == list(range(240))
    assert list(by_processes(load, [], (2, 2), 2, pinned=False)) == []  # a store that has everything already


@pytest.mark.skipif(not CAN_FORK, reason="processes are forked, on Linux alone")
def test_what_fails_in_a_process_is_raised_as_it_is(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "images")
    (tmp_path / "images" / "013.png").write_bytes(b"no image")
    load = partial(load_pixels, Folder(tmp_path / "images"), PREPROCESSING)
    batches = by_processes(load, [range(8), range(8, 16)], (SIZE, SIZE), 2, pinned=False)
    next(batches)
    with pytest.raises(UnreadableImageError, match=r"013\.png cannot be read as an image"):
        next(batches)
