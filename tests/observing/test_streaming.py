"""Observations that are made when they are asked for are those that extraction would have made."""

import threading
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sklearn.exceptions import ConvergenceWarning
from test_extract import COUNT, Tiny

from pace import PACE
from pace.fitting.checkpoints import likeness
from pace.images import Folder
from pace.observing.extract import observe_pair
from pace.observing.streaming import stream, stream_pair


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    from PIL import Image

    folder = tmp_path_factory.mktemp("images")
    pixels = np.random.default_rng(1).integers(0, 256, (COUNT, 8, 8, 3), np.uint8)
    for number, image in enumerate(pixels):
        Image.fromarray(image).save(folder / f"{number:03d}.png")
    return Folder(folder)


def fit(observations, perturbed, **parameters):
    chosen = {"n_concepts": 3, "negatives": 4, "max_iter": 2, "max_sweeps": 5, "sweep_tol": 0.0, "n_init": 2,
              "head_steps": 3, "dtype": "float64", "device": "cpu"} | parameters  # fmt: skip
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


@pytest.mark.parametrize("parameters", [{"minibatch": 8}, {"minibatch": 8, "refine": 2}, {}])
def test_learning_straight_from_images_is_learning_from_what_was_kept(images, parameters):
    lazy, eager = fit(*stream_pair(Tiny(), images), **parameters), fit(*observe_pair(Tiny(), images), **parameters)
    np.testing.assert_allclose(lazy.means_, eager.means_, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(np.array(lazy.lower_bounds_), np.array(eager.lower_bounds_), rtol=1e-4)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("pace-")]


def test_what_is_kept_is_looked_at_once(images):
    calls = {}
    for keep in (True, False):
        backbone = Tiny()
        fit(*stream_pair(backbone, images, keep=keep), max_iter=4, n_init=1)
        calls[keep] = backbone.calls
    assert calls[True] < calls[False] / 2


def test_a_resumed_fit_of_what_is_kept_ends_with_the_same_bits(images, tmp_path, monkeypatch):
    from pace.fitting.checkpoints import Checkpoint

    real, writes = Checkpoint.write, []

    def crash(self, saved):
        real(self, saved)
        writes.append(1)
        if len(writes) == 4:
            raise RuntimeError("crash")

    def learn(checkpoint):
        model = PACE(3, negatives=4, batch_size=8, max_iter=3, n_init=2, tol=0.0, head_steps=3, device="cpu")
        original, perturbed = stream_pair(Tiny(), images, batch_size=3, keep=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            return model.fit(original, perturbed=perturbed, checkpoint=checkpoint, checkpoint_every=0.0)

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoint, "write", crash)
        with pytest.raises(RuntimeError, match="crash"):
            learn(tmp_path / "fit")
    resumed, whole = learn(tmp_path / "fit"), learn(None)
    assert np.array_equal(resumed.means_, whole.means_)
    assert resumed.lower_bounds_ == whole.lower_bounds_


def test_both_views_of_a_pair_are_decoded_once(images, monkeypatch):
    import pace.observing.streaming

    decodes, real = [], pace.observing.streaming.decoded

    def counted(found, chunks, *arguments):
        decodes.extend(chunks)
        return real(found, chunks, *arguments)

    monkeypatch.setattr(pace.observing.streaming, "decoded", counted)
    original, perturbed = stream_pair(Tiny(), images)
    decodes.clear()
    original.batch(slice(0, 5))
    perturbed.batch(slice(0, 5))
    assert decodes == [[0, 1, 2, 3, 4]]


def test_streams_know_what_they_are_of(images):
    brighter = Tiny()
    brighter.preprocessing = SimpleNamespace(**{**vars(Tiny.preprocessing), "mean": (0.1, 0.1, 0.1)})
    original, perturbed = stream_pair(Tiny(), images)
    names = [
        likeness(original),
        likeness(perturbed),
        likeness(stream(Tiny(1), images)),
        likeness(stream(Tiny(), images, perturb=True, seed=1)),
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
