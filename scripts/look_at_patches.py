"""Draw the three levels of a fit for test images at fixed places, so that nobody chooses them.

    uv run python scripts/look_at_patches.py runs/fit-cub --out cub.png

The images shown are the first, the last and those at equal distances between them; patches of the concepts come from 49 such
images. Which concepts are shown follows from the images' θ.
"""

import argparse
import warnings

import numpy as np
import torch

from pace.cli.fit_runs import open_fit
from pace.cli.options import ImageOptions
from pace.showing import figures

_OBSERVED, _EVERY = 49, 12  # images, of which every so many is shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="folder of a `pace fit`")
    parser.add_argument("--split", default="test")
    parser.add_argument("--concepts", type=int, default=8)
    parser.add_argument("--out", default="patches.png")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore", UserWarning)
    fit = open_fit(arguments.run, torch.device("cpu"), None)
    images = fit.other_images(ImageOptions(split=arguments.split)).open()
    rows = np.linspace(0, len(images) - 1, _OBSERVED).astype(int)
    some, backbone = images.subset(rows.tolist()), fit.model.backbone
    seen = backbone.observe(some)
    shown = list(range(0, _OBSERVED, _EVERY))
    figure = figures.three_levels(
        fit.concepts, some, seen, preprocessing=backbone.preprocessing, shown=shown, n_concepts=arguments.concepts, factor=1
    )  # fmt: skip
    figure.savefig(arguments.out, dpi=130)
    print(f"images {', '.join(map(str, rows[shown]))} of {len(images)}: {arguments.out}")


if __name__ == "__main__":
    main()
