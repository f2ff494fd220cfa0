import importlib.util
from pathlib import Path

import torch

from pace import Backbone
from pace.backbones.color_vit import load, load_model
from pace.images import Color, prepare
from pace.observing.extract import observe_pair

SCRIPT = Path(__file__).parents[2] / "scripts" / "train_color_vit.py"


def agreement(model, n_per_class=100):
    """Share of unseen images whose class is predicted, and whose prediction survives the perturbation."""
    images = Color("test", n_per_class=n_per_class, size=112, seed=1)
    seen, perturbed = observe_pair(Backbone(model), images, progress=False)
    predicted = seen.predictions.argmax(1)
    right = (predicted == torch.from_numpy(images.labels)).float().mean()
    return float(right), float((predicted == perturbed.predictions.argmax(1)).float().mean())


def test_the_shipped_model_tells_the_classes_apart_and_mostly_survives_the_perturbation():
    right, survived = agreement(load_model())
    assert right == 1
    assert survived > 0.85


def test_the_shipped_model_reads_whole_images():
    image = Color("test", n_per_class=5, size=112)[0]
    prepared = prepare(image, Backbone(load_model()).preprocessing)
    assert torch.equal((prepared * 255).round().to(torch.uint8), image)


def test_class_names_are_those_of_color():
    assert list(load().class_names) == Color("test", n_per_class=5).class_names


def test_the_training_script_makes_an_equivalent_model(tmp_path):
    spec = importlib.util.spec_from_file_location("train_color_vit", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    trained = script.train(tmp_path / "vit.safetensors", epochs=4, n_per_class=150, batch_size=16)
    shipped = load_model()
    assert {name: p.shape for name, p in trained.model.state_dict().items()} == {
        name: p.shape for name, p in shipped.state_dict().items()
    }
    right, survived = agreement(trained.model)
    assert right >= 0.95
    assert survived > 0.75
