"""Take the picture of the report that the README and the documentation show.

    uv run pace demo --out runs/demo
    uv run python scripts/screenshot_report.py runs/demo/report.html docs/assets/report.png

Needs Chromium, as the report's tests do. `--view` is what stands after the # in the address of a report. Instead of a
report, the address of a live page, a picture to drop on it, and which part to switch off:

    uv run pace serve runs/demo/run --images birds
    uv run python scripts/screenshot_report.py http://127.0.0.1:… docs/assets/serve.png --drop bird.png --off 1
"""

import argparse
import io
import os
import shutil
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright


def screenshot(
    address: str, view: str, size: tuple[int, int], scheme: str, dropped: Path | None = None, off: int | None = None
) -> Image.Image:
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
        page.goto(f"{address}#{view}")
        page.locator("h1").first.wait_for()
        if dropped:
            page.locator("input[type=file]").set_input_files(dropped)
            page.get_by_role("heading", name=dropped.name).wait_for()
        if off:
            page.get_by_role("switch").nth(off - 1).click()
            page.get_by_text("without as much of the picture elsewhere").wait_for()
            page.evaluate("scrollTo(0, 0)")
        page.wait_for_function("[...document.images].every((image) => image.complete)")
        picture = page.screenshot()
        browser.close()
    return Image.open(io.BytesIO(picture), formats=["PNG"]).convert("RGB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", help="a file, or the address of a live page")
    parser.add_argument("picture", type=Path)
    parser.add_argument("--view", default="/images/7", help="default: %(default)s")
    parser.add_argument("--size", type=int, nargs=2, default=(1440, 900), metavar=("WIDTH", "HEIGHT"))
    parser.add_argument("--scheme", choices=("light", "dark"), default="light")
    parser.add_argument("--drop", type=Path)
    parser.add_argument("--off", type=int, help="1 for the image's largest part")
    args = parser.parse_args()
    address = args.report if args.report.startswith("http") else Path(args.report).resolve().as_uri()
    picture = screenshot(address, args.view, tuple(args.size), args.scheme, args.drop, args.off)
    # 256 colours are enough for a page like this, and half the bytes. Pillow dithers only towards a palette it is given.
    palette = picture.quantize(256)
    picture.quantize(palette=palette, dither=Image.Dither.FLOYDSTEINBERG).save(args.picture, optimize=True)


if __name__ == "__main__":
    main()
