"""Every kind of file comes out as the RGB picture a person would see."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from pace.images import UnreadableImageError, decode

RGB = np.array([[[255, 0, 0], [0, 255, 0], [0, 0, 255]], [[10, 20, 30], [200, 100, 50], [255, 255, 255]]], np.uint8)


def pixels(path: Path) -> NDArray[np.uint8]:
    tensor = decode(path)
    assert tensor.dtype == torch.uint8
    assert tensor.shape[0] == 3
    return tensor.permute(1, 2, 0).numpy()


def test_rgb_is_unchanged(tmp_path: Path) -> None:
    Image.fromarray(RGB).save(tmp_path / "a.png")
    np.testing.assert_array_equal(pixels(tmp_path / "a.png"), RGB)


def test_greyscale_is_repeated_over_the_channels(tmp_path: Path) -> None:
    grey = np.array([[0, 77, 255]], np.uint8)
    Image.fromarray(grey).save(tmp_path / "a.png")
    np.testing.assert_array_equal(pixels(tmp_path / "a.png"), np.repeat(grey[..., None], 3, axis=-1))


def test_bilevel_is_black_and_white(tmp_path: Path) -> None:
    Image.fromarray(np.array([[0, 255]], np.uint8)).convert("1").save(tmp_path / "a.png")
    np.testing.assert_array_equal(pixels(tmp_path / "a.png"), [[[0] * 3, [255] * 3]])


def test_alpha_is_laid_on_white(tmp_path: Path) -> None:
    rgba = np.array([[[200, 0, 0, 255], [200, 0, 0, 0], [200, 0, 0, 128]]], np.uint8)
    Image.fromarray(rgba).save(tmp_path / "a.png")
    half = 200 * 128 / 255 + 255 * 127 / 255
    expected = [[200, 0, 0], [255, 255, 255], [half, 127, 127]]
    np.testing.assert_allclose(pixels(tmp_path / "a.png")[0], expected, atol=1)


def test_greyscale_with_alpha_is_laid_on_white(tmp_path: Path) -> None:
    Image.fromarray(np.array([[[50, 255], [50, 0]]], np.uint8), "LA").save(tmp_path / "a.png")
    np.testing.assert_array_equal(pixels(tmp_path / "a.png"), [[[50] * 3, [255] * 3]])


def test_palette_is_looked_up(tmp_path: Path) -> None:
    image = Image.fromarray(np.array([[0, 1, 2]], np.uint8), "P")
    image.putpalette([9, 8, 7, 60, 50, 40, 255, 0, 255])
    image.save(tmp_path / "a.png")
    np.testing.assert_array_equal(pixels(tmp_path / "a.png"), [[[9, 8, 7], [60, 50, 40], [255, 0, 255]]])


@pytest.mark.parametrize("ending", ["png", "gif"])
def test_transparent_palette_entries_are_white(tmp_path: Path, ending: str) -> None:
    image = Image.fromarray(np.array([[0, 1, 2]], np.uint8), "P")
    image.putpalette([9, 8, 7, 60, 50, 40, 255, 0, 255])
    image.save(tmp_path / f"a.{ending}", transparency=1)
    np.testing.assert_array_equal(pixels(tmp_path / f"a.{ending}"), [[[9, 8, 7], [255, 255, 255], [255, 0, 255]]])


@pytest.mark.parametrize("ending", ["jpg", "tif"])
def test_cmyk_becomes_rgb(tmp_path: Path, ending: str) -> None:
    inks = np.zeros((32, 32, 4), np.uint8)
    inks[:, :16] = [0, 255, 255, 0]  # magenta and yellow ink: red
    inks[:, 16:] = [255, 0, 0, 128]  # cyan ink and half black
    Image.fromarray(inks, "CMYK").save(tmp_path / f"a.{ending}", quality=100)
    found = pixels(tmp_path / f"a.{ending}")
    np.testing.assert_allclose(found[8, 4], [255, 0, 0], atol=3)
    np.testing.assert_allclose(found[8, 28], [0, 127, 127], atol=3)


@pytest.mark.parametrize("ending", ["jpg", "png", "tif", "webp"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied(tmp_path: Path, ending: str, orientation: int) -> None:
    upright = np.zeros((16, 32, 3), np.uint8)
    upright[:8, :16] = 255  # only the top left is white
    # How a camera stores the upright picture under each orientation, from the EXIF standard.
    stored = {
        1: upright,
        2: upright[:, ::-1],
        3: upright[::-1, ::-1],
        4: upright[::-1],
        5: upright.transpose(1, 0, 2),
        6: np.rot90(upright),
        7: np.rot90(upright, 2).transpose(1, 0, 2),
        8: np.rot90(upright, -1),
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.fromarray(np.ascontiguousarray(stored)).save(tmp_path / f"a.{ending}", exif=exif, quality=95)
    found = pixels(tmp_path / f"a.{ending}")
    assert found.shape == upright.shape
    assert np.abs(found.astype(int) - upright)[[2, 2, 13, 13], [4, 28, 4, 28]].max() < 12


def test_broken_exif_does_not_hide_the_picture(tmp_path: Path) -> None:
    Image.fromarray(RGB).save(tmp_path / "a.png", exif=b"Exif\x00\x00nonsense that is no TIFF header")
    np.testing.assert_array_equal(pixels(tmp_path / "a.png"), RGB)


@pytest.mark.parametrize("ending", ["png", "tif", "pgm"])
def test_16_bit_greyscale_is_scaled_not_clipped(tmp_path: Path, ending: str) -> None:
    deep = np.array([[0, 257, 128 * 257, 200 * 257, 65535]], np.uint16)
    Image.fromarray(deep).save(tmp_path / f"a.{ending}")
    np.testing.assert_array_equal(pixels(tmp_path / f"a.{ending}")[0, :, 0], [0, 1, 128, 200, 255])


def test_big_endian_16_bit_tiff_is_scaled(tmp_path: Path) -> None:
    deep = np.array([[0, 128 * 257, 65535]], np.uint16)
    Image.fromarray(deep.astype(">u2")).save(tmp_path / "a.tif")
    np.testing.assert_array_equal(pixels(tmp_path / "a.tif")[0, :, 0], [0, 128, 255])


def test_16_bit_rgb_png_is_scaled(tmp_path: Path) -> None:
    """Pillow cannot write these, so the file is put together by hand."""
    import struct
    import zlib

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    row = np.array([[0, 257 * 100, 65535], [65535, 0, 257 * 7]], ">u2")
    header = struct.pack(">IIBBBBB", 2, 1, 16, 2, 0, 0, 0)
    png = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" + row.tobytes()))
    (tmp_path / "a.png").write_bytes(png + chunk(b"IEND", b""))
    np.testing.assert_array_equal(pixels(tmp_path / "a.png"), [[[0, 100, 255], [255, 0, 7]]])


def test_float_pixels_are_refused_with_a_reason(tmp_path: Path) -> None:
    Image.fromarray(np.ones((2, 2), np.float32)).save(tmp_path / "a.tif")
    with pytest.raises(UnreadableImageError, match=r"a\.tif.*no agreed brightness range"):
        decode(tmp_path / "a.tif")


@pytest.mark.parametrize("ending", ["jpg", "png", "webp"])
@pytest.mark.parametrize("reduced", [False, True])
def test_a_truncated_file_is_an_error_that_names_it(tmp_path: Path, ending: str, reduced: bool) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / f"a.{ending}")
    decode(tmp_path / f"a.{ending}", reduced)
    data = (tmp_path / f"a.{ending}").read_bytes()
    (tmp_path / f"a.{ending}").write_bytes(data[: len(data) * 2 // 3])
    with pytest.raises(UnreadableImageError, match=rf"a\.{ending} cannot be read"):
        decode(tmp_path / f"a.{ending}", reduced)


def test_a_truncated_progressive_jpeg_is_found_by_the_reduced_read(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "a.jpg", progressive=True)
    data = (tmp_path / "a.jpg").read_bytes()
    (tmp_path / "a.jpg").write_bytes(data[: len(data) * 2 // 3])
    with pytest.raises(UnreadableImageError):
        decode(tmp_path / "a.jpg", reduced=True)


@pytest.mark.parametrize("content", [b"", b"not an image", b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff"])
def test_what_is_no_image_is_an_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.jpg").write_bytes(content)
    with pytest.raises(UnreadableImageError, match=r"a\.jpg cannot be read as an image: \w+"):
        decode(tmp_path / "a.jpg")
