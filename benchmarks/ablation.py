"""Is the class decided by what the pictures of Birds are decided by? Concepts are taken away, and kinds exchanged.

    python benchmarks/ablation.py [--per-class 60] [--shortcut birds_shortcut.safetensors]

Three sets of concepts: every patch's true kind; the share of every kind in a patch, as the best φ there could be; PACE's. With
`--shortcut`: is the tag found that a ViT trained on tagged pictures rests on, and does taking it away repair other pictures?
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import numpy as np
import torch

from pace import PACE, Backbone
from pace.ablation import ablate, hide_somehow, patches_with, shortcuts, take_away
from pace.backbones import load_finetuned
from pace.backbones.birds_vit import LAYER, SIZE, load_model, new_model
from pace.demo.running import N_CONCEPTS, N_PARTS
from pace.images import Birds
from pace.images.birds import CLASS_KINDS, KIND_NAMES, KIND_PARTS, PART_NAMES, SHORTCUT_CLASS
from pace.metrics import hide
from pace.observing.extract import observe_pair

_FINE = 8  # points each way of a patch, at which its kinds are looked up
_DROP = 0.1  # loss of ŷ from which a concept counts as one that decided
_EXCHANGED = 300


@dataclass
class Concepts:
    """φ of train and test images, and the true kind that each concept stands for."""

    name: str
    train: np.ndarray
    test: np.ndarray
    kind: np.ndarray


def true_kinds(images: Birds) -> np.ndarray:
    return np.stack([images.patch_kinds(i).ravel() for i in range(len(images))])


def kind_shares(images: Birds) -> np.ndarray:
    """(M, patches, kinds)"""
    fine = np.stack([images.patch_kinds(i, (14 * _FINE,) * 2) for i in range(len(images))])
    cells = fine.reshape(len(fine), 14, _FINE, 14, _FINE)
    return np.stack([(cells == k).mean((2, 4)) for k in range(len(KIND_NAMES))], -1).reshape(len(fine), 196, -1)


def class_of(kinds: dict[str, str]) -> int:
    return next(c for c, deciding in enumerate(CLASS_KINDS) if deciding.items() <= kinds.items())


def removal(backbone: Backbone, test: Birds, found: Concepts) -> None:
    """Every concept of an image with two patches or more, alone; it decides if it has half of a deciding part."""
    truth = KIND_PARTS[true_kinds(test)]
    jobs, decides = [], []
    for i in range(len(test)):
        held = found.test[i] > 0.5
        for k in np.flatnonzero(held.sum(0) >= 2):
            parts = [PART_NAMES.index(part) for part in test.deciding_parts(i)]
            share = max((held[truth[i] == p, k].mean() if (truth[i] == p).any() else 0.0) for p in parts)
            if share >= 0.5 or share == 0:
                jobs.append((i, k))
                decides.append(share >= 0.5)
    done = take_away(
        hide_somehow(backbone, test, np.arange(len(test))), found.test, np.array([i for i, _ in jobs]),
        [[k] for _, k in jobs], grid=(14, 14),
    )  # fmt: skip
    cases, decides = done.of_prediction(), np.array(decides)
    for name in ("after", "area", "attention"):
        changed = (getattr(done, name) if name != "after" else done.after).argmax(1) != done.predicted
        drop = cases["before"] - cases[name]
        print(
            f"{found.name:12} {name:9} {decides.sum():4} deciding: drop {drop[decides].mean():.2f}, > {_DROP} in "
            f"{(drop > _DROP)[decides].mean():.2f}, other class {changed[decides].mean():.2f}; {(~decides).sum():4} others: "
            f"drop {drop[~decides].mean():.2f}, ≤ {_DROP} in {(drop <= _DROP)[~decides].mean():.2f}, same class "
            f"{(~changed)[~decides].mean():.2f}",
            flush=True,
        )


def exchange(backbone: Backbone, train: Birds, test: Birds, found: Concepts) -> None:
    """A kind into another of the same part: is the class then the one that such a bird has?"""
    rng, part, right = np.random.default_rng(0), KIND_PARTS[found.kind], {True: [], False: []}
    jobs = []
    for i in range(len(test)):
        kinds = test.kinds(i)
        for k in np.flatnonzero((found.test[i] > 0.5).sum(0) >= 2):
            name, kind = KIND_NAMES[found.kind[k]].split(": ")
            if name == "background" or kinds.get(name) != kind:
                continue
            for to in np.flatnonzero((part == part[k]) & (found.kind != found.kind[k])):
                jobs.append((i, k, to, class_of({**kinds, name: KIND_NAMES[found.kind[to]].split(": ")[1]})))
    chosen = [jobs[j] for j in rng.permutation(len(jobs))[:_EXCHANGED]]
    for to in sorted({job[2] for job in chosen}):
        own = [job for job in chosen if job[2] == to]
        try:
            others = patches_with(backbone, train, found.train[:, :, to])
        except ValueError:
            continue
        rows = np.unique([job[0] for job in own])
        hiding = hide(backbone, test, rows, others)
        place = np.searchsorted(rows, [job[0] for job in own])
        done = take_away(hiding, found.test[rows], place, [[job[1]] for job in own], compare=False)
        for job, got in zip(own, done.after.argmax(1), strict=True):
            right[job[3] != test.labels[job[0]]].append(got == job[3])
    print(
        f"{found.name:12} exchanged: {len(right[True]):3} deciding, class as it must be {np.mean(right[True]):.2f}; "
        f"{len(right[False]):3} others, class kept {np.mean(right[False]):.2f}",
        flush=True,
    )


def expose(backbone: Backbone, model: PACE, test: Birds) -> None:
    """Is the tag found, and does taking it away repair pictures of other classes that are given one?"""
    kinds = true_kinds(test)
    truth = KIND_PARTS[kinds] == PART_NAMES.index("tag")
    phi = model.explain(backbone.observe(test)).phi
    objects = ~np.isin(KIND_PARTS[kinds], [PART_NAMES.index(p) for p in ("background", "tag")])
    for name, where in (("true birds", objects), ("attention", None)):
        for one in shortcuts(backbone, model, test, objects=where)[:5]:
            share = phi[:, :, one.concept][truth].sum() / phi[:, :, one.concept].sum()
            print(f"{name:10} {one}; {share:.2f} of it on the tag", flush=True)
    tag = int(phi[truth].mean(0).argmax())
    others = np.flatnonzero(test.labels != SHORTCUT_CLASS)
    pictures = torch.stack([test[int(i)] for i in others]).float() / 255
    tagged, plain = test, Birds("test", len(test) // 2, SIZE)  # the same pictures without the tag
    have = [i for i in np.flatnonzero(test.labels == SHORTCUT_CLASS) if "tag" in test.kinds(i)]
    for n, image in enumerate(pictures):
        i = int(have[n % len(have)])
        there = (tagged[i] != plain[i]).any(0)
        image[:, there] = tagged[i][:, there].float() / 255
    done, labels = ablate(backbone, model, pictures, tag), test.labels[others]
    print(f"concept {tag} is on the tag most ({phi[truth][:, tag].mean():.2f} of the tag's patches)")
    for case in ("before", "after", "area", "attention"):
        classes = getattr(done, case).argmax(1)
        print(
            f"{len(others)} pictures of other classes with a tag, {case}: {np.mean(classes == SHORTCUT_CLASS):.2f} taken for "
            f"the tagged class, {np.mean(classes == labels):.2f} right",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--per-class", type=int, default=60)
    parser.add_argument("--shortcut", help="a ViT that scripts/train_birds_vit.py trained with --shortcut")
    options = parser.parse_args()
    shortcut = options.shortcut is not None
    network = load_finetuned(new_model(), options.shortcut).model if shortcut else load_model()
    train, test = (Birds(split, options.per_class, SIZE, shortcut=shortcut) for split in ("train", "test"))
    backbone = Backbone(network, layer=LAYER, attention_layer=-1)
    seen, pair = observe_pair(backbone, train)
    model = PACE(N_CONCEPTS, parts=N_PARTS, seed=0).fit(seen, perturbed=pair)
    if shortcut:
        expose(backbone, model, test)
        return
    hard = [np.eye(len(KIND_NAMES))[true_kinds(images)] for images in (train, test)]
    phis = [model.explain(some).phi for some in (seen, backbone.observe(test))]
    kind = np.einsum("mjk,mjt->kt", phis[0], hard[0]).argmax(1)
    every = np.arange(len(KIND_NAMES))
    for found in (
        Concepts("true kinds", *hard, every),
        Concepts("true shares", *(kind_shares(images) for images in (train, test)), every),
        Concepts("PACE", *phis, kind),
    ):
        removal(backbone, test, found)
        exchange(backbone, train, test, found)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
