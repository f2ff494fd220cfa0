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
from pace.backbones import Backbone, Look, Preprocessing, choose_layer, kept_share, layers
from pace.baselines import EveryToken
from pace.images import Color
from pace.observations import Batch

# -- the share ------------------------------------------------------------------------------------------------------------

WHOLE, MIRRORED, LEFT = (0, 0, 1, 1), (1, 0, 0, 1), (0, 0, 0.5, 1)


def both(patches: Any, view: Any, crop: Any = WHOLE, weights: Any = (1, 1), prefix: int = 0) -> Any:
    """An image of two patches side by side, one number each, and its view."""
    made = []
    for values in (patches, view):
        tokens = torch.tensor([[*[1e6] * prefix, *values]], dtype=torch.float64)[:, :, None]
        attention = torch.tensor([[*[9] * prefix, *weights]])
        made.append(Observations(tokens, attention, grid=(1, 2), prefix_tokens=prefix, crops=np.array([crop])))
    return made


@pytest.mark.parametrize(
    ("views", "share"),
    [
        (both((-1, 1), (-1, 1)), 1),
        (both((-1, 1), (1, -1)), -1),  # a view that changes patches as much as two patches differ: ½ 2² of 1
        (both((-1, 1), (1, -1), MIRRORED), 1),  # the same place is compared
        (both((-1, 1), (-1, -1), LEFT), 1),
        (both((-1, 1), (0, 1)), 1 - 1 / 4),
        (both((-1, 1), (0, 1), weights=(3, 1)), 1 - 3 / 4 / 2 / (3 / 4)),
        (both((-1, 1), (0, 1), prefix=2), 1 - 1 / 4),  # what CLS says does not count, nor how much it is attended to
        (both((1, 1), (1, 0)), 0),
    ],
)
def test_the_share_is_what_a_view_leaves_of_the_variance_within_images(views: Any, share: float) -> None:
    assert kept_share(*views) == pytest.approx(share)


def test_the_share_does_not_depend_on_batches_units_or_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    embeddings, attention = rng.normal(size=(41, 9, 4)), rng.random((41, 9))
    moved, crops = (
        embeddings + 0.7 * rng.normal(size=embeddings.shape),
        (rng.random((41, 4)) + np.array([0, 0, 1, 1])) / 2,
    )

    def share(scale: float = 1, shift: float = 0, dtype: Any = np.float64) -> float:
        views = [(scale * view + shift).astype(dtype) for view in (embeddings, moved)]
        return kept_share(*(Observations(view, scale * attention, grid=(3, 3), crops=crops) for view in views))

    plain = share()
    assert share(100, 7) == pytest.approx(plain)
    assert share(dtype=np.float16) == pytest.approx(plain, rel=1e-2)
    monkeypatch.setattr(layers, "_BATCH", 1)
    assert share() == pytest.approx(plain)


def test_what_cannot_be_compared_is_refused() -> None:
    with pytest.raises(ValueError, match="attention: found an image with none on its patches"):
        kept_share(*both((-1, 1), (-1, 1), weights=(0, 0), prefix=1))
    seen, _ = both((-1, 1), (-1, 1))
    with pytest.raises(ValueError, match="expected observations with crops"):
        kept_share(seen, Observations(np.ones((1, 2, 1)), np.ones((1, 2)), grid=(1, 2)))


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
    own = layers.observe_pair

    def observe_pair(blocks: layers.Blocks, *args: Any, **options: Any) -> tuple[Observations, Observations]:
        assert blocks.backbone.attention_layer == blocks.backbone.layers - 1
        views = own(blocks, *args, **options)
        passes.append((blocks.layers, len(views[0])))
        return views

    monkeypatch.setattr(layers, "observe_pair", observe_pair)
    return passes


def test_a_block_whose_patches_a_change_of_view_leaves_alone_tells_parts_and_the_last_one_kinds(
    asked: list[tuple[list[int], int]],
) -> None:
    said: list[str] = []
    assert choose_layer(model(3), pictures(), report=said.append) == (2, 3)
    assert asked == [([2, 3], 12)]  # all in one run
    assert len(said) == 1
    assert said[0].startswith("parts at block 2, where a change of view leaves ")
    assert said[0].endswith(" at 3); kinds at block 3, the last")


