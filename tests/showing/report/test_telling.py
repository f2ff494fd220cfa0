"""Which images the Trust view shows first."""

from base64 import b64decode

import numpy as np
import pytest
from report_case import page_data

from pace import Explanation
from pace.showing.report import contents

WHOLE = (0, 0, 1, 1)


def explained(concepts):
    """An explanation with these concepts (M, 16) in its patches, and CLS before them."""
    phi = np.eye(3)[np.insert(np.asarray(concepts), 0, 0, axis=1)]
    return Explanation(phi.mean(1), phi.sum(1) + 0.1, phi, (4, 4), 1)


def test_the_best_and_worst_followed_and_the_most_covered_image_are_found():
    halves = np.repeat([1, 2], 8)
    pictures = np.array([halves, halves, halves, np.full(16, 2), np.append(np.full(15, 1), 2)])
    views = pictures.copy()
    views[0, :4] = 0
    views[1, 3] = 0
    views[2] = 0
    found = contents.followed(explained(pictures), explained(views), np.tile(WHOLE, (5, 1)), (4, 4))["telling"]
    # The last two keep all places, but have one concept nearly everywhere: there is nothing to follow.
    assert found == [
        {"why": "best", "image": 1, "share": 15 / 16},
        {"why": "worst", "image": 2, "share": 0},
        {"why": "covered", "image": 3, "share": 1, "concept": 2},
    ]


def test_no_image_is_the_best_followed_if_all_have_one_concept():
    same = explained(np.ones((3, 16), int))
    found = contents.followed(same, same, np.tile(WHOLE, (3, 1)), (4, 4))["telling"]
    assert [one["why"] for one in found] == ["worst", "covered"]


def test_a_crop_is_compared_with_the_part_of_the_picture_that_it_shows():
    picture = np.arange(16).reshape(1, 4, 4) % 3
    mirrored = picture[:, 2:, :2].repeat(2, 1).repeat(2, 2)[:, :, ::-1].reshape(1, 16)  # its lower left quarter
    crops = np.array([[0.5, 0.5, 0, 1]], np.float32)
    data = contents.followed(explained(picture.reshape(1, 16)), explained(mirrored), crops, (4, 4))
    assert data["telling"][0] == {"why": "best", "image": 0, "share": 1}
    places = np.frombuffer(b64decode(data["places"]["base64"]), np.uint8)
    assert places.tolist() == [9, 9, 8, 8, 9, 9, 8, 8, 13, 13, 12, 12, 13, 13, 12, 12]


def test_without_perturbed_views_only_the_most_covered_image_is_told(case, bare, report):
    data = page_data(bare)
    assert data["places"] is data["verdict"] is None
    assert [one["why"] for one in data["telling"]] == ["covered"]
    counts = np.array([np.bincount(row, minlength=8) for row in case.explanation.phi[:, 1:].argmax(2)])
    found = page_data(report)["telling"][-1]
    assert found["share"] == pytest.approx(counts.max() / 36)
    assert counts[found["image"], found["concept"]] == counts.max()
