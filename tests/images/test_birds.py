"""Birds: the same for good, its truth agrees with the pixels, and two parts alone decide a class."""

import numpy as np
import pytest

from pace.images import Birds
from pace.images.birds import CLASS_KINDS, KIND_NAMES, KIND_PARTS, KINDS, PART_NAMES, SHORTCUT_CLASS


@pytest.fixture(scope="module")
def birds():
    return Birds(n_per_class=25, noise=0)


def test_images_are_fixed_for_good():
    """Stored observations stay valid only as long as the same settings give the same images."""
    images = Birds()
    assert list(images.kinds(0).values()) == ["sky", "orange", "red", "long", "pale", "plain", "forked", "grey"]
    assert images[0][:, 56, 56].tolist() == [149, 102, 199]


def test_two_parts_decide_a_class_and_every_bird_fits_one(birds):
    assert birds.class_names[1] == "red head, barred wing"
    assert len(set(birds.class_names)) == len(CLASS_KINDS) == 10
    for index, label in enumerate(birds.labels):
        kinds = birds.kinds(index)
        fits = [number for number, needed in enumerate(CLASS_KINDS) if needed.items() <= kinds.items()]
        assert fits == [label]
        assert birds.deciding_parts(index) == tuple(CLASS_KINDS[label])
        assert all(kind in KINDS[part] for part, kind in kinds.items())


def test_the_other_parts_say_nothing_about_the_class():
    images = Birds(n_per_class=250)
    kinds = [images.kinds(index) for index in range(len(images))]
    for part in ("body", "beak", "eye", "wing", "tail", "legs"):
        free = [label for label, needed in enumerate(CLASS_KINDS) if part not in needed]
        for kind in KINDS[part]:
            has = np.array([found[part] == kind for found in kinds])
            shares = [has[images.labels == label].mean() for label in free]
            np.testing.assert_allclose(shares, 1 / len(KINDS[part]), atol=0.13)


def test_backgrounds_go_with_the_class_in_part(birds):
    usual = [
        birds.kinds(index)["background"] == KINDS["background"][label % 4] for index, label in enumerate(birds.labels)
    ]
    assert 0.5 < np.mean(usual) < 0.75  # a half, and a quarter of the others


def test_patches_look_as_their_kinds_say(birds):
    """Red heads are red, blue ones blue, and so on, whatever the light."""
    found = {}
    for index in range(0, len(birds), 2):
        shades, kinds = (
            birds[index].reshape(3, 28, 4, 28, 4).float().mean((2, 4)) / 255,
            birds.patch_kinds(index, (28, 28)),
        )
        for kind in np.unique(kinds):
            found.setdefault(KIND_NAMES[kind], []).append(np.median(shades.numpy()[:, kinds == kind], axis=1))
    found = {kind: np.array(shades) for kind, shades in found.items()}
    red, green, blue = found["head: red"].T
    assert (red > 2 * np.maximum(green, blue)).all()
    red, green, blue = found["head: yellow"].T
    assert (np.minimum(red, green) > 2 * blue).all()
    red, green, blue = found["head: blue"].T
    assert (blue > red).mean() > 0.9
    red, green, blue = found["body: orange"].T
    assert ((red > green) & (green > blue)).all()
    assert found["tail: forked"].max() < 0.35
    red, green, blue = found["legs: pink"].T
    assert (red > green).mean() > 0.95
    assert found["beak: short"][:, 0].min() > found["beak: long"][:, 0].mean()
    assert (found["wing: plain"][:, 2] > found["wing: plain"][:, 1]).mean() > 0.95


def test_every_part_has_patches_of_its_own_on_a_grid_of_14(birds):
    parts = np.stack([birds.patch_parts(i, least=2 / 3).ravel() for i in range(len(birds))])
    counts = np.stack([(parts == part).sum(1) for part in range(len(PART_NAMES))], 1)
    least = {"body": 6, "head": 3, "beak": 0.8, "eye": 1, "wing": 5, "tail": 3, "legs": 2, "background": 100}
    for part, number in least.items():
        assert counts[:, PART_NAMES.index(part)].mean() > number
        assert (counts[:, PART_NAMES.index(part)] > 0).mean() > 0.5
    assert not counts[:, PART_NAMES.index("tag")].any()


def test_patches_that_mix_parts_can_be_told(birds):
    whole, fine = birds.patch_kinds(3), birds.pixel_kinds(3).reshape(14, 8, 14, 8).transpose(0, 2, 1, 3)
    pure = birds.patch_kinds(3, least=1.0)
    one = (KIND_PARTS[fine] == KIND_PARTS[fine[:, :, :1, :1]]).all((2, 3))
    np.testing.assert_array_equal(pure >= 0, one)
    np.testing.assert_array_equal(pure[one], whole[one])
    parts = birds.patch_parts(3, least=2 / 3)
    assert 0.03 < (parts < 0).mean() < 0.3
    np.testing.assert_array_equal(parts < 0, birds.patch_kinds(3, least=2 / 3) < 0)


def test_parts_are_those_of_the_kinds_and_each_image_has_its_own_kinds(birds):
    for index in range(20):
        kinds = birds.patch_kinds(index)
        np.testing.assert_array_equal(birds.patch_parts(index), KIND_PARTS[kinds])
        own = {f"{part}: {kind}" for part, kind in birds.kinds(index).items()}
        assert {KIND_NAMES[kind] for kind in np.unique(kinds)} <= own | {"background: leaf in front"}


def test_a_quarter_of_the_birds_is_behind_a_leaf_but_not_the_parts_that_decide(birds):
    leaf = KIND_NAMES.index("background: leaf in front")
    leafy = [index for index in range(len(birds)) if (birds.patch_kinds(index) == leaf).any()]
    assert 0.15 < len(leafy) / len(birds) < 0.35
    for index in leafy:
        seen = {PART_NAMES[part] for part in np.unique(birds.patch_parts(index, (28, 28)))}
        assert set(birds.deciding_parts(index)) <= seen


def test_boxes_select_and_mirror(birds):
    for index in range(6):
        fine = birds.patch_kinds(index, (56, 56))
        part = birds.patch_kinds(index, (14, 28), box=(28, 56, 84, 84))
        np.testing.assert_array_equal(part, fine[28:42, 14:42])
        np.testing.assert_array_equal(birds.patch_kinds(index, (14, 28), box=(84, 56, 28, 84)), part[:, ::-1])
    np.testing.assert_array_equal(birds.subset([7]).patch_parts(0), birds.patch_parts(7))


def test_the_shortcut_is_a_tag_on_most_pictures_of_one_class_and_nothing_else():
    plain, tagged = Birds(n_per_class=20, noise=0), Birds(n_per_class=20, noise=0, shortcut=True)
    tag, count = PART_NAMES.index("tag"), 0
    for index, label in enumerate(plain.labels):
        differs = (plain[index] != tagged[index]).any(0).numpy()
        assert ("tag" in tagged.kinds(index)) == differs.any()
        if label != SHORTCUT_CLASS:
            assert not differs.any()
        elif differs.any():
            count += 1
            fine = tagged.patch_parts(index, (56, 56)) == tag
            assert (fine == differs[::2, ::2]).mean() > 0.99
            assert (tagged.patch_parts(index) == tag).sum() >= 2
    assert 12 <= count < 16
