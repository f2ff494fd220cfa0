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
def test_a_gpu_explains_as_a_cpu_does_wherever_the_observations_are(name, layer):
    model = vit()
    here = [Backbone(model, layer, count_cls=True).observe(pixels(seed)) for seed in (0, 1)]
    there = [
        Observations(*(t.cuda() for t in (o.embeddings, o.attention, o.predictions)), grid=o.grid, prefix_tokens=1)
        for o in here
    ]
    thetas = []
    for device, (train, test) in (("cpu", here), ("cuda", here), ("cuda", there)):
        backbone = Backbone(model.to(device), layer, count_cls=True)
        thetas.append(explainer(name, **SMALL[name]).fit(backbone, train).explain(test).theta)
    for theta in thetas[1:]:
        assert np.median(np.abs(theta - thetas[0])) <= 1e-2 * np.abs(thetas[0]).max()
