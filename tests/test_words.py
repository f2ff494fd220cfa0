"""Names suggested by words, and concepts found by them: with a toy image-text model that knows colours, and tiny CLIPs."""

import re

import numpy as np
import open_clip
import pytest
import torch
from torch import nn

import pace
from pace.backbones.preprocessing import Preprocessing
from pace.backbones.tower import Look
from pace.words import GOOD, Suggestion, Words, read_words

COLOURS = {"red": (0.9, 0.1, 0.1), "green": (0.1, 0.8, 0.1), "blue": (0.1, 0.1, 0.9), "yellow": (0.9, 0.9, 0.1)}
NONSENSE = [f"thing {number}" for number in range(40)]


ANCHORS = torch.rand(200, 3, generator=torch.Generator().manual_seed(1))


def features(colours):
    """Of colours (…, 3): how near they are to some others. Mixtures of colours are no colours between them."""
    return (-30 * (colours[..., None, :] - ANCHORS).square().sum(-1)).exp()


class Colours(nn.Module):
    """Patches are their mean colours; texts are the colours they name, or anything."""

    layers, prefix, has_cls = 1, 0, False
    preprocessing = Preprocessing((64, 64), (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))

    def __init__(self):
        super().__init__()
        self.logit_scale = nn.Parameter(torch.tensor(4.6))
        self.known = {self.key(f"a close-up photo of a {word}"): rgb for word, rgb in COLOURS.items()}

    def key(self, text):
        return tuple(open_clip.tokenize([text])[0].tolist())

    def dim(self, layer):
        return 3

    def grid(self, height, width, layer):
        return height // 8, width // 8

    def look(self, images, layer):
        tokens = torch.nn.functional.avg_pool2d(images, 8).flatten(2).mT
        return Look(tokens, torch.ones(tokens.shape[:2]), features(tokens).mean(1), None)

    def encode_text(self, tokens):
        def of(row):
            anything = torch.rand(200, generator=torch.Generator().manual_seed(sum(row) % 10_000))
            return features(torch.tensor(self.known[row])) if row in self.known else anything.square()

        return torch.stack([of(tuple(row.tolist())) for row in tokens])


@pytest.fixture(scope="module")
def pictures():
    """40 images of four quadrants, each in one of the colours."""
    rng = np.random.default_rng(0)
    colours = np.array([*COLOURS.values()])[rng.integers(4, size=(40, 2, 2))]
    pixels = colours.repeat(32, 1).repeat(32, 2) + rng.normal(scale=0.05, size=(40, 64, 64, 3))
    return (255 * pixels.clip(0, 1)).astype(np.uint8)


@pytest.fixture(scope="module")
def explainer(pictures):
    fit = {"parts": None, "max_iter": 20, "device": "cpu", "progress": False}
    return pace.explain_model(pace.Backbone(Colours()), pictures, 4, **fit)


def colour_of(explainer, concept):
    means = explainer.concepts.means_[concept]
    return min(COLOURS, key=lambda word: ((np.array(COLOURS[word]) - means) ** 2).sum())


def test_concepts_get_the_words_that_suit_them(explainer, pictures):
    looking = Words(explainer, images=pictures)
    found = looking.suggest([*NONSENSE, *(f"a {word}" for word in COLOURS)])
    assert {one.concept: one.name for one in found} == {k: colour_of(explainer, k) for k in range(4)}
    assert all(one.score > 0.95 for one in found)


def test_words_find_the_concept_that_they_suit(explainer, pictures):
    looking = Words(explainer, images=pictures)
    for word in COLOURS:
        best, *others = looking.find(f"a {word}")
        assert colour_of(explainer, best.concept) == word
        assert best.score > 0.95
        assert all(other.score < 0.8 for other in others)


