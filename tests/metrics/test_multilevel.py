import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from pace import Explanation
from pace.metrics import cls_weight, concepts_per_image, find_levels, levels, patch_variety

PHI = arrays(
    np.float64,
    st.tuples(st.integers(1, 4), st.integers(1, 5), st.integers(1, 5)),
    elements=st.floats(0, 5, width=32),
)


def patches(*rows):
    return np.eye(4)[np.array(rows)]


def test_distinct_concepts_are_counted_in_every_image_without_the_prefix():
    phi = patches([3, 0, 0, 1], [3, 2, 2, 2])
    assert concepts_per_image(phi, 1) == pytest.approx(1.5)
    assert concepts_per_image(phi) == pytest.approx(2.5)


def test_patch_variety_by_hand():
    assert patch_variety(patches([0, 1, 2, 3])) == pytest.approx(4)
    assert patch_variety(patches([0, 0, 1, 1], [2, 2, 2, 2])) == pytest.approx(1.5)
    assert patch_variety(patches([3, 1, 1, 1]), 1) == pytest.approx(1)


def test_one_concept_for_all_patches_and_all_concepts_for_every_patch_are_no_variety():
    uniform = np.full((2, 9, 4), 0.25)
    assert concepts_per_image(uniform) == 1
    assert patch_variety(uniform) == pytest.approx(1)
    assert patch_variety(patches([2] * 9)) == pytest.approx(1)
    flicker = uniform + 1e-3 * np.random.default_rng(0).random(uniform.shape)
    assert concepts_per_image(flicker) > 2  # the largest of nearly equal entries is noise
    assert patch_variety(flicker) == pytest.approx(1, abs=1e-4)


def test_the_weight_of_cls_is_its_share():
    attention = np.array([[0.2, 0.4, 0.4], [3.0, 0.5, 0.5]])
    assert cls_weight(attention) == pytest.approx((0.2 + 0.75) / 2)
    assert cls_weight(attention, 0) == 0
    assert cls_weight(attention, 2) == pytest.approx((0.6 + 0.875) / 2)


def test_levels_are_found_and_not_believed():
    theta, phi = np.eye(4)[[0, 1, 2]], patches([0, 1, 1], [1, 2, 2], [2, 3, 3])
    described = np.arange(8.0).reshape(4, 2)

    def found(theta=theta, phi=phi, concepts=described):
        return find_levels(Explanation(theta, theta, phi), concepts)

    assert found() == (True, True, True)
    assert str(found()) == "full"
    assert found(concepts=None) == (False, True, True)
    assert str(found(concepts=None)) == "partial"
    assert str(found(concepts=None, phi=None)) == "no"
    assert not found(concepts=np.ones((4, 2))).dataset  # all concepts are the same
    assert not found(concepts=described[:3]).dataset  # of another number of concepts
    assert not found(concepts=np.full((4, 2), np.nan)).dataset
    assert not found(theta=np.full((3, 4), 0.25)).image
    assert not found(phi=np.repeat(theta[:, None], 3, 1)).patch  # one concept for all patches
    assert levels(Explanation(theta, theta, phi), described) == 3
    assert levels(Explanation(theta, theta), None) == 1


@given(PHI)
@settings(deadline=None, max_examples=30)
def test_ranges_and_symmetries(phi):
    most = min(phi.shape[1], phi.shape[2])
    concepts, tokens = (np.random.default_rng(0).permutation(n) for n in (phi.shape[2], phi.shape[1]))
    assert 1 <= concepts_per_image(phi) <= most
    variety = patch_variety(phi)
    assert 1 <= variety <= most + 1e-9
    assert patch_variety(phi[:, :, concepts]) == pytest.approx(variety)
    assert patch_variety(phi[:, tokens]) == pytest.approx(variety)
    assert concepts_per_image(phi[:, tokens]) == concepts_per_image(phi)


@pytest.mark.parametrize("metric", [concepts_per_image, patch_variety])
def test_bad_patches_are_refused(metric):
    with pytest.raises(ValueError, match=r"phi: expected numbers of shape \(images, tokens, concepts\)"):
        metric(np.ones((3, 4)))
    with pytest.raises(ValueError, match="phi of image 1 is NaN or infinite"):
        metric(np.array([[[1.0]], [[np.nan]]]))
    with pytest.raises(ValueError, match="prefix_tokens: expected 0 to 2; found 3"):
        metric(np.ones((1, 3, 2)), 3)


def test_bad_attention_is_refused():
    for attention in ([[0.5, -0.5]], [[0.0, 0.0]]):
        with pytest.raises(ValueError, match="not negative, and not all 0"):
            cls_weight(attention)
    with pytest.raises(ValueError, match="prefix_tokens: expected 0 to 2; found 3"):
        cls_weight([[0.5, 0.5]], 3)
