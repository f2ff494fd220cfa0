import numpy as np
import pytest
import torch

from pace import Observations


def arrays(images=3, tokens=5, d=4, classes=2):
    rng = np.random.default_rng(0)
    predictions = rng.dirichlet(np.ones(classes), images)
    return rng.normal(size=(images, tokens, d)), rng.dirichlet(np.ones(tokens), images), predictions


def test_numpy_and_torch_give_the_same_batches():
    from_numpy = Observations(*arrays(), grid=(2, 2), prefix_tokens=1)
    from_torch = Observations(*map(torch.from_numpy, arrays()), grid=(2, 2), prefix_tokens=1)
    for a, b in zip(from_numpy.batch(slice(1, 3)), from_torch.batch(slice(1, 3)), strict=True):
        assert torch.equal(a, b)


def test_sizes_and_selection_are_carried_along():
    crops = np.array([[0, 0, 1, 1], [0.9, 0.2, 0.4, 0.5], [0.1, 0, 1 + 1e-7, 0.3]], np.float32)
    observations = Observations(*arrays(), grid=(2, 2), prefix_tokens=1, crops=crops)
    assert (len(observations), observations.n_tokens, observations.dim, observations.n_classes) == (3, 5, 4, 2)
    part = observations[[2, 0]]
    assert part.grid == (2, 2)
    assert part.prefix_tokens == 1
    assert np.array_equal(part.embeddings, observations.embeddings[[2, 0]])
    assert np.array_equal(part.crops, crops[[2, 0]])
    assert np.array_equal(observations[1:][1].crops, crops[2:])
    assert len(observations[-1]) == 1
    assert np.array_equal(observations[-1].attention, observations.attention[2:])


def test_a_read_only_memory_map_is_read_without_a_warning(tmp_path, recwarn):
    embeddings, attention, predictions = arrays()
    np.save(tmp_path / "e.npy", embeddings.astype(np.float16))
    mapped = np.load(tmp_path / "e.npy", mmap_mode="r")
    batch = Observations(mapped, attention, predictions).batch(slice(0, 2), dtype=torch.float32)
    assert batch.embeddings.dtype == torch.float32
    assert not recwarn.list


def spoil(field, index, value):
    values = dict(zip(("embeddings", "attention", "predictions"), arrays(), strict=True))
    values[field][index] = value
    return values


@pytest.mark.parametrize(
    ("values", "options", "message"),
    [
        (spoil("embeddings", (1, 2, 3), np.nan), {}, r"^embeddings of image 1 is NaN or infinite$"),
        (spoil("embeddings", (2, 0, 0), np.inf), {}, r"^embeddings of image 2 is NaN"),
        (spoil("attention", (2, 1), -0.1), {}, r"^attention of image 2 is negative$"),
        (spoil("attention", (0, 1), np.nan), {}, r"^attention of image 0 is NaN"),
        (spoil("attention", 1, 0.0), {}, r"^attention of image 1 is zero for every token$"),
        (
            spoil("predictions", 1, [3.0, -1.0]),
            {},
            r"^predictions of image 1 is not a distribution; pass probabilities",
        ),
        (spoil("predictions", (2, 0), np.nan), {}, r"^predictions of image 2 is NaN"),
        ({"embeddings": np.ones((3, 5))}, {}, r"^embeddings: expected shape \(images, tokens, dimensions\)"),
        ({"attention": np.ones((3, 4))}, {}, r"^attention: expected shape \(3, 5\).*found \(3, 4\)$"),
        ({"predictions": np.ones((2, 2)) / 2}, {}, r"^predictions: expected shape \(3, classes\); found \(2, 2\)$"),
        ({}, {"grid": (2, 2)}, r"^grid: 2 x 2 patches and 0 prefix tokens make 4 tokens, but embeddings have 5$"),
        ({}, {"prefix_tokens": 5}, r"^prefix_tokens: expected 0 to 4"),
        ({}, {"crops": np.ones((2, 4))}, r"^crops: expected shape \(3, 4\); found \(2, 4\)$"),
        *(
            (
                {},
                {"crops": [[0, 0, 1, 1], [0, 0, 1, 1], wrong]},
                r"^crops of image 2 is no part of it; pass left, top, r",
            )
            for wrong in ([0, 0, 1, np.nan], [0, 0, 224, 224], [-0.1, 0, 1, 1], [0.5, 0, 0.5, 1], [0, 0.5, 1, 0.5])
        ),
    ],
)
def test_wrong_input_is_refused_in_one_line_that_names_the_image_or_field(values, options, message):
    fields = dict(zip(("embeddings", "attention", "predictions"), arrays(), strict=True)) | values
    with pytest.raises(ValueError, match=message) as caught:
        Observations(**fields, **options)
    assert "\n" not in str(caught.value)
