"""What observations were computed with travels along, and a fit explains no others."""

import warnings

import numpy as np
import pytest
import torch
from tiny_backbone import SIZE, Tiny

from pace import PACE
from pace.images import Color
from pace.observations import Observations
from pace.observing import ObservationStore, observe, stream

PIXELS = torch.rand(24, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(0))


def changed(**values):
    backbone = Tiny()
    for name, value in values.items():
        setattr(backbone, name, value)
    return observe(backbone, PIXELS)


@pytest.fixture(scope="module")
def fitted(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "concepts.safetensors"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        PACE(2, covariance="diag", max_iter=2, n_init=1, device="cpu").fit(observe(Tiny(), PIXELS)).save(path)
    return PACE.load(path)


def test_the_origin_travels_through_slices_stores_and_streams(tmp_path):
    expected = {"block": "0", "attention block": "0", "preprocessing": str(Tiny.preprocessing), "model": "tiny-0"}
    assert observe(Tiny(), PIXELS)[3:5].origin == expected
    observe(Tiny(), PIXELS, store=tmp_path)
    assert ObservationStore.open(tmp_path).observations().origin == expected
    streamed = stream(Tiny(), Color(n_per_class=2, size=8))
    assert streamed.origin == streamed[:2].origin == expected


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"layer": 5}, "of block 5, the concepts are of 0; observe with the backbone of the fit"),
        ({"attention_layer": 7}, "of attention block 7, the concepts are of 0"),
        ({"fingerprint": lambda: "tiny-1"}, "of another model or head than the concepts"),
    ],
)
def test_a_fit_explains_no_observations_of_another_origin(fitted, other, message):
    with pytest.raises(ValueError, match=message):
        fitted.explain(changed(**other))
    with pytest.raises(ValueError, match=message):
        PACE(2).fit(observe(Tiny(), PIXELS), perturbed=changed(**other))


def test_the_same_origin_and_arrays_of_unknown_origin_are_explained(fitted):
    same = observe(Tiny(), PIXELS)
    unknown = Observations(same.embeddings, same.attention, grid=(2, 2), prefix_tokens=1)
    np.testing.assert_array_equal(fitted.explain(same).theta, fitted.explain(unknown).theta)
