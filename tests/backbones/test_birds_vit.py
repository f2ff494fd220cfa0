import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from pace import Backbone
from pace.backbones.birds_vit import load, load_model, new_model
from pace.images import Birds, prepare
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


def test_the_shipped_model_reads_whole_images():
    image = Birds("test", n_per_class=5)[0]
    prepared = prepare(image, Backbone(load_model()).preprocessing)
    assert torch.equal((prepared * 255).round().to(torch.uint8), image)


def test_class_names_are_those_of_birds_and_the_file_is_small():
    assert list(load().class_names) == Birds("test", n_per_class=5).class_names
    assert FILE.stat().st_size < 1_000_000


def test_the_training_script_writes_such_a_file_with_or_without_the_shortcut(tmp_path, script):
    path = tmp_path / "vit.safetensors"
    trained = script.train(path, epochs=1, n_per_class=5, shortcut=True)
    assert {name: p.shape for name, p in trained.model.state_dict().items()} == {
        name: p.shape for name, p in new_model().state_dict().items()
    }
    assert path.stat().st_size < 1_000_000
    again = script.train(path, epochs=1, n_per_class=5, shortcut=True)  # finished, so it is only read
    difference = torch.cat(
        [
            (ours - theirs).flatten()
            for ours, theirs in zip(again.model.parameters(), trained.model.parameters(), strict=True)
        ]
    )
    assert difference.abs().max() < 1e-3
    with pytest.raises(ValueError, match="another run"):
        script.train(path, epochs=1, n_per_class=5)
