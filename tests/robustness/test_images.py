"""Image files from strangers: no decoder but ours, no more memory than needed, and nothing left out silently."""

from __future__ import annotations

import os
import struct
import threading
import warnings
import zlib

import numpy as np
import pytest
import torch
from PIL import Image
from planted import planted

from pace import PACE
from pace.images import Folder, UnreadableImageError, decode, decoding


def png(width: int, height: int) -> bytes:
    """A header that promises so many pixels, and nothing behind it."""
    chunks = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0), b"IDAT" + zlib.compress(b"")
    written = [struct.pack(">I", len(one) - 4) + one + struct.pack(">I", zlib.crc32(one)) for one in chunks]
    return b"\x89PNG\r\n\x1a\n" + b"".join(written)


def test_postscript_named_as_a_photo_starts_no_interpreter(tmp_path, monkeypatch):
    def started(*_: object, **__: object) -> None:
        raise AssertionError("Ghostscript was started")

    monkeypatch.setattr("PIL.EpsImagePlugin.Ghostscript", started)
    monkeypatch.setattr("subprocess.Popen", started)
    (tmp_path / "x.jpg").write_bytes(
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n%%EOF\n"
    )
    with pytest.raises(UnreadableImageError, match=r"x\.jpg cannot be read as an image: cannot identify"):
        decode(tmp_path / "x.jpg")


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("side", [9_500, 13_300, 60_000])
def test_a_picture_of_too_many_pixels_is_refused_by_its_header(tmp_path, side):
    (tmp_path / "bomb.png").write_bytes(png(side, side))
    with pytest.raises(
        UnreadableImageError, match=r"more than 89,478,485 pixels; if you trust it, raise PIL\.Image\.MAX"
    ):
        decode(tmp_path / "bomb.png")


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_the_limit_is_pillows_and_can_be_moved(tmp_path, monkeypatch):
    Image.new("RGB", (20, 10)).save(tmp_path / "a.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 199)
    with pytest.raises(UnreadableImageError, match="more than 199 pixels"):
        decode(tmp_path / "a.png")
    for limit in (200, None):
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
        assert decode(tmp_path / "a.png").shape == (3, 10, 20)


def test_formats_that_take_more_memory_may_have_fewer_pixels_unless_the_limit_was_moved(tmp_path, monkeypatch):
    monkeypatch.setattr(decoding, "_FEWER", 199)
    for name in ("a.webp", "a.png"):
        Image.new("RGB", (20, 10)).save(tmp_path / name)
    with pytest.raises(UnreadableImageError, match=r"a\.webp .* more than 199 pixels; if you trust it, raise PIL"):
        decode(tmp_path / "a.webp")
    assert decode(tmp_path / "a.png").shape == (3, 10, 20)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 200)
    assert decode(tmp_path / "a.webp").shape == (3, 10, 20)


