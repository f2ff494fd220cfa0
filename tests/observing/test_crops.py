"""What part of an image a perturbed view shows travels with its observations."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny_backbone import COUNT, SIZE, Broken, Tiny
from torch.utils.data import DataLoader

from pace.baselines.head import SplitObservations
from pace.images import Folder, Perturbation
from pace.observing import ObservationStore, observe, observe_pair, stream, stream_pair


class Colors(Tiny):
    """Its embeddings are the colours of 4 x 4 patches."""

    preprocessing = SimpleNamespace(**{**vars(Tiny.preprocessing), "mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)})

    def __init__(self):
        super().__init__()
        self.weight = torch.eye(3)


def test_crops_are_the_same_in_memory_in_a_store_and_in_a_stream(folder, pixels, tmp_path):
    expected = Perturbation(seed=3).crops(range(COUNT), (SIZE, SIZE))
    images = Folder(folder)
    with pytest.raises(RuntimeError):
        observe_pair(Broken(6, RuntimeError()), images, seed=3, batch_size=4, store=tmp_path)
    resumed = observe_pair(Tiny(), images, seed=3, batch_size=4, store=tmp_path)
    loader = DataLoader(pixels, batch_sampler=[range(0, 8), range(8, COUNT)])  # of unknown length
    for original, perturbed in (
        observe_pair(Tiny(), images, seed=3, batch_size=4),
        observe_pair(Tiny(), loader, seed=3),
        resumed,
        [ObservationStore.open(tmp_path / view).observations() for view in ("original", "perturbed")],
        stream_pair(Tiny(), images, seed=3, batch_size=4),
    ):
        assert original.crops is None
        assert original[2:4].crops is None
        assert perturbed.crops.shape == (COUNT, 4)
        assert perturbed.crops.dtype == np.float32
        np.testing.assert_array_equal(np.asarray(perturbed.crops), expected)
        np.testing.assert_array_equal(np.asarray(perturbed[[7, 2]].crops), expected[[7, 2]])
        np.testing.assert_array_equal(np.asarray(perturbed[5].crops), expected[5:6])
        np.testing.assert_array_equal(np.asarray(perturbed.crops[3:9]), expected[3:9])
    np.testing.assert_array_equal(SplitObservations.of(resumed[1], 0)[4:].crops, expected[4:])
    assert stream(Tiny(), images).crops is None


def test_a_stream_tells_its_crops_without_the_images_and_the_model(folder):
    backbone = Tiny()
    _, perturbed = stream_pair(backbone, Folder(folder))
    calls = backbone.calls
    assert len(np.asarray(perturbed.crops)) == COUNT
    assert backbone.calls == calls


def test_a_perturbation_of_ones_own_gives_the_crops_it_knows(pixels):
    def mirror(batch, indices):
        return batch.flip(-1)

    assert observe(Tiny(), pixels, perturb=mirror).crops is None
    mirror.crops = lambda indices, size: torch.tensor([[1, 0, 0, 1]]).expand(len(indices), 4)
    assert observe(Tiny(), pixels, perturb=mirror).crops.tolist() == [[1, 0, 0, 1]] * COUNT
    mirror.crops = lambda indices, size: np.array([[0, 0, *size]] * len(indices))
    with pytest.raises(ValueError, match="in the batch from image 0 on: crops of image 0 is no part of it"):
        observe(Tiny(), pixels, perturb=mirror)


@pytest.mark.parametrize("stored", [False, True])
def test_crops_find_a_patch_again(stored, tmp_path):
    """Grey pictures with one red patch: where the crops put its middle, the view is redder than anywhere else."""
    height, width, rng = 96, 144, np.random.default_rng(0)
    places = np.stack([rng.integers(24, size=60), rng.integers(36, size=60)], 1)  # of the red patches: row, column
    images = torch.full((60, 3, height, width), 0.5)
    for image, (row, column) in zip(images, 4 * places, strict=True):
        image[:, row : row + 4, column : column + 4] = torch.tensor([1.0, 0.0, 0.0])[:, None, None]
    perturb = Perturbation(seed=1, stages=("flip", "crop"))
    original, perturbed = observe_pair(Colors(), images, perturb=perturb, store=tmp_path if stored else None)

    def redness(observations):
        embeddings = np.asarray(observations.embeddings)[:, 1:]
        return (embeddings[..., 0] - embeddings[..., 1]).reshape(-1, 24, 36)

    assert np.array_equal([np.unravel_index(image.argmax(), (24, 36)) for image in redness(original)], places)
    y, x = ((places + 0.5) / (24, 36)).T
    left, top, right, bottom = np.asarray(perturbed.crops).T
    u, v = (x - left) / (right - left), (y - top) / (bottom - top)
    shown = (u > 0) & (u < 1) & (v > 0) & (v < 1)
    assert 10 < shown.sum() < 50
    assert 0 < (left > right)[shown].mean() < 1
    for image in np.flatnonzero(shown):
        red = redness(perturbed[[image]])[0]
        assert red[int(24 * v[image]), int(36 * u[image])] > max(0.3, red.max() - 0.05)
