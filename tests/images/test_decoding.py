"""Every kind of file comes out as the RGB picture a person would see."""

import struct
import zlib

import numpy as np
import pytest
import torch
from PIL import Image

from pace.images import UnreadableImageError, decode

RGB = np.array([[[255, 0, 0], [0, 255, 0], [0, 0, 255]], [[10, 20, 30], [200, 100, 50], [255, 255, 255]]], np.uint8)


def pixels(path):
    tensor = decode(path)
    assert (tensor.dtype, tensor.shape[0]) == (torch.uint8, 3)
    return tensor.permute(1, 2, 0).numpy()


def palette():
    image = Image.fromarray(np.array([[0, 1, 2]], np.uint8), "P")
    image.putpalette([9, 8, 7, 60, 50, 40, 255, 0, 255])
    return image


GREY = np.array([[0, 77, 255]], np.uint8)
RGBA = np.array([[[200, 0, 0, 255], [200, 0, 0, 0], [200, 0, 0, 128]]], np.uint8)
WHITE = [255, 255, 255]


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        (lambda: Image.fromarray(RGB), RGB),
        (lambda: Image.fromarray(GREY), [[[0] * 3, [77] * 3, WHITE]]),
        (lambda: Image.fromarray(np.array([[0, 255]], np.uint8)).convert("1"), [[[0] * 3, WHITE]]),
        (lambda: Image.fromarray(RGBA), [[[200, 0, 0], WHITE, [227, 127, 127]]]),
        (lambda: Image.fromarray(np.array([[[50, 255], [50, 0]]], np.uint8), "LA"), [[[50] * 3, WHITE]]),
        (palette, [[[9, 8, 7], [60, 50, 40], [255, 0, 255]]]),
    ],
    ids=["RGB", "grey", "black and white", "transparent", "transparent grey", "palette"],
)
def test_every_kind_of_pixel_becomes_rgb(tmp_path, image, expected):
    image().save(tmp_path / "a.png")
    np.testing.assert_allclose(pixels(tmp_path / "a.png"), expected, atol=1)


@pytest.mark.parametrize("ending", ["png", "gif"])
def test_transparent_palette_entries_are_white(tmp_path, ending):
    palette().save(tmp_path / f"a.{ending}", transparency=1)
    np.testing.assert_array_equal(pixels(tmp_path / f"a.{ending}"), [[[9, 8, 7], WHITE, [255, 0, 255]]])


@pytest.mark.parametrize("ending", ["jpg", "tif"])
def test_cmyk_becomes_rgb(tmp_path, ending):
    inks = np.zeros((32, 32, 4), np.uint8)
    inks[:, :16] = [0, 255, 255, 0]  # magenta and yellow ink: red
    inks[:, 16:] = [255, 0, 0, 128]  # cyan ink and half black
    Image.fromarray(inks, "CMYK").save(tmp_path / f"a.{ending}", quality=100)
    np.testing.assert_allclose(pixels(tmp_path / f"a.{ending}")[8, [4, 28]], [[255, 0, 0], [0, 127, 127]], atol=3)


# How a camera stores the upright picture under each orientation, from the EXIF standard.
TURNS = {
    1: lambda upright: upright,
    2: lambda upright: upright[:, ::-1],
    3: lambda upright: upright[::-1, ::-1],
    4: lambda upright: upright[::-1],
    5: lambda upright: upright.transpose(1, 0, 2),
    6: np.rot90,
    7: lambda upright: np.rot90(upright, 2).transpose(1, 0, 2),
    8: lambda upright: np.rot90(upright, -1),
}


@pytest.mark.parametrize("ending", ["jpg", "png", "tif", "webp"])
def test_exif_orientation_is_applied(tmp_path, ending):
    upright = np.zeros((16, 32, 3), np.uint8)
    upright[:8, :16] = 255  # only the top left is white
    for orientation, stored in TURNS.items():
        exif = Image.Exif()
        exif[0x0112] = orientation
        image = Image.fromarray(np.ascontiguousarray(stored(upright)))
        image.save(tmp_path / f"a.{ending}", exif=exif, quality=95)
        found = pixels(tmp_path / f"a.{ending}")
        assert found.shape == upright.shape
        assert np.abs(found.astype(int) - upright)[[2, 2, 13, 13], [4, 28, 4, 28]].max() < 12, orientation


def test_broken_exif_does_not_hide_the_picture(tmp_path):
    Image.fromarray(RGB).save(tmp_path / "a.png", exif=b"Exif\x00\x00nonsense that is no TIFF header")
    np.testing.assert_array_equal(pixels(tmp_path / "a.png"), RGB)


@pytest.mark.parametrize(("ending", "dtype"), [("png", "<u2"), ("tif", "<u2"), ("tif", ">u2"), ("pgm", "<u2")])
def test_16_bit_greyscale_is_scaled_not_clipped(tmp_path, ending, dtype):
    deep = np.array([[0, 257, 128 * 257, 200 * 257, 65535]], np.uint16)
    Image.fromarray(deep.astype(dtype)).save(tmp_path / f"a.{ending}")
    np.testing.assert_array_equal(pixels(tmp_path / f"a.{ending}")[0, :, 0], [0, 1, 128, 200, 255])


def test_16_bit_rgb_png_is_scaled(tmp_path):
    """Pillow cannot write these, so the file is put together by hand."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    row = np.array([[0, 257 * 100, 65535], [65535, 0, 257 * 7]], ">u2")
    header = struct.pack(">IIBBBBB", 2, 1, 16, 2, 0, 0, 0)
    png = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" + row.tobytes()))
    (tmp_path / "a.png").write_bytes(png + chunk(b"IEND", b""))
    np.testing.assert_array_equal(pixels(tmp_path / "a.png"), [[[0, 100, 255], [255, 0, 7]]])


def test_float_pixels_are_refused_with_a_reason(tmp_path):
    Image.fromarray(np.ones((2, 2), np.float32)).save(tmp_path / "a.tif")
    with pytest.raises(UnreadableImageError, match=r"a\.tif.*no agreed brightness range"):
        decode(tmp_path / "a.tif")


@pytest.mark.parametrize(("ending", "progressive"), [("jpg", False), ("jpg", True), ("png", False), ("webp", False)])
def test_a_truncated_file_is_an_error_that_names_it(tmp_path, ending, progressive):
    file = tmp_path / f"a.{ending}"
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save(file, progressive=progressive)
    decode(file)
    file.write_bytes(file.read_bytes()[: file.stat().st_size * 2 // 3])
    with pytest.raises(UnreadableImageError, match=rf"a\.{ending} cannot be read"):
        decode(file)


@pytest.mark.parametrize(
    "content", [b"", b"not an image", b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"%!PS-Adobe-3.0 EPSF"]
)
def test_other_files_are_an_error(tmp_path, content):
    (tmp_path / "a.jpg").write_bytes(content)
    with pytest.raises(UnreadableImageError, match=r"a\.jpg cannot be read as an image: \w+"):
        decode(tmp_path / "a.jpg")
