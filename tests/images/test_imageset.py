"""Sets of image files: order, alignment of images and labels, and what happens to unreadable ones."""

import copy
import os
from pathlib import Path

import numpy as np
import pytest
from tiny_images import write_image

from pace.images import Folder, UnreadableImageError, open_images


@pytest.fixture
def animals(tmp_path):
    """cat: 10, 20; dog: 30, 40, 50. The name of a file is its grey value."""
    for name in ("cat/10.png", "cat/20.JPG", "dog/30.png", "dog/sub/40.png", "dog/50.webp"):
        write_image(tmp_path / name, int(Path(name).stem))
    (tmp_path / "dog" / "notes.txt").write_text("no image")
    (tmp_path / "dog" / "._30.png").write_bytes(b"left by a file manager")
    (tmp_path / ".cache").mkdir()
    return tmp_path


@pytest.fixture
def broken(animals):
    """The same with two files that cannot be read."""
    (animals / "cat" / "20.JPG").write_bytes((animals / "cat" / "20.JPG").read_bytes()[:-40])
    (animals / "dog" / "30.png").write_bytes(b"no image at all")
    return animals


def greys(images):
    return [int(image[0, 0, 0]) for image in images]


def test_class_folders_give_labels_and_sorted_names(animals):
    (animals / "cow").mkdir()  # keeps its label, though it is empty
    images = Folder(animals)
    assert images.names == ["cat/10.png", "cat/20.JPG", "dog/30.png", "dog/50.webp", "dog/sub/40.png"]
    np.testing.assert_array_equal(images.labels, [0, 0, 2, 2, 2])
    assert images.class_names == ["cat", "cow", "dog"]
    assert greys(images) == [10, 20, 30, 50, 40]
    assert images[0].shape == (3, 4, 6)
    assert repr(images) == "Folder(5 images, 3 classes)"


def test_a_flat_folder_has_no_labels(animals):
    images = Folder(animals / "cat")
    assert (images.names, images.labels, images.class_names) == (["10.png", "20.JPG"], None, None)


def test_folders_without_a_clear_meaning_are_refused(animals, tmp_path_factory):
    write_image(animals / "stray.png", 1)
    with pytest.raises(ValueError, match=r"1 images of its own \(stray\.png, …\) and 5 in subfolders"):
        Folder(animals)
    with pytest.raises(FileNotFoundError, match=r"no image in .* known endings: .*\.jpg"):
        Folder(tmp_path_factory.mktemp("empty"))
    with pytest.raises(FileNotFoundError, match="No such file or directory"):
        Folder(animals / "nowhere")


def test_indices_and_subsets_behave_like_a_list(animals):
    images = Folder(animals)
    assert greys([images[-1], images[np.int64(1)]]) == [40, 20]
    with pytest.raises(IndexError):
        images[5]
    part = images.subset([3, 0])
    assert part.names == ["dog/50.webp", "cat/10.png"]
    np.testing.assert_array_equal(part.labels, [1, 0])
    assert greys(copy.deepcopy(part)) == [50, 10]  # by the protocol that sends it to decoding processes
    with pytest.raises(ValueError, match="no images"):
        part.subset([])


def test_the_fingerprint_changes_with_content_names_and_selection_only(animals):
    before = Folder(animals).fingerprint()
    assert before == Folder(animals).fingerprint()
    assert len(before) == 16
    assert Folder(animals).subset(range(4)).fingerprint() != before
    stat = os.stat(animals / "cat" / "10.png")
    os.utime(animals / "cat" / "10.png", ns=(stat.st_atime_ns, stat.st_mtime_ns + 1_000_000_000))
    touched = Folder(animals).fingerprint()
    assert touched != before
    (animals / "cat" / "10.png").rename(animals / "cat" / "11.png")
    assert Folder(animals).fingerprint() not in (before, touched)


def test_a_set_without_a_readable_image_is_an_error_that_is_not_too_long(tmp_path):
    for number in range(9):
        (tmp_path / f"{number}.jpg").write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"9 of 9 .* 4\.jpg \(cannot identify image file .*\) and 4 more$"):
        Folder(tmp_path, on_error="skip")


def test_skip_leaves_no_gap_between_images_names_and_labels(broken):
    with pytest.raises(UnreadableImageError, match=r'20\.JPG cannot be read as an image: .* on_error="skip"'):
        Folder(broken)[1]
    with pytest.warns(UserWarning, match="2 of 5 images cannot be read and are left out"):
        images = Folder(broken, on_error="skip")
    assert images.names == ["cat/10.png", "dog/50.webp", "dog/sub/40.png"]
    np.testing.assert_array_equal(images.labels, [0, 1, 1])
    assert greys(images) == [10, 50, 40]
    (broken / "cat" / "10.png").write_bytes(b"broken since")
    with pytest.raises(UnreadableImageError, match=r"10\.png"):
        list(images)


def test_open_images_takes_a_folder_and_its_splits(animals, tmp_path_factory):
    assert open_images(str(animals)).names == open_images(animals).names == Folder(animals).names
    with pytest.raises(ValueError, match="has no split 'test'"):
        open_images(animals, split="test")
    folder = tmp_path_factory.mktemp("splits")
    write_image(folder / "train" / "cat" / "1.png", 1)
    write_image(folder / "test" / "cat" / "2.png", 2)
    assert open_images(folder).names == ["cat/1.png"]
    assert open_images(folder, split="test").names == ["cat/2.png"]
    with pytest.raises(ValueError, match="no split 'val'; found test, train"):
        open_images(folder, split="val")
    write_image(folder / "boat" / "3.png", 3)  # then train is a class
    assert open_images(folder).class_names == ["boat", "test", "train"]


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(
        FileNotFoundError, match="fish: no such file or folder, and not one of color, birds, flower, cars, cub"
    ):
        open_images("fish")
