"""Color from images to concepts: its four colours and black are found."""

import pytest

from pace import PACE, Backbone
from pace.images import Color, Perturbation
from pace.metrics import colour_accuracy, effective_concepts, faithfulness
from pace.metrics.ground_truth import known_truth


def test_each_colour_and_black_is_a_concept_of_its_own():
    pytest.importorskip("timm")
    from pace.backbones.color_vit import LAYER, SIZE, load_model
    from pace.observing.extract import observe_pair

    backbone = Backbone(load_model(), layer=LAYER)
    train, test = (Color(split, n_per_class=50, size=SIZE) for split in ("train", "test"))
    learned, perturbed = observe_pair(backbone, train, perturb=Perturbation(1), progress=False)
    seen = backbone.observe(test, progress=False)
    model = PACE(5, progress=False).fit(learned, perturbed=perturbed)
    found, truth = model.explain(seen), known_truth(test, backbone.preprocessing, seen.grid)
    assert colour_accuracy(found.phi, **truth) > 0.9  # a colour without a concept of its own costs more
    assert effective_concepts(found.theta) > 4
    theta = model.transform(learned)
    assert faithfulness(theta, learned.predictions, found.theta, seen.predictions) == 1