def test_a_last_block_as_good_as_the_best_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for shares, expected in (([0.40, 0.39], 3), ([0.40, 0.37], (2, 3)), ([0.1, 0.4], 3), ([-0.4, -0.41], 3)):
        monkeypatch.setattr(layers, "kept_share", lambda *views, left=[*shares]: left.pop(0))
        assert choose_layer(model(), pictures()) == expected


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
    monkeypatch.setattr(
        layers, "_ROOM", 5 * 2 * 4 * 16 * 16 * 2
    )  # both views of five: 16 tokens of 16 numbers, two blocks
    choose_layer(model(), pictures(40))
    assert [count for _, count in asked] == [5]


def test_a_sample_is_drawn_with_the_seed(asked: list[tuple[list[int], int]], monkeypatch: pytest.MonkeyPatch) -> None:
    shares: list[float] = []
    monkeypatch.setattr(layers, "kept_share", lambda *views: shares.append(kept_share(*views)) or shares[-1])
    for seed in (0, 0, 1):
        choose_layer(model(), pictures(300), seed=seed)
    assert asked == [([2, 3], 64)] * 3
    assert shares[:2] == shares[2:4] != shares[4:]


def test_every_kind_of_images_can_be_chosen_by(asked: list[tuple[list[int], int]], tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    for number in range(6):
        folder = tmp_path / "train" / "abc"[number % 3]
        folder.mkdir(parents=True, exist_ok=True)
        image.new("RGB", (32, 32), (40 * number, 9, 200)).save(folder / f"{number}.png")
    loader: DataLoader[Any] = DataLoader(pictures(), batch_size=5)
    for images in (pictures(), loader, Color("train").subset(range(7)), tmp_path, str(tmp_path), pictures()[:1]):
        choose_layer(model(), images)
    assert [count for _, count in asked] == [12, 12, 7, 6, 6, 1]


def test_patches_that_are_merged_bound_the_search(asked: list[tuple[list[int], int]]) -> None:
    timm = pytest.importorskip("timm")
    images = torch.rand(4, 3, 64, 64)
    for depths, considered in (((2, 2), [2, 3]), ((1, 1, 1), [2])):
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
        choose_layer(swin.eval(), images)
        assert [blocks for blocks, _ in asked] == [considered]


# -- two blocks ------------------------------------------------------------------------------------------------------------


def test_two_blocks_lie_side_by_side() -> None:
    made, images = model(), pictures(3)
    both = Backbone(made, (1, -1), count_cls=True)
    assert (both.blocks, both.layer, both.attention_layer, both.dim) == ((1, 3), 3, 3, 32)
    assert "blocks 1 and 3 of 0 to 3" in repr(both)
    seen = both.observe(images)
    assert seen.blocks == 2
    assert seen[1].blocks == 2
    for number, layer in enumerate((1, 3)):
        alone = Backbone(made, layer, count_cls=True, attention_layer=-1).observe(images)
        assert alone.blocks == 1
        torch.testing.assert_close(seen.embeddings[..., 16 * number : 16 * number + 16], alone.embeddings)
        torch.testing.assert_close(seen.attention, alone.attention)
        torch.testing.assert_close(seen.predictions, alone.predictions)
    prints = {Backbone(made, layer, attention_layer=-1).fingerprint() for layer in (1, 3, (1, 3), (2, 3))}
    assert len(prints) == 4


def test_what_cannot_be_two_blocks_is_refused() -> None:
    timm = pytest.importorskip("timm")
    for wrong in ((3, 1), (1, 1), (0, 1, 2), ()):
        with pytest.raises(ValueError, match="layer: expected a block, or two in their order"):
            Backbone(model(), wrong)
    with pytest.raises(ValueError, match="layer: expected -4 to 3"):
        Backbone(model(), (1, 4))
    swin = timm.models.SwinTransformer(
        img_size=64, patch_size=4, embed_dim=8, depths=(1, 1), num_heads=[1, 1], window_size=4, num_classes=2
    )
    with pytest.raises(ValueError, match="layer: blocks 0 and 1 have different patches"):
        Backbone(swin, (0, 1))
    with pytest.raises(ValueError, match="layer: Own shows one block at a time"):
        Backbone(Own(2), (0, 1))


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
