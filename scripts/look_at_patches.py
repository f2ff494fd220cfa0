"""Draw the three-level figure of a fit for evenly spaced test images, so that nobody picks them by hand.

    uv run python scripts/look_at_patches.py runs/fit-cub --out cub.png

Five images are shown: the first, the last and three between them. Typical patches come from 49 such images, and the concepts
are those with the largest θ in the images shown.
"""

import argparse
import warnings

import numpy as np
import torch

from pace.cli.fitted import open_fitted
from pace.showing import figures

_OBSERVED, _EVERY = 49, 12  # images, of which every 12th is shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="folder of a `pace fit`")
    parser.add_argument("--split", default="test")
    parser.add_argument("--concepts", type=int, default=8)
    parser.add_argument("--out", default="patches.png")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore", UserWarning)
    fitted = open_fitted(arguments.run, torch.device("cpu"), None)
    images = fitted.other_images(None, None, arguments.split, None, 0, False).open()
    rows = np.linspace(0, len(images) - 1, _OBSERVED).astype(int)
    some, backbone = images.subset(rows.tolist()), fitted.subject.backbone
    seen = backbone.observe(some)
    shown = list(range(0, _OBSERVED, _EVERY))
    figure = figures.three_levels(
        fitted.concepts, some, seen, preprocessing=backbone.preprocessing, shown=shown, n_concepts=arguments.concepts, factor=1
    )  # fmt: skip
    figure.savefig(arguments.out, dpi=130)
    print(f"images {', '.join(map(str, rows[shown]))} of {len(images)}: {arguments.out}")


if __name__ == "__main__":
    main()
