"""What the tests of the report share: images with hostile names, a quick fit, and a look into a page."""

import json
import re
import warnings
from base64 import b64decode

import numpy as np
import torch

from pace import PACE
from pace.images import ImageSet

HOSTILE = "<img src=x onerror=\"document.title='broken'\">"
HOSTILE_FILE = "</script><script>document.title='broken'</script>\u2028\"'&amp;.jpg"
HOSTILE_TITLE = "Report </title><script>document.title='broken'</script>"


class Drawn(ImageSet):
    """Images of random blocks, with names of the test's choosing."""

    def __init__(self, names, labels, class_names, size=48, seed=0):
        super().__init__(names, labels, class_names)
        blocks = np.random.default_rng(seed).integers(0, 256, (len(names), 3, 4, 4), dtype=np.uint8)
        self.pixels = torch.from_numpy(blocks.repeat(size // 4, 2).repeat(size // 4, 3))
        self._by_name = dict(zip(self.names, self.pixels, strict=True))

    def __getitem__(self, index):
        return self._by_name[self.names[index]]

    def fingerprint(self):
        return "drawn"


class AsIs:
    """Preprocessing that changes nothing."""

    size, interpolation, crop_ratio, mean, std = (48, 48), "bilinear", None, (0.5,) * 3, (0.5,) * 3


def fit(observations, perturbed=None, **settings):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a model that could be better learned will do here
        return PACE(covariance="diag", progress=False, n_init=1, **settings).fit(observations, perturbed=perturbed)


def page_data(path):
    """What a report carries as JSON."""
    return json.loads(re.search(r'id="data">(.*?)</script>', path.read_text(encoding="utf-8"), re.S)[1])


def page_pictures(path):
    """The picture files a report carries."""
    lines = re.search(r'id="pictures">(.*?)</script>', path.read_text(encoding="utf-8"), re.S)[1].split("\n")
    return [b64decode(line) for line in lines]
