import numpy as np
import torch

from pace import Observations
from pace.model.seeding import cluster, draw_sample
from pace.model.settings import Settings


def sampled(embeddings, attention, n_concepts, seed=0):
    observations = Observations(embeddings.astype(np.float32), attention)
    return draw_sample(observations, n_concepts, Settings(torch.device("cpu")), np.random.default_rng(seed))


def test_patches_come_from_many_images_though_a_few_would_hold_enough():
    owner = np.repeat(np.arange(1000.0)[:, None], 50, 1)[:, :, None]  # every patch tells its image
    sample = sampled(owner, np.ones((1000, 50)), 2)
    images = (sample.patches + sample.offset).unique().numel()
    assert images == 1000
    assert len(sample.images) == 100


def test_tokens_without_attention_are_not_drawn_and_others_are_as_often_as_there_are():
    embeddings = np.zeros((30, 20, 1))
    embeddings[:, 5:] = 1.0
    attention = np.ones((30, 20))
    attention[:, :5] = 0
    sample = sampled(embeddings, attention, 7)
    assert len(sample.patches) == 30 * 15  # fewer than wanted: all there are
    torch.testing.assert_close(sample.patches + sample.offset, torch.ones(450, 1))


def test_centres_are_spread_over_groups_of_any_size():
    for seed in range(5):
        rng = np.random.default_rng(seed)
        group = rng.choice(12, (80, 25), p=np.array([0.56] + [0.04] * 11))
        embeddings = 100 * np.eye(12)[group] + rng.normal(size=(80, 25, 12))
        sample = sampled(embeddings, rng.random((80, 25)) + 0.1, 12, seed)
        means, _ = cluster(sample, 12, seed)
        found = (means + sample.offset).argmax(1)
        assert sorted(found.tolist()) == list(range(12))


def test_the_start_depends_on_the_seed_alone():
    rng = np.random.default_rng(0)
    embeddings, attention = rng.normal(size=(40, 10, 6)), rng.random((40, 10)) + 0.1
    first, again, other = (cluster(sampled(embeddings, attention, 5, seed), 5, seed)[0] for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_patches_that_are_all_alike_still_give_as_many_centres_as_asked_for():
    sample = sampled(np.ones((20, 4, 3)), np.ones((20, 4)), 3)
    means, inertia = cluster(sample, 3, 0)
    assert means.shape == (3, 3)
    assert inertia == 0
