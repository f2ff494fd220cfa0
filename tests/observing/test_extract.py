"""Extraction: the same observations from every kind of source, in order, resumable."""

import shutil
import weakref

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_backbone import COUNT, PREPROCESSING, SIZE, Broken, Changed, Tiny
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from pace.images import Folder, Perturbation, decode, normalize, prepare
from pace.observing import ObservationStore, observe, observe_pair


@pytest.fixture(scope="module")
def expected(pixels):
    return Tiny()(normalize(pixels / 255, PREPROCESSING))


@pytest.fixture
def damaged(folder, tmp_path):
    """The folder with one file that is no image."""
    shutil.copytree(folder, tmp_path / "images")
    (tmp_path / "images" / "013.png").write_bytes(b"no image")
    return tmp_path / "images"


def same(observations, batch, tolerance=1e-6):
    for part, other in zip(observations.batch(slice(None), dtype=torch.float32), batch, strict=True):
        torch.testing.assert_close(part, other.float(), atol=tolerance, rtol=0)


def identical(one, other):
    return all(torch.equal(*parts) for parts in zip(one.batch(slice(None)), other.batch(slice(None)), strict=True))


class Endless(IterableDataset):
    def __init__(self, pixels):
        self.pixels = pixels

    def __iter__(self):
        return iter(self.pixels)


@pytest.mark.parametrize("kind", ["floats", "uint8", "loader", "pairs", "unknown length", "path", "set"])
def test_every_kind_of_source_gives_the_same_observations(kind, pixels, folder, expected, tmp_path):
    images = {
        "floats": lambda: pixels / 255,
        "uint8": lambda: pixels,
        "loader": lambda: DataLoader(pixels / 255, batch_size=4),
        "pairs": lambda: DataLoader(TensorDataset(pixels, torch.arange(COUNT)), batch_size=5),
        "unknown length": lambda: DataLoader(Endless(pixels), batch_size=6),
        "path": lambda: str(folder),
        "set": lambda: Folder(folder),
    }[kind]
    observations = observe(Tiny(), images(), batch_size=4)
    same(observations, expected)
    assert (observations.grid, observations.prefix_tokens) == ((2, 2), 1)
    same(observe(Tiny(), images(), batch_size=4, store=tmp_path), expected, 2e-3)
    assert ObservationStore.open(tmp_path).complete


def test_images_of_other_sizes_are_prepared_for_the_model_and_tensors_keep_theirs(tmp_path):
    wide = np.random.default_rng(0).integers(0, 256, (10, 31, 3), dtype=np.uint8)
    Image.fromarray(wide).save(tmp_path / "wide.png")
    expected = prepare(torch.from_numpy(wide).permute(2, 0, 1), PREPROCESSING)[None]
    same(observe(Tiny(), tmp_path), Tiny()(normalize(expected, PREPROCESSING)))
    assert observe(Tiny(), torch.rand(3, 3, 8, 16)).grid == (2, 4)


@pytest.mark.parametrize("workers", [1, 7])
def test_order_does_not_depend_on_workers_or_batch_size(folder, expected, workers):
    for batch_size in (1, 5, 100):
        same(observe(Tiny(), folder, batch_size=batch_size, workers=workers), expected)


@pytest.fixture
def reads(monkeypatch):
    """The numbers of the images that are decoded."""
    numbers = []
    monkeypatch.setattr("pace.images.imageset.decode", lambda path: (numbers.append(int(path.stem)), decode(path))[1])
    return numbers


@pytest.mark.parametrize("stored", [False, True])
def test_a_pair_is_the_images_and_their_perturbation_decoded_once(pixels, folder, expected, tmp_path, reads, stored):
    store, tolerance = (tmp_path / "pair", 2e-3) if stored else (None, 1e-5)
    original, perturbed = observe_pair(Tiny(), folder, seed=3, batch_size=4, store=store)
    assert sorted(reads) == list(range(COUNT))
    same(original, expected, tolerance)
    moved = Tiny()(normalize(Perturbation(seed=3)(pixels / 255, torch.arange(COUNT)), PREPROCESSING))
    same(perturbed, moved, tolerance)
    same(observe(Tiny(), pixels, perturb=Perturbation(seed=3), batch_size=50), moved, 1e-5)


def test_tokens_keep_their_type_in_memory_and_their_values_in_a_store(pixels, tmp_path):
    def in_bfloat16(_, batch):
        return batch._replace(embeddings=batch.embeddings.bfloat16())

    observations = observe(Changed(in_bfloat16), pixels, batch_size=4)
    assert observations.embeddings.dtype == torch.bfloat16
    stored = observe(Changed(in_bfloat16), pixels, batch_size=4, store=tmp_path).batch(slice(None))
    assert torch.equal(stored.embeddings, observations.embeddings.half())


