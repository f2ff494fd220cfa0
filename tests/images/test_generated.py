"""What holds for Color and Birds alike: images are fixed by their settings and place, and impossible settings are refused."""

import numpy as np
import pytest
import torch

from pace.images import Birds, Color, open_images

KINDS = pytest.mark.parametrize("kind", [Color, Birds])
SETTINGS = [{"seed": 1}, {"noise": 0.2}, {"size": 24}, {"split": "test"}]
IMPOSSIBLE = [{"size": 1}, {"n_per_class": 1}, {"noise": -0.1}, {"noise": float("nan")}, {"seed": -1}]


@KINDS
def test_1600_train_and_400_test_images_balanced_and_disjoint(kind):
    train, test = kind("train"), open_images(kind.__name__.lower(), split="test")
    classes = len(train.class_names)
    for part, share in ((train, 1600), (test, 400)):
        np.testing.assert_array_equal(np.bincount(part.labels), [share // classes] * classes)
    assert len({*train.names, *test.names}) == 2000
    side = 224 if kind is Color else 112
    assert (train[0].shape, train[0].dtype) == ((3, side, side), torch.uint8)


@KINDS
def test_an_image_depends_neither_on_what_was_drawn_before_nor_on_the_number_of_images(kind):
    few, many = kind(n_per_class=10, size=32), kind(n_per_class=50, size=32)
    shared = sorted(set(few.names) & set(many.names))
    assert shared
    for name in reversed(shared):
        assert torch.equal(few[few.names.index(name)], many[many.names.index(name)])
    assert not torch.equal(many[0], many[1])


@KINDS
def test_seed_and_settings_change_images_and_fingerprint(kind):
    plain, settings = kind(size=32), [*SETTINGS, *([{"shortcut": True}] if kind is Birds else [])]
    assert not torch.equal(plain[0], kind(size=32, seed=1)[0])
    others = [kind(**{"size": 32} | setting) for setting in settings]
    prints = {plain.fingerprint(), plain.subset([1]).fingerprint(), *(other.fingerprint() for other in others)}
    assert len(prints) == len(settings) + 2
    assert plain.fingerprint() == kind(size=32).fingerprint()


@KINDS
@pytest.mark.parametrize("setting", IMPOSSIBLE)
def test_impossible_settings_are_refused(kind, setting):
    with pytest.raises(ValueError, match=f"{kind.__name__}: expected .* found .*{next(iter(setting))}="):
        kind(**setting)
    with pytest.raises(ValueError, match="split 'val' does not exist"):
        kind("val")
