"""Sets of image files: order, alignment of images and labels, and what happens to unreadable ones."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from tiny_images import write_image
from torch.utils.data import DataLoader

from pace.images import Folder, UnreadableImageError, UnreadableImagesError, open_images


@pytest.fixture
def animals(tmp_path: Path) -> Path:
    """cat: 10, 20; dog: 30, 40, 50. The name of a file is its grey value."""
    for name in ("cat/10.png", "cat/20.JPG", "dog/30.png", "dog/sub/40.png", "dog/50.webp"):
        write_image(tmp_path / name, int(Path(name).stem))
    (tmp_path / "dog" / "notes.txt").write_text("no image")
    (tmp_path / "dog" / "._30.png").write_bytes(b"left by a file manager")
    (tmp_path / ".cache").mkdir()
    return tmp_path


def test_class_folders_give_labels_and_sorted_names(animals: Path) -> None:
    images = Folder(animals)
    assert images.names == ["cat/10.png", "cat/20.JPG", "dog/30.png", "dog/50.webp", "dog/sub/40.png"]
    np.testing.assert_array_equal(images.labels, [0, 0, 1, 1, 1])
    assert images.class_names == ["cat", "dog"]
    assert [int(image[0, 0, 0]) for image in images] == [10, 20, 30, 50, 40]
    assert images[0].shape == (3, 4, 6)
    assert repr(images) == "Folder(5 images, 2 classes)"


def test_a_flat_folder_has_no_labels(animals: Path) -> None:
    images = Folder(animals / "cat")
    assert images.names == ["10.png", "20.JPG"]
    assert images.labels is None
    assert images.class_names is None


def test_an_empty_class_folder_keeps_its_label(animals: Path) -> None:
    (animals / "cow").mkdir()
    images = Folder(animals)
    assert images.class_names == ["cat", "cow", "dog"]
    np.testing.assert_array_equal(images.labels, [0, 0, 2, 2, 2])


def test_images_beside_class_folders_are_refused(animals: Path) -> None:
    write_image(animals / "stray.png", 1)
    with pytest.raises(ValueError, match=r"1 images of its own \(stray\.png, …\) and 5 in subfolders"):
        Folder(animals)


def test_a_folder_without_images_says_what_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no image in .* known endings: .*\.jpg"):
        Folder(tmp_path)
    with pytest.raises(FileNotFoundError, match="is not a folder"):
        Folder(tmp_path / "nowhere")


def test_indices_behave_like_a_list(animals: Path) -> None:
    images = Folder(animals)
    assert int(images[-1][0, 0, 0]) == 40
    assert int(images[np.int64(1)][0, 0, 0]) == 20
    with pytest.raises(IndexError, match="image 5 of 5"):
        images[5]


def test_a_subset_keeps_names_and_labels_together(animals: Path) -> None:
    part = Folder(animals).subset([3, 0])
    assert part.names == ["dog/50.webp", "cat/10.png"]
    np.testing.assert_array_equal(part.labels, [1, 0])
    assert [int(image[0, 0, 0]) for image in part] == [50, 10]
    with pytest.raises(ValueError, match="listed twice"):
        part.subset([0, 0])


def test_the_fingerprint_changes_with_content_names_and_selection_only(animals: Path) -> None:
    before = Folder(animals).fingerprint()
    assert before == Folder(animals).fingerprint()
    assert len(before) == 16
    assert int(before, 16) >= 0
    assert Folder(animals).subset(range(4)).fingerprint() != before
    stat = os.stat(animals / "cat" / "10.png")
    os.utime(animals / "cat" / "10.png", ns=(stat.st_atime_ns, stat.st_mtime_ns + 1_000_000_000))
    touched = Folder(animals).fingerprint()
    assert touched != before
    (animals / "cat" / "10.png").rename(animals / "cat" / "11.png")
    assert Folder(animals).fingerprint() not in (before, touched)


def break_two(animals: Path) -> None:
    (animals / "cat" / "20.JPG").write_bytes((animals / "cat" / "20.JPG").read_bytes()[:-40])
    (animals / "dog" / "30.png").write_bytes(b"no image at all")


def test_check_lists_every_unreadable_image_and_reports_progress(animals: Path) -> None:
    images = Folder(animals)
    seen: list[tuple[int, int]] = []
    images.check(lambda done, total: seen.append((done, total)))
    assert seen == [(i, 5) for i in range(1, 6)]
    break_two(animals)
    with pytest.raises(
        UnreadableImagesError, match=r"2 of 5 images cannot be read: cat/20\.JPG \(.*\), dog/30\.png"
    ) as e:
        images.check()
    assert list(e.value.reasons) == ["cat/20.JPG", "dog/30.png"]


def test_long_lists_of_unreadable_images_are_cut_short(tmp_path: Path) -> None:
    for number in range(9):
        (tmp_path / f"{number}.jpg").write_bytes(b"nothing")
    with pytest.raises(UnreadableImagesError, match=r"9 of 9 .* 4\.jpg \(no known image format\) and 4 more; repair"):
        Folder(tmp_path).check()


def test_reading_an_unreadable_image_names_its_file(animals: Path) -> None:
    break_two(animals)
    with pytest.raises(UnreadableImageError, match=r"20\.JPG cannot be read as an image"):
        Folder(animals)[1]


def test_skip_leaves_no_gap_between_images_names_and_labels(animals: Path) -> None:
    break_two(animals)
    with pytest.warns(UserWarning, match="2 of 5 images cannot be read and are left out"):
        images = Folder(animals, on_error="skip")
    assert images.skipped == 2
    assert len(images) == len(images.names) == 3
    assert images.names == ["cat/10.png", "dog/50.webp", "dog/sub/40.png"]
    np.testing.assert_array_equal(images.labels, [0, 1, 1])
    assert [int(image[0, 0, 0]) for image in images] == [10, 50, 40]
    assert repr(images) == "Folder(3 images, 2 classes, 2 skipped)"


def test_an_image_that_breaks_after_skip_is_an_error_not_a_gap(animals: Path) -> None:
    images = Folder(animals, on_error="skip")
    assert images.skipped == 0
    break_two(animals)
    with pytest.raises(UnreadableImageError, match=r"20\.JPG"):
        list(images)


def test_skip_with_nothing_left_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(b"nothing")
    with pytest.raises(UnreadableImagesError, match="1 of 1"):
        Folder(tmp_path, on_error="skip")


def test_on_error_must_be_known(animals: Path) -> None:
    with pytest.raises(ValueError, match='on_error: expected "raise" or "skip"; found \'ignore\''):
        Folder(animals, on_error="ignore")  # type: ignore[arg-type]


def test_sets_travel_to_other_processes(animals: Path) -> None:
    loader = DataLoader(Folder(animals), batch_size=None, num_workers=1, multiprocessing_context="spawn")
    assert [int(image[0, 0, 0]) for image in loader][2] == 30


def test_open_images_takes_a_folder(animals: Path) -> None:
    assert open_images(str(animals)).names == Folder(animals).names
    assert open_images(animals).names == Folder(animals).names
    with pytest.raises(ValueError, match="has no split 'test'"):
        open_images(animals, split="test")


def test_open_images_goes_into_split_folders(tmp_path: Path) -> None:
    write_image(tmp_path / "train" / "cat" / "1.png", 1)
    write_image(tmp_path / "test" / "cat" / "2.png", 2)
    assert open_images(tmp_path).names == ["cat/1.png"]
    assert open_images(tmp_path, split="test").names == ["cat/2.png"]
    with pytest.raises(ValueError, match="no split 'val'; found test, train"):
        open_images(tmp_path, split="val")


def test_a_class_called_train_is_no_split(tmp_path: Path) -> None:
    write_image(tmp_path / "train" / "1.png", 1)
    write_image(tmp_path / "boat" / "2.png", 2)
    assert open_images(tmp_path).class_names == ["boat", "train"]


def test_an_unknown_name_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="'birds' is neither a folder nor one of color, flower, cars, cub"):
        open_images("birds")
