"""The block to explain, found by how much its patches differ within images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from pace import Observations
from pace.backbones import Backbone, Look, Preprocessing, choose_layer, layers, within_share
from pace.baselines import EveryToken
from pace.images import Color
from pace.observations import Batch

# -- the share ------------------------------------------------------------------------------------------------------------


def two_images(apart: float, spread: float, weights: tuple[float, float] = (1, 1), prefix: int = 0) -> Observations:
    """Two patches an image, `spread` either side of its middle; the middles are `apart` either side of 0."""
    embeddings = torch.tensor([[[side * apart + place * spread] for place in (-1, 1)] for side in (-1, 1)])
    attention = torch.tensor([weights, weights])
    cls = torch.full((2, prefix, 1), 1e6) * torch.tensor([-1, 1])[:, None, None]
    return Observations(
        torch.cat([cls, embeddings], 1), torch.cat([torch.full((2, prefix), 9.0), attention], 1), prefix_tokens=prefix
    )


@pytest.mark.parametrize(
    ("observations", "share"),
    [
        (two_images(1, 1), 1 / 2),
        (two_images(2, 1), 1 / 5),
        (two_images(0, 1), 1),
        (two_images(1, 0), 0),
        (two_images(0, 0), 0),
        (two_images(1, 1, weights=(30, 10)), 3 / 7),  # 3/4 and 1/4: within 3/4 of what it was, between as it was
        (two_images(1, 1, weights=(1, 0)), 0),
        (two_images(2, 1, prefix=2), 1 / 5),  # what CLS says does not count, nor how much it is attended to
    ],
)
def test_the_share_is_the_variance_within_images(observations: Observations, share: float) -> None:
    assert within_share(observations) == pytest.approx(share)


def test_the_share_does_not_depend_on_batches_units_or_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    embeddings = rng.normal(size=(41, 9, 4)) + 2 * rng.normal(size=(41, 1, 4))
    attention = rng.random((41, 9))
    share = within_share(Observations(embeddings, attention))
    assert 0.1 < share < 0.5
    assert within_share(Observations(100 * embeddings + 7, 3 * attention)) == pytest.approx(share)
    assert within_share(Observations(embeddings.astype(np.float16), attention)) == pytest.approx(share, rel=1e-2)
    monkeypatch.setattr(layers, "_BATCH", 1)
    assert within_share(Observations(embeddings, attention)) == pytest.approx(share)


def test_what_cannot_be_compared_is_refused() -> None:
    with pytest.raises(ValueError, match="expected 2 images or more"):
        within_share(two_images(1, 1)[0])
    with pytest.raises(ValueError, match="attention: found an image with none on its patches"):
        within_share(two_images(1, 1, weights=(0, 0), prefix=1))


# -- the choice -----------------------------------------------------------------------------------------------------------


class Alike(nn.Module):
    """Takes the place of a block and leaves the patches of an image hardly different from one another."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        x = self.block(x, **options)
        return x.mean(1, keepdim=True) + 1e-3 * x


def model(*alike: int, depth: int = 4) -> nn.Module:
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    made = timm.models.VisionTransformer(
        img_size=32, patch_size=8, embed_dim=16, depth=depth, num_heads=2, num_classes=3, reg_tokens=1
    )
    for number in alike:
        made.blocks[number] = Alike(made.blocks[number])
    return made.eval()


def pictures(count: int = 12) -> Tensor:
    return torch.rand(count, 3, 32, 32, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], int]]:
    """The layers of every pass, and how many images it saw."""
    passes: list[tuple[list[int], int]] = []
    own = layers.observe

    def observe(blocks: layers.Blocks, *args: Any, **options: Any) -> Observations:
        assert blocks.backbone.attention_layer == blocks.backbone.layers - 1
        seen = own(blocks, *args, **options)
        passes.append((blocks.layers, len(seen)))
        return seen

    monkeypatch.setattr(layers, "observe", observe)
    return passes


def test_a_last_block_whose_patches_differ_is_chosen_at_once(asked: list[tuple[list[int], int]]) -> None:
    assert choose_layer(model(), pictures()) == 3
    assert asked == [([3, 2], 12)]


def test_a_block_that_makes_all_patches_alike_is_passed_over(asked: list[tuple[list[int], int]]) -> None:
    said: list[str] = []
    assert choose_layer(model(3), pictures(), report=said.append) == 2
    assert asked == [([3, 2], 12)]  # all in one run
    assert len(said) == 1
    assert said[0].startswith("block 2: ")
    assert said[0].endswith("against 0.0 % at block 3")


def test_one_run_shows_every_block_as_a_run_of_its_own_does() -> None:
    made, images = model(), pictures()
    found = Backbone(made, count_cls=True).at_blocks(images, [3, 1])
    for number, layer in enumerate([3, 1]):
        alone = Backbone(made, layer, count_cls=True, attention_layer=-1)(images)
        torch.testing.assert_close(found.embeddings[..., 16 * number : 16 * number + 16], alone.embeddings)
        torch.testing.assert_close(found.attention, alone.attention)
        torch.testing.assert_close(found.predictions, alone.predictions)
    pooled = Backbone(made).at_blocks(images, [2], pooled=True).predictions
    torch.testing.assert_close(pooled, Backbone(made).pooled(images))


