"""Is the class decided by what the pictures of Birds are decided by? Concepts are taken away, and exchanged, by every method.

    python benchmarks/ablation.py [--per-class 60] [--methods pace,kmeans] [--shortcut birds_shortcut.safetensors]
    python benchmarks/ablation.py --run RUN

A method's concept of a part in an image is the one that has most of its patches, so that all methods answer the same questions:
what is predicted without it, and with the concept that has most of another kind in its place? True kinds are the row to compare
with. With `--shortcut`: is the tag found that a ViT trained on tagged pictures rests on, and does taking it away repair other
pictures? With `--run`: what `pace.shortcuts` lists for a `pace fit` of any pictures, and what it does not, in the same order.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import numpy as np
import torch

import pace
from pace import PACE, Backbone
from pace.ablation import ablate, hide_somehow, patches_with, shortcuts, take_away
from pace.backbones import load_finetuned
from pace.backbones.birds_vit import LAYER, SIZE, load_model, new_model
from pace.baselines import EveryToken, explainer
from pace.demo.running import N_CONCEPTS, N_PARTS
from pace.images import Birds
from pace.images.birds import CLASS_KINDS, KIND_NAMES, KIND_PARTS, PART_NAMES, SHORTCUT_CLASS
from pace.metrics import Hiding, hide
from pace.metrics.inputs import patches_of
from pace.observing.extract import observe_pair

TRUE = "true-kinds"  # the row to compare with
METHODS = f"{TRUE},pace,kmeans,gmm,semi-nmf,sae,craft,random,lot,position,attention-rank"
_SEEN = 2  # patches of a part from which it counts as there
_EXCHANGED = 300


@dataclass
class Concepts:
    """The concept (M, patches) of every patch of train and test images."""

    name: str
    train: np.ndarray
    test: np.ndarray

    def one_hot(self, split: str) -> np.ndarray:
        every = 1 + max(self.train.max(), self.test.max())
        return np.eye(every, dtype=np.float32)[getattr(self, split)]


def true_kinds(images: Birds) -> np.ndarray:
    return np.stack([images.patch_kinds(i).ravel() for i in range(len(images))])


def class_of(kinds: dict[str, str]) -> int:
    return next(c for c, deciding in enumerate(CLASS_KINDS) if deciding.items() <= kinds.items())


def concept_on(concepts: np.ndarray, where: np.ndarray) -> int:
    return int(np.bincount(concepts[where]).argmax())


def removal(hiding: Hiding, test: Birds, found: Concepts, kinds: np.ndarray) -> None:
    """Without its concept of a part, is the class another one where the part decides, and the same where it does not?"""
    parts = KIND_PARTS[kinds]
    jobs = [(i, p) for i in range(len(test)) for p in np.unique(parts[i]) if (parts[i] == p).sum() >= _SEEN]
    decides = np.array([PART_NAMES[p] in test.deciding_parts(i) for i, p in jobs])
    taken = [[concept_on(found.test[i], parts[i] == p)] for i, p in jobs]
    compare, rows = found.name == TRUE, np.array([i for i, _ in jobs])
    done = take_away(hiding, found.one_hot("test"), rows, taken, grid=(14, 14), compare=compare)
    cases = done.of_prediction()
    for name in ("after", "area", "attention") if compare else ("after",):
        drop, changed = cases["before"] - cases[name], getattr(done, name).argmax(1) != done.predicted
        print(
            f"{found.name:14} {name:9} {decides.sum()} deciding: p falls by {drop[decides].mean():.2f}, other class "
            f"{changed[decides].mean():.2f}; {(~decides).sum()} others: {drop[~decides].mean():.2f}, same class "
            f"{(~changed)[~decides].mean():.2f}",
            flush=True,
        )


def exchange(
    backbone: Backbone, train: Birds, test: Birds, found: Concepts, kinds: tuple[np.ndarray, np.ndarray]
) -> None:
    """A kind into another of the same part: is the class then the one that such a bird has?"""
    jobs = []
    for i in range(len(test)):
        own = test.kinds(i)
        for k in np.unique(kinds[1][i]):
            name, kind = KIND_NAMES[k].split(": ")
            if name == "background" or own.get(name) != kind or (kinds[1][i] == k).sum() < _SEEN:
                continue
            for to in np.flatnonzero((KIND_PARTS[k] == KIND_PARTS) & (np.arange(len(KIND_NAMES)) != k)):
                jobs.append((i, k, to, class_of({**own, name: KIND_NAMES[to].split(": ")[1]})))
    chosen = [jobs[j] for j in np.random.default_rng(0).permutation(len(jobs))[:_EXCHANGED]]
    right: dict[bool, list[bool]] = {True: [], False: []}
    of_train, of_test = found.one_hot("train"), found.one_hot("test")
    for to in sorted({job[2] for job in chosen}):
        own_jobs = [job for job in chosen if job[2] == to]
        others = patches_with(backbone, train, of_train[:, :, concept_on(found.train, kinds[0] == to)])
        rows = np.unique([job[0] for job in own_jobs])
        place = np.searchsorted(rows, [job[0] for job in own_jobs])
        taken = [[concept_on(found.test[i], kinds[1][i] == k)] for i, k, _, _ in own_jobs]
        done = take_away(hide(backbone, test, rows, others), of_test[rows], place, taken, compare=False)
        for job, got in zip(own_jobs, done.after.argmax(1), strict=True):
            right[job[3] != test.labels[job[0]]].append(got == job[3])
    shares = [float(np.mean(right[decides])) for decides in (True, False)]
    print(
        f"{found.name:14} exchanged: {len(right[True])} deciding, class as it must be {shares[0]:.2f}; {len(right[False])} "
        f"others, class kept {shares[1]:.2f}; right {np.mean(shares):.2f}",
        flush=True,
    )


def expose(backbone: Backbone, model: PACE, test: Birds) -> None:
    """Is the tag found, and does taking it away repair pictures of other classes that are given one?"""
    kinds = true_kinds(test)
    truth = KIND_PARTS[kinds] == PART_NAMES.index("tag")
    phi = model.explain(backbone.observe(test)).phi
    objects = ~np.isin(KIND_PARTS[kinds], [PART_NAMES.index(p) for p in ("background", "tag")])
    for name, where in (("true birds", objects), ("attention", None)):
        for one in shortcuts(backbone, model, test, objects=where):
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
    parser.add_argument("--methods", default=METHODS)
    parser.add_argument("--shortcut", help="a ViT that scripts/train_birds_vit.py trained with --shortcut")
    parser.add_argument("--run", help="of `pace fit`")
    options = parser.parse_args()
    if options.run is not None:
        fit = pace.load_run(options.run)
        for one in shortcuts(fit.backbone, fit.concepts, fit.images, least=-1):
            print(one, flush=True)
        return
    shortcut = options.shortcut is not None
    network = load_finetuned(new_model(), options.shortcut).model if shortcut else load_model()
    train, test = (Birds(split, options.per_class, SIZE, shortcut=shortcut) for split in ("train", "test"))
    backbone = Backbone(network, layer=LAYER, attention_layer=-1)
    if shortcut:
        seen, pair = observe_pair(backbone, train)
        expose(backbone, PACE(N_CONCEPTS, parts=N_PARTS, seed=0).fit(seen, perturbed=pair), test)
        return
    every = EveryToken(backbone)  # for methods that ask the rest of the model
    seen, pair = (every.counted(view) for view in observe_pair(every, train))
    views, kinds = (seen, every.counted(every.observe(test))), (true_kinds(train), true_kinds(test))
    hiding = hide_somehow(backbone, test, np.arange(len(test)))

    def concepts_of(name: str) -> Concepts:
        if name == TRUE:
            return Concepts(name, *kinds)
        how = {"parts": N_PARTS} if name == "pace" else {}
        method = explainer(name, n_concepts=N_CONCEPTS, **how)
        method.fit(backbone, seen, perturbed=pair)
        explanations = [method.explain(view) for view in views]
        return Concepts(name, *(patches_of(one.phi, one.prefix_tokens).argmax(2) for one in explanations))

    for name in options.methods.split(","):
        removal(hiding, test, found := concepts_of(name), kinds[1])
        exchange(backbone, train, test, found, kinds)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
