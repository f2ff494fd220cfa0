"""Little datasets in the official layouts, made on the spot."""

import json

import numpy as np
import pytest
from scipy.io import savemat
from tiny_images import write_image


@pytest.fixture
def flower_root(tmp_path):
    """Ten images; image i has grey value 10 i and label (i mod 3) + 1."""
    root = tmp_path / "flowers-102"
    for number in range(1, 11):
        write_image(root / "jpg" / f"image_{number:05d}.jpg", 10 * number)
    savemat(root / "imagelabels.mat", {"labels": np.arange(1, 11)[None] % 3 + 1})
    savemat(root / "setid.mat", {"trnid": [[9, 1]], "valid": [[4, 2, 3]], "tstid": [[5, 6, 7, 8, 10]]})
    (root / "cat_to_name.json").write_text(json.dumps({"2": "lily", "1": "rose", "3": "poppy"}))
    return root


@pytest.fixture
def cars_root(tmp_path):
    root = tmp_path / "stanford_cars"
    for split, count in (("train", 3), ("test", 2)):
        for number in range(1, count + 1):
            write_image(root / f"cars_{split}" / f"{number:05d}.jpg", 40 * number)

    def annotations(labels):
        rows = np.zeros((1, len(labels)), dtype=[("bbox_x1", int), ("class", int), ("fname", object)])
        for number, label in enumerate(labels):
            rows[0, number] = (1, label, f"{number + 1:05d}.jpg")
        return {"annotations": rows}

    (root / "devkit").mkdir()
    names = np.array([["AM General Hummer SUV 2000", "Acura RL Sedan 2012"]], dtype=object)
    savemat(root / "devkit" / "cars_meta.mat", {"class_names": names})
    savemat(root / "devkit" / "cars_train_annos.mat", annotations([2, 1, 2]))
    savemat(root / "cars_test_annos_withlabels.mat", annotations([1, 2]))
    return root


@pytest.fixture
def cub_root(tmp_path):
    """Four images of two classes, two parts; image i has its parts at (i, 10 i) and (i + 0.5, 0)."""
    root = tmp_path / "CUB_200_2011"
    classes = ["001.Black_footed_Albatross", "002.Mc.Auk"]
    paths = [f"{classes[0]}/a.jpg", f"{classes[0]}/b.jpg", f"{classes[1]}/c.jpg", f"{classes[1]}/d.jpg"]
    for number, path in enumerate(paths, start=1):
        write_image(root / "images" / path, 40 * number)
    (root / "parts").mkdir()
    lines = {
        "images.txt": [f"{i} {path}" for i, path in enumerate(paths, start=1)],
        "image_class_labels.txt": ["1 1", "2 1", "3 2", "4 2"],
        "train_test_split.txt": ["1 0", "2 1", "3 1", "4 1"],
        "classes.txt": ["1 001.Black_footed_Albatross", "2 002.Mc.Auk"],
        "bounding_boxes.txt": [f"{i} {i}.0 2.0 3.5 {10 * i}.0" for i in range(1, 5)],
        "parts/parts.txt": ["1 back", "2 left eye"],
        "parts/part_locs.txt": [
            f"{i} {p} {i + (p - 1) / 2} {10 * i * (2 - p)} {2 - p}" for i in range(1, 5) for p in (1, 2)
        ],
    }
    for name, content in lines.items():
        (root / name).write_text("\n".join(content) + "\n")
    return root
