"""A backbone in a few lines of arithmetic, and backbones that fail."""

from types import SimpleNamespace

import torch

from pace.observations import Batch

SIZE, COUNT = 8, 21
PREPROCESSING = SimpleNamespace(
    size=(SIZE, SIZE), mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.4), interpolation="bilinear", crop_ratio=1.0
)


class Tiny:
    """4 x 4 patches, two tokens a side, and a mean token in front."""

    layer = 0
    prefix_tokens = 1
    preprocessing = PREPROCESSING
    device = torch.device("cpu")

    def __init__(self, seed=0):
        self.seed, self.calls = seed, 0
        self.weight = torch.randn(3, 6, generator=torch.Generator().manual_seed(seed))

    def grid(self, height, width):
        return height // 4, width // 4

    def fingerprint(self):
        return f"tiny-{self.seed}"

    def __call__(self, images):
        self.calls += 1
        patches = torch.nn.functional.avg_pool2d(images, 4).flatten(2).mT
        tokens = torch.cat([patches.mean(1, keepdim=True), patches], 1) @ self.weight
        return Batch(tokens, tokens.norm(dim=-1).softmax(-1), tokens.mean(1).softmax(-1))


class Changed(Tiny):
    """Its batches go through `change(number of the call, batch)`."""

    def __init__(self, change):
        super().__init__()
        self.change = change

    def __call__(self, images):
        return self.change(self.calls, super().__call__(images))


class Broken(Tiny):
    """Fails at one call."""

    def __init__(self, at, error):
        super().__init__()
        self.at, self.error = at, error

    def __call__(self, images):
        if self.calls == self.at:
            raise self.error
        return super().__call__(images)
