"""Images decoded ahead: the same from threads and processes, in order, and errors as they are."""

import multiprocessing
import sys
from types import SimpleNamespace

import pytest
import torch
from tiny_images import write_image

from pace.images import Folder, UnreadableImageError
from pace.images.loading import by_processes, by_threads, decoded

PREPROCESSING = SimpleNamespace(size=(4, 6), interpolation="bilinear", crop_ratio=1.0)
WAYS = [
    by_threads,
    pytest.param(by_processes, marks=pytest.mark.skipif(sys.platform != "linux", reason="processes are forked")),
]


def plain(row):
    return torch.full((3, 2, 2), row, dtype=torch.uint8)


@pytest.mark.parametrize("by", WAYS)
def test_chunks_come_in_order_with_their_images_and_workers_end(by):
    chunks = [range(0, 20), [200, 3, 7], range(20, 41)]
    for (rows, batch), chunk in zip(by(plain, chunks, 2), chunks, strict=True):
        assert list(rows) == list(chunk) == batch[:, 0, 0, 0].tolist()
        assert (batch.shape[1:], batch.dtype) == ((3, 2, 2), torch.uint8)
    assert list(by(plain, [], 2)) == []  # a store that has everything already
    early = by(plain, chunks, 2)
    next(early)
    del early
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("by", WAYS)
def test_an_unreadable_image_is_an_error_when_its_chunk_comes(by, tmp_path):
    def load(row):
        if row == 13:
            raise UnreadableImageError(tmp_path / "013.png", "no known image format")
        return plain(row)

    batches = by(load, [range(8), range(8, 16)], 2)
    next(batches)
    with pytest.raises(UnreadableImageError, match=r"013\.png cannot be read as an image: no known image format"):
        next(batches)


def test_images_are_decoded_at_the_models_size(tmp_path):
    for value in (10, 20):
        write_image(tmp_path / f"{value}.png", value, size=(12, 8))
    ((rows, batch),) = decoded(Folder(tmp_path), [[1, 0]], PREPROCESSING)
    assert rows == [1, 0]
    assert batch.shape == (2, 3, 4, 6)
    assert batch[:, 0, 0, 0].tolist() == [20, 10]