def test_a_very_narrow_picture_is_refused_since_resizing_it_takes_minutes(tmp_path):
    for width in (400, 402):
        Image.new("RGB", (width, 2)).save(tmp_path / f"{width}.png")
    assert decode(tmp_path / "400.png").shape == (3, 2, 400)
    with pytest.raises(
        UnreadableImageError, match="402 x 2 pixels; one side may be up to 200 times as long as the other"
    ):
        decode(tmp_path / "402.png")


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "LA", "P", "I;16", "CMYK"])
@pytest.mark.parametrize("ending", ["jpg", "png", "tif"])
def test_a_large_picture_is_reduced_to_what_it_looks_like(tmp_path, monkeypatch, mode, ending):
    if (mode, ending) in {("RGBA", "jpg"), ("LA", "jpg"), ("P", "jpg"), ("I;16", "jpg"), ("CMYK", "png")}:
        pytest.skip("no such files")
    shades = np.kron(np.linspace(20, 230, 12).reshape(3, 4), np.ones((32, 32)))
    grey = Image.fromarray(shades.astype(np.uint8))
    image = Image.fromarray((shades * 257).astype(np.uint16)) if mode == "I;16" else grey.convert(mode)
    image.save(tmp_path / f"a.{ending}", quality=95)
    whole = decode(tmp_path / f"a.{ending}").float()
    monkeypatch.setattr(decoding, "_PLENTY", whole[0].numel() // 10)
    small = decode(tmp_path / f"a.{ending}").float()
    assert small.shape == (3, 24, 32)  # a quarter: the whole number that leaves no more than there is room for
    assert (small - torch.nn.functional.avg_pool2d(whole, 4)).abs().max() <= 2


@pytest.mark.parametrize(("room", "at_once"), [(100, 1), (2 * 1200, 2)])
def test_threads_share_the_room_for_pixels_and_what_has_none_waits_until_it_is_alone(
    tmp_path, monkeypatch, room, at_once
):
    Image.new("RGB", (40, 30)).save(tmp_path / "a.png")
    monkeypatch.setattr(decoding, "_room", decoding._Room(room))
    running, most, to_rgb, met = [0], [0], decoding._to_rgb, threading.Event()

    def counted(image):
        running[0] += 1
        most[0] = max(most[0], running[0])
        met.wait(0.02)
        running[0] -= 1
        return to_rgb(image)

    monkeypatch.setattr(decoding, "_to_rgb", counted)
    threads = [threading.Thread(target=decode, args=(tmp_path / "a.png",)) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [at_once]
    assert decoding._room._free == room


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks a process")
def test_a_process_forked_while_others_decode_can_decode_too(tmp_path, monkeypatch):
    Image.new("RGB", (40, 30)).save(tmp_path / "a.png")
    with decoding._room.taken(10**12):
        child = os.fork()
        if child == 0:
            os._exit(decode(tmp_path / "a.png").shape != (3, 30, 40))
    assert os.waitpid(child, 0)[1] == 0


def test_what_a_folder_leaves_out_is_counted_and_named(tmp_path, monkeypatch):
    formats = decoding.readable()
    monkeypatch.setattr("pace.images.datasets.readable", lambda: {name: formats[name] for name in ("JPEG", "PNG")})
    for name in ("a.heic", "b.HEIC", "c.avif", "notes\x1b[2J", ".hidden"):
        (tmp_path / name).write_bytes(b"")
    left_out = r"2 \.heic, 1 \.avif, 1 without an ending \(pip install pillow-heif to read HEIC\)"
    with pytest.raises(FileNotFoundError, match=rf"no image in .*known endings: .*\.png; found {left_out}"):
        Folder(tmp_path)
    Image.new("RGB", (4, 4)).save(tmp_path / "d.png")
    with pytest.warns(UserWarning, match=rf"since they cannot be read as images: {left_out}"):
        assert Folder(tmp_path).names == ["d.png"]


def test_a_folder_of_nothing_but_images_says_nothing(tmp_path):
    Image.new("RGB", (4, 4)).save(tmp_path / "d.png")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Folder(tmp_path)


@pytest.mark.parametrize(("name", "ending"), [("AVIF", "avif"), ("HEIF", "heic")])
def test_formats_that_not_every_machine_reads_are_read_where_it_does(tmp_path, name, ending):
    if name not in decoding.readable():
        pytest.skip(f"{name} cannot be read here")
    Image.new("RGB", (32, 24), (200, 30, 40)).save(tmp_path / f"a.{ending}")
    assert Folder(tmp_path)[0].float().mean((1, 2)) == pytest.approx([200, 30, 40], abs=4)


def test_a_heic_file_says_what_reads_it(tmp_path, monkeypatch):
    formats = decoding.readable()
    monkeypatch.setattr(decoding, "readable", lambda: {name: formats[name] for name in ("JPEG", "PNG")})
    (tmp_path / "a.HEIC").write_bytes(b"ftypheic")
    with pytest.raises(decoding.UnreadableImageError, match=r"HEIC needs pillow-heif \(pip install pillow-heif\)"):
        decoding.decode(tmp_path / "a.HEIC")


def test_one_image_to_learn_from_warns():
    one = planted(images=1).observations
    with pytest.warns(UserWarning, match="one image to learn from"):
        PACE(2, n_init=1, max_iter=2).fit(one)
