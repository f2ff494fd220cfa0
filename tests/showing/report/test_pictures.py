import io
from base64 import b64decode

import numpy as np
import pytest
from PIL import Image

from pace.showing.report.pictures import TILE, contact_sheet, encode, read_pictures

RNG = np.random.default_rng(0)


def noise(count, height=40, width=40):
    return RNG.integers(0, 256, (count, height, width, 3), dtype=np.uint8)


def opened(text):
    return Image.open(io.BytesIO(b64decode(text)), formats=["WEBP"])


def test_pictures_are_what_was_given_but_never_larger_than_shown():
    small = noise(2, 30, 50)
    assert np.array_equal(np.asarray(read_pictures(small, 2, None, "images")[1]), small[1])
    assert read_pictures(noise(1, 300, 600), 1, None, "images")[0].size == (224, 112)


def test_errors_name_the_argument():
    with pytest.raises(ValueError, match=r"^perturbed_images: expected 3, one for each .*; found 2"):
        read_pictures(noise(2), 3, None, "perturbed_images")
    with pytest.raises(ValueError, match=r"image 1 has 50 x 40 pixels and image 0 40 x 40"):
        read_pictures([noise(1)[0], noise(1, 40, 50)[0]], 2, None, "images")


def test_the_largest_pictures_that_fit_are_taken():
    pictures = read_pictures(noise(4, 224, 224), 4, None, "images")
    plenty = encode(pictures, 10**7)
    assert opened(plenty[0]).size == (224, 224)
    little = encode(pictures, sum(map(len, plenty)) // 3)
    assert sum(map(len, little)) <= sum(map(len, plenty)) // 3
    assert 48 <= opened(little[0]).width < 224
    with pytest.raises(ValueError, match="4 pictures do not fit into the report"):
        encode(pictures, 100)


def test_the_contact_sheet_has_every_picture_in_its_place():
    colours = [(250, 0, 0), (0, 250, 0), (0, 0, 250)]
    sheet = contact_sheet([Image.new("RGB", (30, 20), colour) for colour in colours])
    assert (sheet["columns"], sheet["rows"]) == (2, 2)
    image = opened(sheet["base64"]).convert("RGB")
    assert image.size == (2 * TILE, 2 * TILE)
    for index, colour in enumerate(colours):
        pixel = image.getpixel((index % 2 * TILE + TILE // 2, index // 2 * TILE + TILE // 2))
        assert np.abs(np.subtract(pixel, colour)).max() < 20
