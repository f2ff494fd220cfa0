import gc

import numpy as np
import pytest
import torch
from toys import GRID, Toy, linear, read_by_all, read_by_cls

from pace import Backbone, Observations
from pace.baselines import EveryToken, SplitObservations, last_block
from pace.baselines.head import Head


def with_registers(read: bool) -> Toy:
    """CLS, two registers, six patches; h reads CLS and, if `read`, the registers."""
    return Toy(lambda e: torch.stack([e[:, 0].sum(1), e[:, 1:3].sum((1, 2)) * read], 1), d=4, prefix=3)


def test_it_finds_the_tokens_that_the_model_reads():
    assert Head(read_by_cls(5, 3), read_by_cls(5, 3).observe(2, 0)).reads.tolist() == [0]
    assert Head(read_by_all(5, 3), read_by_all(5, 3).observe(2, 0)).reads.tolist() == list(range(7))


@pytest.mark.parametrize("make", [read_by_cls, read_by_all])
def test_logits_of_the_tokens_read_are_the_models_own(make):
    toy = make(5, 3)
    observations = toy.observe(4, 0)
    head = Head(toy, observations)
    (part,) = head.parts(observations, 10)
    torch.testing.assert_close(head(part.tokens), toy.h(observations.embeddings))
    assert head.n_classes == 3
    assert part.targets.tolist() == observations.predictions.argmax(1).tolist()


def test_registers_that_are_read_may_not():
    toy = with_registers(read=True)
    with pytest.raises(
        ValueError,
        match=r"reads 2 tokens of this layer that the observations leave out .* EveryToken\(backbone\)\.observe",
    ):
        Head(toy, toy.observe(3, 0))


@pytest.mark.parametrize("counted", [1, 0])
def test_what_does_not_count_goes_through_the_model_beside_what_does(counted):
    toy, weights = linear(4, 3, 9)
    tokens = torch.randn(3, 9, 4, generator=torch.Generator().manual_seed(0))
    whole = Observations(tokens, torch.ones(3, 9), toy.h(tokens).softmax(1), grid=GRID, prefix_tokens=3)
    observations = SplitObservations.of(whole, counted)
    toy.prefix = 3
    head = Head(toy, observations)
    assert head.reads.tolist() == list(range(6 + counted))
    (part,) = head.parts(observations, 3)
    torch.testing.assert_close(part.tokens, tokens[:, [*range(counted), *range(3, 9)]])
    torch.testing.assert_close(part.logits(part.tokens), toy.h(tokens))
    # Two variants of every image: each goes with its own image's rest.
    changed = torch.stack([part.tokens, part.tokens + 1], 1)
    more = torch.stack([tokens, tokens + 1], 1)
    more[:, 1, counted:3] = tokens[:, counted:3]
    torch.testing.assert_close(part.logits(changed.flatten(0, 1)), toy.h(more.flatten(0, 1)))
    torch.testing.assert_close(part.gradient(part.tokens), weights[part.targets][:, [*range(counted), *range(3, 9)]])
    with pytest.raises(ValueError, match=f"reads {3 - counted} tokens"):
        list(
            head.parts(
                Observations(observations.embeddings, torch.ones(3, 6 + counted), grid=GRID, prefix_tokens=counted), 3
            )
        )


@pytest.mark.parametrize("stored", [False, True])
def test_of_two_blocks_the_last_goes_on_into_the_model(stored, tmp_path):
    timm = pytest.importorskip("timm")
    vit = timm.models.VisionTransformer(
        img_size=16, patch_size=8, embed_dim=16, depth=3, num_heads=2, num_classes=3, reg_tokens=1, global_pool="avg"
    ).eval()
    images = torch.rand(3, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    both, alone = (Backbone(vit, layer, attention_layer=-1) for layer in ((0, 1), 1))
    options = {"store": tmp_path / "kept"} if stored else {}
    seen = EveryToken(both).observe(images, **options)
    assert (seen.dim, seen.blocks) == (32, 2)
    last = last_block(seen)
    assert (last.dim, last.blocks) == (16, 1)
    assert last_block(last) is last
    expected = EveryToken(alone).observe(images)
    np.testing.assert_allclose(last[[2, 0]].embeddings, expected.embeddings[[2, 0]], atol=2e-3)
    np.testing.assert_allclose(last.rest, expected.rest, atol=2e-3)
    (part,) = Head(both, last).parts(last, 3)
    torch.testing.assert_close(
        part.logits(part.tokens).softmax(1), torch.as_tensor(np.array(seen.predictions)), atol=2e-3, rtol=0
    )


def test_observations_of_another_model_are_refused():
    with pytest.raises(ValueError, match="7 tokens of 6 dimensions, but this layer has 7 of 5"):
        Head(read_by_all(5, 3), read_by_all(6, 3).observe(2, 0))


def test_images_of_another_size_are_told_by_their_grid():
    toy = read_by_all(5, 3)
    sizes = []
    forward = toy.forward_from
    toy.forward_from = lambda tokens, size=None: sizes.append(size) or forward(tokens)
    tokens = torch.randn(2, 1 + 4 * 6, 5)
    Head(toy, Observations(tokens, torch.ones(2, 25), grid=(4, 6), prefix_tokens=1))
    assert set(sizes) == {(8, 12)}


@pytest.mark.parametrize("one", [True, False])
def test_observations_read_by_one_token_are_read_once_and_let_go(one):
    class Counted:
        def __init__(self, array):
            self.array, self.shape, self.reads = array, array.shape, 0

        def __getitem__(self, key):
            self.reads += 1
            return self.array[key]

    toy = (read_by_cls if one else read_by_all)(5, 3)
    plain = toy.observe(6, 0)
    embeddings = Counted(np.asarray(plain.embeddings))
    observations = Observations(embeddings, plain.attention, plain.predictions, grid=GRID, prefix_tokens=1)
    head = Head(toy, observations)
    embeddings.reads = 0
    for _ in range(5):
        list(head.parts(observations, 6))
    assert embeddings.reads == (1 if one else 5)
    del observations
    gc.collect()
    assert len(head._held) == 0