def test_predictions_may_be_missing_and_inference_mode_changes_nothing(pixels, expected):
    headless = Changed(lambda _, batch: batch._replace(predictions=None))
    assert observe(headless, pixels, batch_size=2).predictions is None
    with torch.inference_mode():
        observations = observe(Tiny(), pixels, batch_size=4)
    same(observations, expected)
    assert not observations.embeddings.is_inference()


@pytest.mark.parametrize("stored", [False, True])
def test_a_wrong_value_is_named_and_what_came_before_is_kept(pixels, tmp_path, stored):
    def spoil(call, batch):
        if call == 1:
            batch.embeddings[1, 2, 3] = torch.nan
        return batch

    with pytest.raises(ValueError, match="in the batch from image 4 on: embeddings of image 1 is NaN or infinite"):
        observe(Changed(spoil), pixels, batch_size=4, store=tmp_path / "store" if stored else None)
    if stored:
        assert ObservationStore.open(tmp_path / "store").shards[0].stop == 4


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("out of memory")])
def test_an_interrupted_extraction_keeps_what_was_computed_and_resumes(folder, tmp_path, error):
    whole = observe(Tiny(), folder, batch_size=4, store=tmp_path / "whole")
    with pytest.raises(type(error)):
        observe(Broken(3, error), folder, batch_size=4, store=tmp_path / "parts")
    assert len(ObservationStore.open(tmp_path / "parts")) == 12
    for calls in (3, 0):  # 9 images were left, then none
        backbone = Tiny()
        assert identical(observe(backbone, folder, batch_size=4, store=tmp_path / "parts"), whole)
        assert backbone.calls == calls


def test_a_loader_resumes_where_it_was(pixels, expected, tmp_path):
    with pytest.raises(RuntimeError):
        observe(Broken(2, RuntimeError()), DataLoader(pixels, batch_size=4), store=tmp_path)
    with pytest.raises(ValueError, match="images was loader of 21 images, first"):
        observe(Tiny(), DataLoader(pixels, batch_size=5), store=tmp_path)  # its first batch is another
    backbone = Tiny()
    same(observe(backbone, DataLoader(pixels, batch_size=4), store=tmp_path), expected, 2e-3)
    assert backbone.calls == 4


def test_a_pair_whose_halves_stopped_at_different_places_is_completed(pixels, tmp_path):
    observe(Tiny(), pixels, batch_size=4, store=tmp_path / "original")
    with pytest.raises(RuntimeError):
        observe(Broken(2, RuntimeError()), pixels, perturb=True, batch_size=4, store=tmp_path / "perturbed")
    backbone = Tiny()
    assert [len(view) for view in observe_pair(backbone, pixels, batch_size=4, store=tmp_path)] == [COUNT, COUNT]
    assert backbone.calls == 4  # 13 perturbed images


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"backbone": Tiny(seed=1)}, "model was tiny-0, now tiny-1"),
        ({"perturb": True}, "perturbation was none, now "),
        ({"images": torch.zeros(COUNT, 3, SIZE, SIZE)}, "images was 21 images, .*, now 21 images, "),
    ],
)
def test_a_store_of_something_else_is_refused(pixels, tmp_path, change, message):
    observe(Tiny(), pixels, store=tmp_path)
    with pytest.raises(ValueError, match=message):
        observe(**{"backbone": Tiny(), "images": pixels, "store": tmp_path, **change})


def test_memory_does_not_grow_with_the_number_of_images(tmp_path):
    alive, results = [], []

    def watch(_, batch):
        results.append(weakref.ref(batch.embeddings))
        alive.append(sum(result() is not None for result in results))
        return batch

    observe(Changed(watch), torch.rand(300, 3, SIZE, SIZE), batch_size=3, store=tmp_path)
    assert len(alive) == 100
    assert max(alive) <= 6


