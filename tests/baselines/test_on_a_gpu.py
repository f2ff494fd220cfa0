"""What runs on a GPU gives what a CPU gives. Skipped where there is none."""

import numpy as np
import pytest
import torch
from test_every_method import SMALL, pixels, vit

from pace import Backbone, Observations
from pace.baselines import EXPLAINERS, explainer

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
    pytest.mark.filterwarnings("ignore:the bound still rises"),
]


@pytest.mark.parametrize("layer", [1, -1])
@pytest.mark.parametrize("name", EXPLAINERS)
def test_a_gpu_explains_as_a_cpu_does(name, layer):
    model = vit()
    train, test = (Backbone(model, layer, count_cls=True).observe(pixels(seed)) for seed in (0, 1))
    found = []
    for device in ("cpu", "cuda"):
        backbone = Backbone(model.to(device), layer, count_cls=True)
        found.append(explainer(name, **SMALL[name]).fit(backbone, train).explain(test))
    model.cpu()
    scale = np.abs(found[0].theta).max()
    assert np.median(np.abs(found[1].theta - found[0].theta)) <= 1e-2 * scale


@pytest.mark.parametrize("name", EXPLAINERS)
def test_observations_may_lie_on_the_gpu(name):
    model = vit().cuda()
    backbone = Backbone(model, 1, count_cls=True)
    here = [backbone.observe(pixels(seed)) for seed in (0, 1)]
    there = [
        Observations(*(t.cuda() for t in (o.embeddings, o.attention, o.predictions)), grid=o.grid, prefix_tokens=1)
        for o in here
    ]
    first, second = (explainer(name, **SMALL[name]).fit(backbone, train).explain(test) for train, test in (here, there))
    scale = np.abs(first.theta).max()
    assert np.median(np.abs(second.theta - first.theta)) <= 1e-2 * scale
