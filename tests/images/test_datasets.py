"""Datasets in their official layouts: the right images, labels, names and splits, and errors that say what is missing."""

import numpy as np
import pytest
from scipy.io import savemat

from pace.files import DamagedFile
from pace.images import CUB, Cars, Flower, open_images


def greys(images):
    return [int(image.float().mean().round()) for image in images]


def test_flower_trains_on_official_train_and_test_and_tests_on_validation(flower_root):
    train, test = Flower(flower_root), Flower(flower_root, split="test")
    assert train.names == [f"image_{i:05d}.jpg" for i in (1, 5, 6, 7, 8, 9, 10)]
    assert test.names == [f"image_{i:05d}.jpg" for i in (2, 3, 4)]
    np.testing.assert_array_equal(train.labels, np.array([1, 5, 6, 7, 8, 9, 10]) % 3)
    assert greys(train) == [10, 50, 60, 70, 80, 90, 100]
    assert train.class_names == ["rose", "lily", "poppy"]


def test_class_names_of_flowers_are_optional(flower_root):
    (flower_root / "cat_to_name.json").unlink()
    assert Flower(flower_root).class_names is None


def test_cars_are_read_from_both_annotation_files(cars_root):
    train, test = Cars(cars_root), Cars(cars_root, split="test")
    assert train.names == ["cars_train/00001.jpg", "cars_train/00002.jpg", "cars_train/00003.jpg"]
    assert test.names == ["cars_test/00001.jpg", "cars_test/00002.jpg"]
    np.testing.assert_array_equal(train.labels, [1, 0, 1])
    np.testing.assert_array_equal(test.labels, [0, 1])
    assert train.class_names == ["AM General Hummer SUV 2000", "Acura RL Sedan 2012"]
    assert greys(train) == [40, 80, 120]


def test_cars_test_labels_may_be_in_the_devkit_and_one_annotation_is_still_a_list(cars_root):
    labels = cars_root / "cars_test_annos_withlabels.mat"
    labels.rename(cars_root / "devkit" / labels.name)
    assert len(Cars(cars_root, split="test")) == 2
    (cars_root / "devkit" / labels.name).unlink()
    with pytest.raises(FileNotFoundError, match=r"no devkit/cars_test_annos_withlabels\.mat or cars_test_annos_with"):
        Cars(cars_root, split="test")
    one = np.zeros((1, 1), dtype=[("class", int), ("fname", object)])
    one[0, 0] = (2, "00002.jpg")
    savemat(cars_root / "devkit" / "cars_train_annos.mat", {"annotations": one})
    assert Cars(cars_root).names == ["cars_train/00002.jpg"]


def test_cars_annotations_without_labels_are_refused(cars_root):
    """As in the devkit's own cars_test_annos.mat."""
    rows = np.zeros((1, 2), dtype=[("fname", object)])
    rows["fname"] = "00001.jpg"
    savemat(cars_root / "cars_test_annos_withlabels.mat", {"annotations": rows})
    with pytest.raises(ValueError, match=r"cars_test_annos_withlabels\.mat: expected annotations with the fields"):
        Cars(cars_root, split="test")


def test_cub_reads_split_labels_names_parts_and_boxes(cub_root):
    train, test = CUB(cub_root), CUB(cub_root, split="test")
    assert test.names == ["001.Black_footed_Albatross/a.jpg"]
    assert train.names == ["001.Black_footed_Albatross/b.jpg", "002.Mc.Auk/c.jpg", "002.Mc.Auk/d.jpg"]
    np.testing.assert_array_equal(train.labels, [0, 1, 1])
    assert train.class_names == ["Black footed Albatross", "Mc.Auk"]
    assert train.part_names == ["back", "left eye"]
    np.testing.assert_array_equal(train.parts(1), [[3, 30, 1], [3.5, 0, 0]])
    np.testing.assert_array_equal(train.parts(-1), [[4, 40, 1], [4.5, 0, 0]])
    np.testing.assert_array_equal(train.box(0), [2, 2, 3.5, 20])
    assert greys(train) == [80, 120, 160]