def test_decoding_stays_a_few_batches_ahead(folder, reads):
    with pytest.raises(RuntimeError):
        observe(Broken(0, RuntimeError()), folder, batch_size=1, workers=2)
    assert len(reads) < 10


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"images": torch.randn(2, 3, 8, 8)}, r"expected uint8 or floats in \[0, 1\]; found -.*before normalisation"),
        ({"images": torch.rand(1, 4, 8, 8)}, r"expected shape \(images, 3, height, width\); found \(1, 4, 8, 8\)"),
        ({"images": torch.zeros(0, 3, 8, 8)}, "expected shape"),
        ({"images": torch.zeros(2, 3, 8, 8, dtype=torch.int64)}, "expected uint8 or floats"),
        ({"images": [1, 2]}, r"image 0: expected a tensor \(3, height, width\) or an array .* found int"),
        ({"images": 3}, "expected a file, a folder, a dataset's name, an image, .* or a DataLoader; found int"),
        ({"images": DataLoader(torch.zeros(4, 3, 8, 8), shuffle=True), "perturb": True}, "this DataLoader shuffles"),
        ({"images": DataLoader([{"image": 1}])}, "expected a DataLoader of tensors, or of pairs.*found dict"),
        (
            {"images": DataLoader([torch.rand(2, 3, 8, 8), torch.rand(2, 3, 8, 16)], batch_size=None)},
            r"images from 2 on are \(8, 16\) pixels, the first are \(8, 8\)",
        ),
        ({"batch_size": 0}, "batch_size: expected 1 or more; found 0"),
        ({"perturb": lambda batch, indices: batch, "store": "store"}, r"needs a method fingerprint\(\)"),
    ],
)
def test_wrong_input_is_explained(change, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message):
        observe(Tiny(), **{"images": torch.rand(2, 3, SIZE, SIZE), **change})
    assert not (tmp_path / "store").exists()


def test_wrong_options_for_files_are_explained(folder):
    with pytest.raises(ValueError, match='on_error: expected "raise" or "skip"; found \'ignore\''):
        observe(Tiny(), folder, on_error="ignore")


def test_a_damaged_image_is_named_and_what_came_before_is_kept(damaged, tmp_path):
    with pytest.raises(ValueError, match=r"013\.png cannot be read as an image"):
        observe(Tiny(), damaged, batch_size=4, store=tmp_path / "store")
    assert len(ObservationStore.open(tmp_path / "store")) == 12


def test_images_that_cannot_be_read_are_left_out_when_asked(pixels, damaged):
    with pytest.warns(UserWarning, match=r"1 of 21 images cannot be read and are left out: 013\.png"):
        observations, perturbed = observe_pair(Tiny(), damaged, batch_size=4, on_error="skip")
    left = torch.cat([pixels[:13], pixels[14:]])
    same(observations, Tiny()(normalize(left / 255, PREPROCESSING)))
    assert len(perturbed) == COUNT - 1


@pytest.mark.parametrize(("progress", "shown"), [(True, True), (None, False)])
def test_progress_is_shown_when_asked_for(pixels, progress, shown, capfd):
    observe(Tiny(), pixels, progress=progress)
    captured = capfd.readouterr()
    assert ("21/21" in captured.err) == shown
    assert captured.out == ""


def vit(**settings):
    vision_transformer = pytest.importorskip("timm.models.vision_transformer")
    torch.manual_seed(0)
    return vision_transformer.VisionTransformer(depth=2, num_heads=2, num_classes=3, **settings)


def test_a_real_backbone_is_observed_from_a_folder_into_a_store(folder, tmp_path):
    from pace.backbones import Backbone

    model = vit(img_size=16, patch_size=8, embed_dim=12).train()
    backbone = Backbone(model)
    in_memory = backbone.observe(folder, batch_size=8)
    stored = backbone.observe(folder, batch_size=8, store=tmp_path)
    assert repr(in_memory) == repr(stored) == "Observations(21 images, 4 tokens (2 x 2), d = 12, 3 classes)"
    same(stored, in_memory.batch(slice(None)), 2e-3)
    assert model.training
    with pytest.raises(ValueError, match="block was 1, now 0"):
        Backbone(model, layer=0).observe(folder, store=tmp_path)
    with pytest.raises(ValueError, match="prefix tokens was 0, now 1"):
        Backbone(model, count_cls=True).observe(folder, store=tmp_path)
    with torch.no_grad():
        model.head.bias += 1
    with pytest.raises(ValueError, match="holds other observations: model was"):
        backbone.observe(folder, store=tmp_path)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@pytest.mark.parametrize(
    ("dtype", "on_device"), [(torch.float32, False), (torch.bfloat16, False), (torch.float32, True)]
)
def test_a_gpu_gives_what_its_model_gives(dtype, on_device, tmp_path):
    from pace.backbones import Backbone

    backbone = Backbone(vit(img_size=32, patch_size=4, embed_dim=96).eval().to("cuda", dtype))
    images = torch.randint(0, 256, (1000, 3, 32, 32), dtype=torch.uint8)
    images = images.cuda() if on_device else images
    parts = [normalize(part.cuda().float() / 255, backbone.preprocessing) for part in images.split(96)]
    expected = torch.cat([backbone(part).embeddings for part in parts]).cpu()
    observations = backbone.observe(images, batch_size=96)
    assert observations.embeddings.dtype == dtype
    assert torch.allclose(observations.embeddings, expected, atol=1e-5 if dtype == torch.float32 else 0.05)
    stored = backbone.observe(images, batch_size=96, store=tmp_path).batch(slice(None))
    assert torch.equal(stored.embeddings, observations.embeddings.half())