def test_fewer_images_are_looked_at_where_their_blocks_are_large(
    asked: list[tuple[list[int], int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layers, "_ROOM", 5 * 4 * 16 * 16 * 2)  # five images of 16 tokens at two blocks in 16 dimensions
    choose_layer(model(), pictures(40))
    assert [count for _, count in asked] == [5]


def test_blocks_of_the_first_half_are_not_asked_and_the_best_of_the_others_is_taken(
    asked: list[tuple[list[int], int]],
) -> None:
    said: list[str] = []
    assert choose_layer(model(3), pictures(), least=1, report=said.append) == 2
    assert asked == [([3, 2], 12)]  # all in one run
    assert said[0].endswith("; no block considered reaches 100.0 %")


def test_the_share_that_decides_is_that_of_the_backbone_it_is_meant_for() -> None:
    made = model(3)
    share = within_share(Backbone(made, 2, attention_layer=-1).observe(pictures()))
    other = within_share(Backbone(made, 2).observe(pictures()))
    assert share != pytest.approx(other, rel=1e-6)
    said: list[str] = []
    assert choose_layer(made, pictures(), least=share, report=said.append) == 2
    assert "no block" not in said[0]


def test_a_sample_is_drawn_with_the_seed(asked: list[tuple[list[int], int]], monkeypatch: pytest.MonkeyPatch) -> None:
    shares: list[float] = []
    monkeypatch.setattr(layers, "within_share", lambda seen: shares.append(within_share(seen)) or 1.0)
    for seed in (0, 0, 1):
        choose_layer(model(), pictures(300), seed=seed)
    assert asked == [([3, 2], 256)] * 3
    assert shares[0] == shares[1] != shares[2]


def test_every_kind_of_images_can_be_chosen_by(asked: list[tuple[list[int], int]], tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    for number in range(6):
        folder = tmp_path / "train" / "abc"[number % 3]
        folder.mkdir(parents=True, exist_ok=True)
        image.new("RGB", (32, 32), (40 * number, 9, 200)).save(folder / f"{number}.png")
    loader: DataLoader[Any] = DataLoader(pictures(), batch_size=5)
    for images in (pictures(), loader, Color("train").subset(range(7)), tmp_path, str(tmp_path)):
        choose_layer(model(), images, least=0)
    assert [count for _, count in asked] == [12, 12, 7, 6, 6]


def test_patches_that_are_merged_bound_the_search(asked: list[tuple[list[int], int]]) -> None:
    timm = pytest.importorskip("timm")
    images = torch.rand(4, 3, 64, 64)
    for depths, considered in (((2, 2), [3, 2]), ((1, 1, 1), [2])):
        swin = timm.models.SwinTransformer(
            img_size=64,
            patch_size=4,
            embed_dim=8,
            depths=depths,
            num_heads=[1] * len(depths),
            window_size=4,
            num_classes=2,
        )
        asked.clear()
        choose_layer(swin.eval(), images, least=1)
        assert [blocks for blocks, _ in asked] == [considered]


def test_for_one_image_it_is_the_last_block() -> None:
    said: list[str] = []
    assert choose_layer(model(0), pictures()[:1], report=said.append) == 3
    assert said == ["block 3, the last one: blocks are compared by several images, and there is one"]


def test_a_model_of_one_block_has_no_other(asked: list[tuple[list[int], int]]) -> None:
    assert choose_layer(model(0, depth=1), pictures()) == 0


class Own:
    """All patches of an image are alike."""

    prefix, has_cls = 0, False
    preprocessing = Preprocessing(size=(8, 8))

    def __init__(self, layers: int) -> None:
        self.layers = layers

    def dim(self, layer: int) -> int:
        return 3

    def grid(self, height: int, width: int, layer: int) -> tuple[int, int]:
        return height, width

    def look(self, images: Tensor, layer: int) -> Look:
        tokens = images.flatten(2).mT
        tokens = tokens.mean(1, keepdim=True).expand_as(tokens)
        return Look(tokens, torch.ones(tokens.shape[:2]), tokens.mean(1), None)


def test_an_object_that_looks_itself_is_asked_with_the_attention_it_gives() -> None:
    assert choose_layer(Own(2), torch.rand(4, 3, 8, 8)) == 1
    assert choose_layer(Own(4), torch.rand(4, 3, 8, 8)) in (2, 3)


def test_what_is_no_image_is_refused() -> None:
    with pytest.raises(ValueError, match="image 0: expected a tensor"):
        choose_layer(model(0), images=[1, 2, 3])


@pytest.mark.parametrize("counted", [True, False])
def test_every_token_keeps_the_other_blocks_attention(counted: bool) -> None:
    made = model()
    backbone = Backbone(made, 1, count_cls=counted, attention_layer=-1)
    found: Batch = EveryToken(backbone)(pictures(2))
    last = Backbone(made, count_cls=counted)(pictures(2)).attention
    assert found.embeddings.shape == (2, 18, 16)  # CLS, a register, 4 x 4 patches
    torch.testing.assert_close(torch.cat([found.attention[:, : int(counted)], found.attention[:, 2:]], 1), last)
    assert not found.attention[:, int(counted) : 2].any()
    assert EveryToken(backbone).fingerprint() != EveryToken(Backbone(made, 1, count_cls=counted)).fingerprint()
