"""Observations made on demand are those that extraction would have made."""

import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sklearn.exceptions import ConvergenceWarning
from tiny_backbone import COUNT, Tiny

from pace import PACE
from pace.fitting.checkpoints import likeness
from pace.images import Folder, decode
from pace.observing import observe_pair, stream, stream_pair


@pytest.fixture(scope="module")
def images(folder):
    return Folder(folder)


def fit(observations, perturbed, **parameters):
    chosen = {"n_concepts": 3, "max_iter": 2, "n_init": 1, "dtype": "float64", "device": "cpu", **parameters}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return PACE(**chosen).fit(observations, perturbed=perturbed)


@pytest.mark.parametrize("keep", [True, False])
def test_a_stream_is_what_extraction_would_have_kept(images, keep):
    for lazy, eager in zip(
        stream_pair(Tiny(), images, batch_size=4, keep=keep), observe_pair(Tiny(), images), strict=True
    ):
        assert (len(lazy), lazy.shape, lazy.grid, lazy.prefix_tokens) == (COUNT, eager.shape, eager.grid, 1)
        assert lazy.n_classes == eager.n_classes
        for chosen in (slice(3, 9), np.array([7, 2, 20]), slice(3, 9)):
            for found, expected in zip(lazy.batch(chosen), eager.batch(chosen), strict=True):
                torch.testing.assert_close(found, expected)
        np.testing.assert_allclose(lazy[[4, 1]].embeddings, eager[[4, 1]].embeddings, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(lazy.attention[2:5], eager.attention[2:5], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("parameters", [{"minibatch": 8}, {}])
def test_learning_straight_from_images_is_learning_from_what_was_kept(images, parameters):
    lazy, eager = fit(*stream_pair(Tiny(), images), **parameters), fit(*observe_pair(Tiny(), images), **parameters)
    np.testing.assert_allclose(lazy.means_, eager.means_, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(np.array(lazy.lower_bounds_), np.array(eager.lower_bounds_), rtol=1e-4)


def test_what_was_kept_can_be_forgotten(images):
    backbone = Tiny()
    observations = stream(backbone, images, keep=True)
    for expected in (2, 2):  # one call tells the shapes
        observations.batch(slice(0, 5))
        assert backbone.calls == expected
    observations.forget()
    observations.batch(slice(0, 5))
    assert backbone.calls == 3


def test_both_views_of_a_pair_are_decoded_once(images, monkeypatch):
    original, perturbed = stream_pair(Tiny(), images)
    reads = []
    monkeypatch.setattr("pace.images.imageset.decode", lambda path: (reads.append(int(path.stem)), decode(path))[1])
    original.batch(slice(0, 5))
    perturbed.batch(slice(0, 5))
    assert sorted(reads) == [0, 1, 2, 3, 4]


def test_streams_know_what_they_are_of(images):
    brighter = Tiny()
    brighter.preprocessing = SimpleNamespace(**{**vars(Tiny.preprocessing), "mean": (0.1, 0.1, 0.1)})
    original, perturbed = stream_pair(Tiny(), images)
    names = [
        likeness(original),
        likeness(perturbed),
        likeness(stream(Tiny(1), images)),
        likeness(stream_pair(Tiny(), images, seed=1)[1]),
        likeness(stream(Tiny(), images.subset(range(9)))),
        likeness(stream(brighter, images)),
    ]
    assert len(set(names)) == len(names)
    assert likeness(stream(Tiny(), images)) == names[0]


def test_a_model_that_gives_nonsense_is_noticed(images):
    backbone = Tiny()
    observations = stream(backbone, images)
    backbone.weight[0, 0] = torch.nan
    with pytest.raises(ValueError, match="embeddings of image 0 is NaN or infinite"):
        observations.batch(slice(4, 6))
    with pytest.raises(ValueError, match="batch_size: expected 1 or more"):
        stream(Tiny(), images, batch_size=0)
    with pytest.raises(ValueError, match="perturb: expected True or a perturbation"):
        stream_pair(Tiny(), images, perturb=False)
