"""Take the picture of the report that the README and the documentation show.

    uv run pace demo --out runs/demo
    uv run python scripts/screenshot_report.py runs/demo/report.html docs/assets/report.png

Needs Chromium, as the report's tests do. `--view` is what stands after the # in the address of a report.
"""

import argparse
import io
import os
import shutil
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright


def screenshot(report: Path, view: str, size: tuple[int, int], scheme: str) -> Image.Image:
    chromium = shutil.which("chromium")
    if chromium is None:
        raise FileNotFoundError("chromium is not on PATH; Debian and Ubuntu have it as a package of that name")
    root = hasattr(os, "geteuid") and os.geteuid() == 0  # Chromium's sandbox refuses to run as root
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"] if root else [])
        width, height = size
        page = browser.new_page(
            viewport={"width": width, "height": height}, color_scheme=scheme, reduced_motion="reduce"
        )
        page.goto(f"{report.resolve().as_uri()}#{view}")
        page.locator("h1").first.wait_for()
        page.wait_for_function("[...document.images].every((image) => image.complete)")
        picture = page.screenshot()
        browser.close()
    return Image.open(io.BytesIO(picture), formats=["PNG"]).convert("RGB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--view", default="/images/7", help="default: %(default)s")
    parser.add_argument("--size", type=int, nargs=2, default=(1440, 900), metavar=("WIDTH", "HEIGHT"))
    parser.add_argument("--scheme", choices=("light", "dark"), default="light")
    args = parser.parse_args()
    picture = screenshot(args.report, args.view, tuple(args.size), args.scheme)
    # 256 colours are enough for a page like this, and half the bytes. Pillow dithers only towards a palette it is given.
    palette = picture.quantize(256)
    picture.quantize(palette=palette, dither=Image.Dither.FLOYDSTEINBERG).save(args.picture, optimize=True)


if __name__ == "__main__":
    main()