def test_concepts_that_are_no_concepts_get_no_name(explainer, pictures):
    looking = Words(explainer, images=pictures)
    looking.concepts = [*range(200)]
    looking._crops = torch.nn.functional.normalize(
        torch.randn(200, 16, 200, generator=torch.Generator().manual_seed(0)), dim=-1
    )
    found = looking.suggest(NONSENSE)
    assert np.mean([one.name is not None for one in found]) < 0.01
    assert np.mean([one.score for one in found]) == pytest.approx(0.5, abs=0.03)
    assert all(one.closest in NONSENSE for one in found)
    assert all((one.name == one.closest) == (one.score >= GOOD) for one in found)


def test_hidden_concepts_are_left_out(explainer, pictures):
    explainer.hide(2)
    try:
        assert sorted(Words(explainer, images=pictures).concepts) == [0, 1, 3]
        explainer.hide(0, 1)
        with pytest.raises(ValueError, match="less than two in use that are not hidden"):
            Words(explainer, images=pictures)
    finally:
        explainer.undo(), explainer.undo()


def tiny_clip():
    torch.manual_seed(0)
    text = {"context_length": 12, "vocab_size": 49408, "width": 8, "heads": 1, "layers": 1}
    return open_clip.model.CLIP(
        16, {"layers": 1, "width": 64, "head_width": 64, "patch_size": 16, "image_size": 32}, text
    )


def test_an_image_text_model_may_be_the_model_itself_or_a_file(explainer, pictures, tmp_path):
    model = tiny_clip().eval()
    torch.save(model.state_dict(), tmp_path / "clip.pt")
    ours = Words(explainer, clip=model, images=pictures)
    theirs = Words(explainer, clip=tmp_path / "clip.pt", images=pictures)
    assert ours.suggest(["a bird", "a tree", "the sky"]) == theirs.suggest(["a bird", "a tree", "the sky"])
    with torch.no_grad():
        text = model.encode_text(open_clip.tokenize(["a close-up photo of a bird"], 12))[0]
    own = torch.nn.functional.normalize(text, dim=0)
    torch.testing.assert_close(torch.from_numpy(ours._near(["a bird"]))[..., 0], ours._crops @ own)


def test_a_clip_of_open_clip_is_opened_by_its_name(explainer, pictures, monkeypatch):
    asked = []
    monkeypatch.setattr(
        open_clip, "create_model", lambda name, pretrained: asked.append((name, pretrained)) or tiny_clip()
    )
    for name in ("ViT-B-32/openai", "ViT-B-32"):
        Words(explainer, clip=name, images=pictures)
    assert asked == [("ViT-B-32", "openai"), ("ViT-B-32", open_clip.list_pretrained_tags_by_model("ViT-B-32")[0])]


def test_a_model_without_texts_and_too_few_images_are_refused(explainer, pictures):
    import timm

    with pytest.raises(ValueError, match=r"clip: VisionTransformer has no text encoder"):
        Words(explainer, clip=timm.create_model("test_vit"), images=pictures)
    with pytest.raises(ValueError, match="images: expected 4 or more"):
        Words(explainer, images=pictures[:3])
    with pytest.raises(ValueError, match="images: needs some"):
        Words(explainer)


def test_the_words_of_the_package_are_names(tmp_path):
    words = read_words()
    assert 250 < len(words) < 1000
    assert len({word.lower() for word in words}) == len(words)
    assert all(re.fullmatch(r"[a-z -]+", word) for word in words)
    (tmp_path / "mine.txt").write_text("# mine\n\na  crest\r\na crest\na tail\n")
    assert read_words(tmp_path / "mine.txt") == ["a crest", "a tail"]
    for content, line in (
        ("a crest", "expected 2 words or more"),
        ("a\x1b[31m\nb", "is no name"),
        ("a" * 61 + "\nb", "no name"),
    ):
        (tmp_path / "mine.txt").write_text(content)
        with pytest.raises(ValueError, match=line):
            read_words(tmp_path / "mine.txt")


def test_a_suggestion_says_what_was_closest_where_nothing_is_good(explainer, pictures):
    (one, *_) = Words(explainer, images=pictures).suggest(["thing 1", "thing 2"])
    assert isinstance(one, Suggestion)
    assert one.closest in ("thing 1", "thing 2")
