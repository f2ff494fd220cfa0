"""Which images are worked on together, and how they get there."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from planted import planted

from pace import Observations
from pace.fitting.distributed import Team
from pace.fitting.loop import Course, Loop, Plan
from pace.fitting.parameters import PARAMETERS, memory_in_bytes
from pace.model.concepts import Concepts
from pace.model.feeding import Feed, Visits
from pace.model.gaussians import Prior, TiedGaussians
from pace.model.learning import expect, expect_all
from pace.model.settings import Settings
from pace.observing.store import Index, ObservationStore, StoreWriter

DATA = planted(0, k=3, d=4, images=30, grid=(2, 3))
SETTINGS = Settings(torch.device("cpu"), torch.float64, max_sweeps=5, sweep_tol=0.0, negatives=7)
CONCEPTS = Concepts(
    TiedGaussians.seed(torch.from_numpy(DATA.means), torch.eye(4, dtype=torch.float64), 0),
    torch.zeros(4, dtype=torch.float64),
    torch.full((3,), 0.1, dtype=torch.float64),
    torch.zeros(3, 3, dtype=torch.float64),
    torch.ones(3, dtype=torch.float64),
)


def same(found, expected):
    for name, tensor in expected.tensors().items():
        torch.testing.assert_close(found.tensors()[name], tensor, rtol=1e-9, atol=1e-9, msg=name)


@given(images=st.integers(1, 200), negatives=st.none() | st.integers(2, 64), processes=st.integers(1, 5))
@examples(max_examples=40)
def test_the_processes_visit_every_image_once_and_number_their_own_without_gaps(images, negatives, processes):
    seen = []
    for rank in range(processes):
        visits = Visits(images, negatives, rank, processes)
        parts = visits.parts(2)
        mine = [image for part in parts for image in np.arange(images)[part.images]]
        places = [place for part in parts for place in np.arange(visits.own_images)[part.places]]
        assert sorted(places) == list(range(visits.own_images))
        assert len(mine) == visits.own_images == sum(sum(part.sizes) for part in parts)
        seen += mine
    assert sorted(seen) == list(range(images))


@given(images=st.integers(1, 200), negatives=st.integers(2, 64), processes=st.integers(1, 5))
@examples(max_examples=30)
def test_groups_do_not_depend_on_who_visits_them_and_are_never_too_large(images, negatives, processes):
    def groups(visits):
        return [tuple(part.images) for part in visits.parts(1)]

    alone = groups(Visits(images, negatives))
    assert [g for rank in range(processes) for g in groups(Visits(images, negatives, rank, processes))] == alone
    assert all(1 <= len(group) <= negatives for group in alone)
    assert max(map(len, alone)) - min(map(len, alone)) <= 1


def test_a_group_mixes_what_lies_together():
    images = Visits(200, 64).part(0, 1).images
    assert len(images) == 50
    assert len(set(images // 10)) == 20  # sorted by class, ten images each: every class is there


def test_a_smaller_budget_means_smaller_batches_of_whole_groups():
    def images_at_once(memory, views):
        settings = replace(SETTINGS, memory=memory)
        return Feed(views, settings.device, settings.dtype).units_at_once(CONCEPTS, settings)

    assert images_at_once(None, DATA[:1]) == 30
    assert 1 < images_at_once(20_000, DATA[:1]) < 15
    assert images_at_once(None, DATA[:2]) == 5  # groups, of seven at most
    assert images_at_once(20_000, DATA[:2]) == 1
    with pytest.raises(
        ValueError, match=r"memory: 3 tied concepts in 4 dimensions take about .* GB to learn; found 1e-07"
    ):
        images_at_once(100, DATA[:1])


def test_budgets_are_read_as_people_write_them():
    sizes = {"8GB": 8e9, "8gb": 8e9, "1.5 GB": 1.5e9, "300kB": 3e5, "2T": 2e12, "8GiB": 8 * 2**30, ".5mib": 2**19,
             "1e9": 1e9, "1E+3 KiB": 1000 * 1024, "512": 512, "512 B": 512, 77: 77}  # fmt: skip
    assert {text: memory_in_bytes(text) for text in sizes} == sizes
    for text in ("plenty", "8iB", "8Gi", "-1e9", True, "1e999", -1):
        with pytest.raises(ValueError, match=f"memory: expected bytes or a size like '8GB' or '8GiB'; found {text!r}"):
            PARAMETERS["memory"].check(text)


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    views = []
    for name, view in (("original", DATA.observations), ("perturbed", DATA.perturbed)):
        folder = tmp_path_factory.mktemp(name)
        with StoreWriter(folder, Index({}, total=30, grid=(2, 3), prefix_tokens=1), shard_bytes=2000) as writer:
            for start in range(0, 30, 5):
                writer.append(start, view.batch(slice(start, start + 5), dtype=torch.float32))
            writer.finish(30)
        views.append(ObservationStore.open(folder).observations())
    return views


@pytest.fixture(scope="module")
def loaded(stored):
    return [Observations(*map(np.asarray, (view.embeddings, view.attention, view.predictions))) for view in stored]


def test_a_store_is_read_beside_the_work_with_the_same_result(stored, loaded):
    same(expect_all(*stored, CONCEPTS, replace(SETTINGS, batch_size=7)), expect_all(*loaded, CONCEPTS, SETTINGS))


def test_minibatches_are_the_chosen_images_of_the_store(stored, loaded):
    order = np.random.default_rng(0).permutation(30)
    with Feed(stored, SETTINGS.device, SETTINGS.dtype) as feed:
        for chosen, upcoming in ((order[:12], order[12:15]), (order[12:24], None)):
            found = expect(feed, Visits(12, 7), CONCEPTS, SETTINGS, chosen=chosen, upcoming=upcoming)
            same(found, expect_all(*(view[chosen] for view in loaded), CONCEPTS, SETTINGS))


@pytest.mark.parametrize("rank", [0, 1])
def test_what_is_kept_on_the_device_gives_the_same_result(stored, rank):
    visits = Visits(30, 7, rank, 2)
    with Feed(stored, SETTINGS.device, SETTINGS.dtype) as feed:
        kept = feed.kept(visits, at_once=2)
        same(expect(kept, visits, CONCEPTS, SETTINGS), expect(feed, visits, CONCEPTS, SETTINGS))
    assert all(isinstance(view.embeddings, torch.Tensor) and len(view) == visits.own_images for view in kept.views)


@pytest.mark.parametrize(
    ("memory", "minibatch", "kept"), [(10**9, None, True), (10_000, None, False), (10**9, 12, False)]
)
def test_what_fits_into_the_budget_is_kept_on_the_device(stored, memory, minibatch, kept):
    course = Course(CONCEPTS, Prior(torch.eye(4, dtype=torch.float64), 1.0))
    plan = Plan("tied", 1, 0.0, minibatch, 0)
    loop = Loop(*stored, replace(SETTINGS, memory=memory), plan, Team(), None, lambda *_: None)
    with loop._feed(stored, Visits(30, 7), course) as feed:
        assert feed.local == kept


def test_half_precision_travels_as_it_is_and_is_widened_where_it_is_used():
    half = Observations(DATA.observations.embeddings.astype(np.float16), DATA.observations.attention)
    with Feed([half], torch.device("cpu"), torch.float32) as feed:
        assert feed._prepare(slice(0, 4))[0]().embeddings.dtype == torch.float16
        (batch,) = feed.load(slice(0, 4))
    assert batch.embeddings.dtype == torch.float32
    np.testing.assert_array_equal(batch.embeddings.numpy(), half.embeddings[:4].astype(np.float32))


def test_what_was_read_ahead_is_used_only_for_what_was_asked(stored):
    with Feed(stored, torch.device("cpu"), torch.float32) as feed:
        for asked in (slice(7, 9), slice(3, 6)):  # not what was announced, and just that
            feed.load(np.arange(3), following=np.arange(3, 6))
            batch, _ = feed.load(np.arange(asked.start, asked.stop))
            np.testing.assert_array_equal(batch.embeddings, np.asarray(stored[0].embeddings[asked]))
