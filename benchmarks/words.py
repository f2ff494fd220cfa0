"""Are concepts of Birds given the names of what they show? With a tiny CLIP that has learned the words from other birds.

    pace fit --images birds --model birds --concepts 40 --out runs/birds
    python benchmarks/words.py runs/birds

It learns what the kinds of parts look like from crops of birds of another seed, each with the true kind at its centre. These
words are then tried on the concepts, among those of the package, which it has never seen.
"""

from __future__ import annotations

import argparse

import numpy as np
import open_clip
import torch
from open_clip.model import CLIP

import pace
from pace.images import Birds
from pace.images.birds import KIND_NAMES
from pace.observing.extract import observe
from pace.showing import summary
from pace.showing.patches import patch_box
from pace.words import GOOD, PROMPT, Words, read_words

_IMAGES, _CROPS, _STEPS, _BATCH = 400, 12, 500, 128
CAPTIONS = ["a {1} {0}".format(*kind.split(": ")) for kind in KIND_NAMES]


def crops() -> tuple[torch.Tensor, torch.Tensor]:
    """32 x 32 pixels of 5 x 5 patches, and the kind of the patch in the middle; kinds by lot, each as often."""
    birds, rng = Birds(seed=1, n_per_class=_IMAGES // 8), np.random.default_rng(0)
    pixels, kinds = [], []
    for number in range(len(birds)):
        picture, truth = birds[number], birds.patch_kinds(number).ravel()
        for kind in rng.permutation(np.unique(truth))[:_CROPS]:
            patch = int(rng.choice(np.flatnonzero(truth == kind)))
            rows, columns = patch_box(patch, (14, 14), picture.shape[1:], 2)
            crop = picture[:, rows, columns][None].float() / 255
            pixels.append(
                torch.nn.functional.interpolate(crop, (32, 32), mode="bicubic", antialias=True)[0].clamp(0, 1)
            )
            kinds.append(int(kind))
    return torch.stack(pixels), torch.tensor(kinds)


def learn() -> CLIP:
    torch.manual_seed(0)
    text = {"context_length": 16, "vocab_size": 49408, "width": 64, "heads": 1, "layers": 2}
    vision = {"layers": 3, "width": 64, "head_width": 16, "patch_size": 8, "image_size": 32}
    model = CLIP(64, vision, text)
    tokens = open_clip.tokenize([PROMPT.format(caption) for caption in CAPTIONS], 16)
    images, kinds = crops()
    from pace.backbones.preprocessing import NORMALIZATIONS

    mean, std = (torch.tensor(values).view(3, 1, 1) for values in NORMALIZATIONS["clip"])
    images = (images - mean) / std
    model.token_embedding.requires_grad_(False)
    adam = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad], lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(adam, 2e-3, _STEPS)
    for step in range(_STEPS):
        some = torch.randint(len(images), (_BATCH,))
        near = model.encode_image(images[some], normalize=True) @ model.encode_text(tokens, normalize=True).T
        loss = torch.nn.functional.cross_entropy(model.logit_scale.exp() * near, kinds[some])
        adam.zero_grad()
        loss.backward()
        adam.step()
        schedule.step()
        if step % 50 == 49:
            print(f"step {step + 1}: loss {loss.item():.2f}", flush=True)
    return model.eval().requires_grad_(False)


def truth_of(explainer: pace.ModelExplainer, seen: pace.Observations, rows: list[int]) -> list[tuple[str, float]]:
    """What most of the typical patches of every concept show, and how many of these are."""
    found = []
    for typical in summary.typical_patches(explainer.concepts.means_, seen, 16):
        shown = [explainer.images.patch_kinds(rows[image]).ravel()[patch] for image, patch in typical.tolist()]
        counts = np.bincount(shown, minlength=len(KIND_NAMES))
        found.append((CAPTIONS[int(counts.argmax())].removeprefix("a "), float(counts.max() / len(shown))))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    args = parser.parse_args()
    explainer = pace.load_run(args.run, device="cpu")
    clip, rows = learn(), np.unique(np.linspace(0, len(explainer.images) - 1, 500).astype(int)).tolist()
    images = explainer.images.subset(rows)
    seen = observe(explainer.backbone, images)
    truth, looking = truth_of(explainer, seen, rows), Words(explainer, clip, images, seen)
    found = looking.suggest([*CAPTIONS, *read_words()])
    for one in found:
        name, pure = truth[one.concept]
        said = one.name or f"no good name ({one.closest})"
        print(f"{looking.names[one.concept].short:4} {said:36} {one.score:.2f}   {name} in {pure:.0%} of them")
    named = [one for one in found if one.name]
    right = [one.name == truth[one.concept][0] for one in named]
    print(
        f"{len(named)} of {len(found)} get a name; it is what most of their typical patches show in {np.mean(right):.0%}"
    )
    for caption in CAPTIONS:
        best = looking.find(caption)[0]
        print(f"find {caption!r}: {looking.names[best.concept].short} {best.score:.2f}, {truth[best.concept][0]}")
    crops = looking._crops
    looking._crops = crops.flatten(0, 1)[torch.randperm(crops.shape[0] * crops.shape[1])].view_as(crops)
    shuffled = [one.score >= GOOD for one in looking.suggest([*CAPTIONS, *read_words()])]
    print(f"with the crops of all concepts shuffled, {sum(shuffled)} of {len(shuffled)}")


if __name__ == "__main__":
    main()
