import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from pace import Backbone
from pace.backbones import load_finetuned
from pace.backbones.birds_vit import LAYER, load, load_model, new_model
from pace.images import AUGMENT_SEED, Birds, Perturbation, prepare
from pace.images.birds import KIND_NAMES
from pace.observing.extract import observe_pair

FILE = Path(__file__).parents[2] / "src" / "pace" / "backbones" / "birds_vit.safetensors"
SCRIPT = Path(__file__).parents[2] / "scripts" / "train_birds_vit.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("train_birds_vit", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where its dataclass looks for itself
    spec.loader.exec_module(module)
    return module


def test_the_shipped_model_tells_the_classes_apart_and_mostly_survives_the_perturbation():
    images = Birds("test", n_per_class=100, seed=1)
    seen, perturbed = observe_pair(Backbone(load_model()), images, progress=False)
    predicted = seen.predictions.argmax(1)
    assert (predicted == torch.from_numpy(images.labels)).float().mean() >= 0.98
    assert (predicted == perturbed.predictions.argmax(1)).float().mean() > 0.6


def test_its_patches_know_their_part():
    images = Birds("train", n_per_class=10, seed=1)
    seen, parts = (
        Backbone(load_model(), layer=LAYER).observe(images),
        np.stack([images.patch_parts(i, least=2 / 3).ravel() for i in range(len(images))]),
    )
    patches, known = np.asarray(seen.embeddings), parts >= 0
    half = len(images) // 2 * 2
    learn, ask = (patches[k:half:2][known[k:half:2]] for k in (0, 1))
    first, second = (parts[k:half:2][known[k:half:2]] for k in (0, 1))
    centres = np.stack([learn[first == part].mean(0) for part in range(8)])
    nearest = np.square(ask[:, None] - centres).sum(2).argmin(1)
    assert np.mean([(nearest == second)[second == part].mean() for part in range(8)]) > 0.9


def test_the_shipped_model_reads_whole_images():
    image = Birds("test", n_per_class=5)[0]
    prepared = prepare(image, Backbone(load_model()).preprocessing)
    assert torch.equal((prepared * 255).round().to(torch.uint8), image)


def test_class_names_are_those_of_birds_and_the_file_is_small():
    assert list(load().class_names) == Birds("test", n_per_class=5).class_names
    assert FILE.stat().st_size < 1_000_000


def test_the_training_script_writes_such_a_file_with_or_without_the_shortcut(tmp_path, script):
    path = tmp_path / "vit.safetensors"
    accuracy = script.train(path, steps=2, n_per_class=5, shortcut=True)
    found = load_finetuned(new_model(), path)
    assert found.accuracy == pytest.approx(accuracy)
    assert list(found.class_names) == Birds("test", n_per_class=5).class_names
    assert path.stat().st_size < 1_000_000
    start, learned = (torch.cat([p.flatten() for p in model.parameters()]) for model in (new_model(), found.model))
    assert (start - learned).abs().max() > 1e-3


def test_what_the_transformer_is_told_of_its_patches_is_what_its_views_show(script):
    birds = Birds("test", n_per_class=10)
    pixels = torch.stack([birds[i] for i in range(8)]).float() / 255
    kinds = torch.from_numpy(np.stack([birds.pixel_kinds(i) for i in range(8)]))
    strong = np.arange(8) < 4
    changed, shown = script.views(pixels, kinds, np.arange(8), strong, seed=0)
    truth, crops = script.truth_of(shown), Perturbation(AUGMENT_SEED).crops(np.arange(8), (112, 112))
    same = np.stack([birds.patch_parts(i, box=tuple(112 * crops[i])) for i in range(4)])
    assert (truth.part[:4].numpy() == same.reshape(4, -1)).mean() > 0.97  # but for patches of two parts, half and half
    for i in range(8):
        own = {f"{part}: {kind}" for part, kind in birds.kinds(i).items()}
        there = truth.pure[i].any(0)
        assert {KIND_NAMES[kind] for kind in truth.kinds[i, there]} <= own | {"background: leaf in front"}
    assert not torch.equal(changed, pixels)
