"""The protocol for the parts of birds, on a handful of pictures."""

import sys

import cub_parts
import numpy as np
import pytest
from PIL import Image
from sklearn.metrics import adjusted_rand_score, normalized_mutual_info_score

from pace.backbones import Backbone, color_vit
from pace.images import CUB


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Twelve pictures of 112 x 112 with three parts, the last of which is never seen; half are for testing."""
    folder, rng = tmp_path_factory.mktemp("birds") / "CUB_200_2011", np.random.default_rng(0)
    (folder / "images").mkdir(parents=True)
    (folder / "parts").mkdir()
    for i in range(1, 13):
        blocks = rng.integers(256, size=(7, 7, 3), dtype=np.uint8)
        Image.fromarray(blocks.repeat(16, 0).repeat(16, 1)).save(folder / "images" / f"{i}.png")
    lines = {
        "images.txt": [f"{i} {i}.png" for i in range(1, 13)],
        "image_class_labels.txt": [f"{i} {1 + i % 2}" for i in range(1, 13)],
        "train_test_split.txt": [f"{i} {i % 2}" for i in range(1, 13)],
        "classes.txt": ["1 001.Auk", "2 002.Owl"],
        "bounding_boxes.txt": [f"{i} 8.0 0.0 96.0 56.0" for i in range(1, 13)],
        "parts/parts.txt": ["1 back", "2 beak", "3 tail"],
        "parts/part_locs.txt": [f"{i} {p} {(8, 100, 0)[p - 1]} {4 * i} {int(p < 3)}" for i in range(1, 13) for p in (1, 2, 3)],
    }  # fmt: skip
    for name, content in lines.items():
        (folder / name).write_text("\n".join(content) + "\n")
    return folder


def test_keypoints_are_the_visible_parts_in_their_patches_and_in_the_birds_box(root):
    images = CUB(root, split="test")
    backbone = Backbone(color_vit.load().model)
    rows, columns = backbone.grid(*backbone.preprocessing.size)
    found = cub_parts.keypoints(images, backbone)
    np.testing.assert_array_equal(found.image, np.repeat(np.arange(6), 2))
    np.testing.assert_array_equal(found.part, np.tile([0, 1], 6))
    np.testing.assert_allclose(found.in_box[:2], [[0, 8 / 56], [92 / 96, 8 / 56]])
    x, y = np.array([8, 100]) / 112, np.array([8, 8]) / 112
    np.testing.assert_array_equal(found.patch[:2], np.floor(y * rows) * columns + np.floor(x * columns))
    assert np.abs(found.in_picture[:2] - np.stack([x, y], 1)).max() <= 0.5 / rows
    concept = np.random.default_rng(0).integers(3, size=12)
    expected = normalized_mutual_info_score(found.part, concept), adjusted_rand_score(found.part, concept)
    np.testing.assert_allclose(found.score(concept), 100 * np.array(expected), atol=1e-9)


def test_every_row_has_figures_and_peers_are_printed_beside_them(root, monkeypatch, capsys):
    options = "--backbone color --layers -1 --concepts 2 4 --device cpu --limit 5 --seeds 2"
    monkeypatch.setattr(sys, "argv", ["cub_parts.py", "--data-root", str(root), *options.split()])
    cub_parts.main()
    printed = capsys.readouterr().out
    table = {row.split("|")[1].strip(): row.split("|")[2:4] for row in printed.splitlines() if row.startswith("| ")}
    assert "10 keypoints of 5 test images, 5 to learn from, seeds [0, 1]" in printed
    assert [part.strip() for part in table["position"]] == 2 * ["100 / 100"]  # one left, one right, both above
    learned = [title for title in table if title.startswith(("PACE (block", "k-means (block"))]
    assert len(learned) >= 2
    assert all(" / " in cell for title in learned for cell in table[title])
    assert table[next(title for title in table if title.startswith("PDiscoFormer"))][1].strip() == "58 / 25"