def test_parts_and_boxes_stay_with_their_image_when_others_are_left_out(cub_root):
    (cub_root / "images" / "002.Mc.Auk" / "c.jpg").write_bytes(b"broken")
    with pytest.warns(UserWarning, match=r"1 of 3 images cannot be read and are left out: 002\.Mc\.Auk/c\.jpg"):
        images = CUB(cub_root, on_error="skip")
    assert images.names == ["001.Black_footed_Albatross/b.jpg", "002.Mc.Auk/d.jpg"]
    np.testing.assert_array_equal(images.labels, [0, 1])
    np.testing.assert_array_equal(images.parts(1)[0], [4, 40, 1])
    np.testing.assert_array_equal(images.subset([1]).box(0), [4, 2, 3.5, 40])


@pytest.mark.parametrize(("name", "dataset"), [("flower", Flower), ("cars", Cars), ("cub", CUB)])
def test_data_root_may_be_the_folder_or_its_parent(name, dataset, request):
    root = request.getfixturevalue(f"{name}_root")
    for data_root in (root, root.parent, str(root)):
        images = open_images(name, data_root)
        assert type(images) is dataset
        assert images.names == dataset(root).names


NEEDED = {
    "flower": "imagelabels.mat setid.mat jpg/image_00001.jpg",
    "cars": "devkit/cars_meta.mat devkit/cars_train_annos.mat cars_train/00002.jpg",
    "cub": "images.txt classes.txt image_class_labels.txt train_test_split.txt bounding_boxes.txt parts/parts.txt "
    "parts/part_locs.txt images/002.Mc.Auk/c.jpg",
}


@pytest.mark.parametrize(("name", "file"), [(name, file) for name in NEEDED for file in NEEDED[name].split()])
def test_a_missing_file_is_named_together_with_the_layout(name, file, request):
    root = request.getfixturevalue(f"{name}_root")
    (root / file).unlink()
    with pytest.raises(FileNotFoundError) as caught:
        open_images(name, root)
    message = str(caught.value)
    assert file.removeprefix("jpg/").removeprefix("images/") in message
    assert f"expected {root.name}/ with" in message
    assert "\n" not in message


@pytest.mark.parametrize("name", ["flower", "cars", "cub", "color"])
def test_an_unknown_split_lists_the_known_ones(name, request):
    root = None if name == "color" else request.getfixturevalue(f"{name}_root")
    with pytest.raises(ValueError, match=r"split 'dev' does not exist; expected .*train.*test"):
        open_images(name, root, split="dev")


def test_a_missing_data_root_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="cub: data_root is needed"):
        open_images("cub")
    with pytest.raises(FileNotFoundError, match=r"no images\.txt in .*nowhere; expected CUB_200_2011/ with"):
        CUB(tmp_path / "nowhere")


def test_a_label_without_a_class_is_an_error(cub_root):
    (cub_root / "image_class_labels.txt").write_text("1 1\n2 1\n3 2\n4 7\n")
    with pytest.raises(ValueError, match=r"002\.Mc\.Auk/d\.jpg has label 6; expected 0 to 1, one for each class name"):
        CUB(cub_root)


def test_an_image_without_label_or_part_is_an_error(cub_root):
    (cub_root / "parts" / "part_locs.txt").write_text("2 1 0 0 0\n2 2 0 0 0\n3 1 0 0 0\n4 1 0 0 0\n4 2 0 0 0\n")
    with pytest.raises(ValueError, match=r"part_locs\.txt: expected 5 columns and a line for each part of each image"):
        CUB(cub_root)
    (cub_root / "image_class_labels.txt").write_text("1 1\n2 1\n4 2\n")
    with pytest.raises(ValueError, match=r"image_class_labels\.txt has no line for image 3"):
        CUB(cub_root)


@pytest.mark.parametrize(
    "name", ["images", "train_test_split", "bounding_boxes", "classes", "parts/parts", "parts/part_locs"]
)
@pytest.mark.parametrize("content", [b"\xff\xfe", b"1", b"x y\n", b"1 1 \0 1e999 9\n"])
def test_a_damaged_table_is_refused_in_one_line_that_names_it_or_its_dataset(cub_root, name, content):
    (cub_root / f"{name}.txt").write_bytes(content)
    with pytest.raises((DamagedFile, FileNotFoundError), match=r"^[^\n]*CUB_200_2011[^\n]*$"):
        CUB(cub_root)


def test_a_damaged_split_file_is_an_error(flower_root):
    (flower_root / "setid.mat").write_bytes(b"x" * 500)
    with pytest.raises(ValueError, match=r"setid\.mat cannot be used: Unknown mat file.*; get the dataset again"):
        Flower(flower_root)
