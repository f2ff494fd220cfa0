"""The two small ViTs that come with the package, and the scripts that train them."""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from pace import Backbone
from pace.backbones import birds_vit, color_vit, load_finetuned
from pace.images import AUGMENT_SEED, Birds, Color, Perturbation, prepare
from pace.images.birds import KIND_NAMES
from pace.observing.extract import observe_pair

BOTH = pytest.mark.parametrize(("vit", "kind"), [(color_vit, Color), (birds_vit, Birds)], ids=["color", "birds"])
LEAST = {Color: (1.0, 0.85), Birds: (0.98, 0.6)}  # of the classes right, and of the predictions that survive


def agreement(model, kind):
    """Share of unseen images whose class is predicted, and whose prediction survives the perturbation."""
    images = kind("test", n_per_class=100, size=112, seed=1)
    seen, perturbed = observe_pair(Backbone(model), images, progress=False)
    predicted = seen.predictions.argmax(1)
    right = (predicted == torch.from_numpy(images.labels)).float().mean()
    return float(right), float((predicted == perturbed.predictions.argmax(1)).float().mean())


def script_of(name):
    file = Path(__file__).parents[2] / "scripts" / f"train_{name}.py"
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where its classes look for themselves
    spec.loader.exec_module(module)
    return module


@BOTH
def test_it_tells_the_classes_apart_and_its_predictions_mostly_survive_the_perturbation(vit, kind):
    right, survived = agreement(vit.load_model(), kind)
    assert right >= LEAST[kind][0]
    assert survived > LEAST[kind][1]


@BOTH
def test_it_reads_whole_images(vit, kind):
    image = kind("test", n_per_class=5, size=112)[0]
    prepared = prepare(image, Backbone(vit.load_model()).preprocessing)
    assert torch.equal((prepared * 255).round().to(torch.uint8), image)


@BOTH
def test_class_names_are_those_of_the_images_and_the_file_is_small(vit, kind):
    assert list(vit.load().class_names) == kind("test", n_per_class=5).class_names
    assert Path(vit.__file__).with_suffix(".safetensors").stat().st_size < 1_000_000


def test_patches_of_birds_know_their_part():
    images = Birds("train", n_per_class=10, seed=1)
    seen, parts = (
        Backbone(birds_vit.load_model(), layer=birds_vit.LAYER).observe(images),
        np.stack([images.patch_parts(i, least=2 / 3).ravel() for i in range(len(images))]),
    )
    patches, known = np.asarray(seen.embeddings), parts >= 0
    half = len(images) // 2 * 2
    learn, ask = (patches[k:half:2][known[k:half:2]] for k in (0, 1))
    first, second = (parts[k:half:2][known[k:half:2]] for k in (0, 1))
    centres = np.stack([learn[first == part].mean(0) for part in range(8)])
    nearest = np.square(ask[:, None] - centres).sum(2).argmin(1)
    assert np.mean([(nearest == second)[second == part].mean() for part in range(8)]) > 0.9


def test_the_script_for_color_makes_an_equivalent_model(tmp_path):
    trained = script_of("color_vit").train(tmp_path / "vit.safetensors", epochs=4, n_per_class=150, batch_size=16)
    ours, theirs = (
        {name: p.shape for name, p in model.state_dict().items()} for model in (trained.model, color_vit.load_model())
    )
    assert ours == theirs
    right, survived = agreement(trained.model, Color)
    assert right >= 0.95
    assert survived > 0.75


def test_the_script_for_birds_writes_such_a_file_with_or_without_the_shortcut(tmp_path):
    path = tmp_path / "vit.safetensors"
    accuracy = script_of("birds_vit").train(path, steps=2, n_per_class=5, shortcut=True)
    found = load_finetuned(birds_vit.new_model(), path)
    assert found.accuracy == pytest.approx(accuracy)
    assert list(found.class_names) == Birds("test", n_per_class=5).class_names
    assert path.stat().st_size < 1_000_000
    models = birds_vit.new_model(), found.model
    start, learned = (torch.cat([p.flatten() for p in model.parameters()]) for model in models)
    assert (start - learned).abs().max() > 1e-3


def test_what_the_transformer_is_told_of_its_patches_is_what_its_views_show():
    script, birds = script_of("birds_vit"), Birds("test", n_per_class=10)
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
