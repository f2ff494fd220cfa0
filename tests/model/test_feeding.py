"""Which images are worked on together, how they get there, and what happens when there is no room for them."""

import warnings

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from planted import planted
from sklearn.exceptions import ConvergenceWarning

import pace.explainer
import pace.model.learning
from pace import PACE, Observations
from pace.model.feeding import Feed, Visits
from pace.observing.store import Index, ObservationStore, StoreWriter

DATA = planted(0, k=3, d=4, images=30, grid=(2, 3))


def fit(observations=DATA.observations, perturbed=DATA.perturbed, **parameters):
    chosen = {"n_concepts": 3, "negatives": 7, "max_iter": 3, "max_sweeps": 5, "sweep_tol": 0.0, "n_init": 1,
              "head_steps": 5, "dtype": "float64", "device": "cpu"}  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return PACE(**(chosen | parameters)).fit(observations, perturbed=perturbed)


def alike(one, two):
    np.testing.assert_allclose(one.means_, two.means_, rtol=1e-8, atol=1e-10)
    np.testing.assert_allclose(np.array(one.lower_bounds_), np.array(two.lower_bounds_), rtol=1e-9)
    np.testing.assert_allclose(one.concept_weights_, two.concept_weights_, rtol=1e-8, atol=1e-8)


@given(images=st.integers(1, 200), negatives=st.none() | st.integers(2, 64), processes=st.integers(1, 5))
@examples(max_examples=60, deadline=None)
def test_the_processes_visit_every_image_once_and_number_their_own_without_gaps(images, negatives, processes):
    seen = []
    for rank in range(processes):
        visits = Visits(images, negatives, rank, processes)
        part = visits.part(0, len(visits)) if len(visits) else None
        mine = [] if part is None else np.arange(images)[part.images].tolist()
        places = [] if part is None else np.arange(visits.own_images)[part.places].tolist()
        assert len(visits) <= visits.largest_share
        assert sorted(places) == list(range(visits.own_images))
        assert len(mine) == visits.own_images
        seen += mine
    assert sorted(seen) == list(range(images))


@given(images=st.integers(1, 200), negatives=st.integers(2, 64), processes=st.integers(1, 5))
@examples(max_examples=40, deadline=None)
def test_groups_do_not_depend_on_who_visits_them_and_are_never_too_large(images, negatives, processes):
    def groups(visits):
        return [tuple(visits.part(unit, unit + 1).images) for unit in range(len(visits))]

    alone = groups(Visits(images, negatives))
    assert [g for rank in range(processes) for g in groups(Visits(images, negatives, rank, processes))] == alone
    assert all(1 <= len(group) <= negatives for group in alone)
    assert max(map(len, alone)) - min(map(len, alone)) <= 1


def test_a_group_mixes_what_lies_together():
    images = Visits(200, 64).part(0, 1).images
    assert len(images) == 50
    assert len(set(images // 10)) == 20  # sorted by class, ten images each: every class is there


@pytest.mark.parametrize("paired", [True, False])
@pytest.mark.parametrize("where", ["_evidence", "_infer", "accumulate"])
def test_when_memory_runs_out_the_batch_is_halved_and_nothing_is_counted_twice(where, paired, monkeypatch):
    perturbed = DATA.perturbed if paired else None
    expected = fit(perturbed=perturbed, covariance="full")
    tried = []
    if where == "accumulate":  # half of the concepts' sums are added up when it happens
        from pace.model.gaussians import FullGaussians

        real = FullGaussians._accumulate

        def short(self, x, r, sums):
            tried.append(len(x))
            if len(x) > 7 * 14:
                real(self, x, r, sums)
                raise torch.OutOfMemoryError("out of memory")
            real(self, x, r, sums)

        monkeypatch.setattr(FullGaussians, "_accumulate", short)
    else:
        real = getattr(pace.model.learning, where)

        def short(first, *arguments):
            tokens = sum(b.attention.numel() for b in first) if where == "_evidence" else first[..., 0].numel()
            tried.append(tokens)
            if tokens > 7 * 14:
                raise torch.OutOfMemoryError("out of memory")
            return real(first, *arguments)

        monkeypatch.setattr(pace.model.learning, where, short)
    found = fit(perturbed=perturbed, covariance="full")
    alike(found, expected)
    assert max(tried) > 7 * 14 >= tried[-1]
    assert sum(tokens > 7 * 14 for tokens in tried) <= 3  # it stays at the smaller size


def test_explaining_goes_on_in_halves_as_well(monkeypatch):
    model, real = fit(), pace.explainer.explain_batch
    expected = model.explain(DATA.observations)

    def short(batch, *arguments, **options):
        if len(batch.attention) > 4:
            raise torch.OutOfMemoryError("out of memory")
        return real(batch, *arguments, **options)

    monkeypatch.setattr(pace.explainer, "explain_batch", short)
    np.testing.assert_allclose(model.explain(DATA.observations).phi, expected.phi, atol=1e-12)


def test_memory_that_does_not_suffice_for_one_group_is_an_error(monkeypatch):
    def short(*arguments):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(pace.model.learning, "_evidence", short)
    with pytest.raises(torch.OutOfMemoryError):
        fit()


def test_a_smaller_budget_means_smaller_batches_and_the_same_result(monkeypatch):
    sizes, real = [], pace.model.learning._evidence

    def watched(batches, *arguments):
        sizes.append(len(batches[0].attention))
        return real(batches, *arguments)

    monkeypatch.setattr(pace.model.learning, "_evidence", watched)
    generous = fit(perturbed=None)
    assert max(sizes) == 30
    sizes.clear()
    alike(fit(perturbed=None, memory="20kB"), generous)
    assert 1 <= max(sizes) < 15


@pytest.mark.parametrize(
    ("memory", "message"),
    [
        ("plenty", "memory: expected bytes or a size like '8GB' or '8GiB'; found 'plenty'"),
        ("8iB", "memory: expected bytes or a size like"),
        ("8Gi", "memory: expected bytes or a size like"),
        ("-1e9", "memory: expected bytes or a size like"),
        (True, "memory: expected bytes or a size like"),
        ("1e999", "memory: expected at least 1 byte; found '1e999'"),
        (-1, "memory: expected at least 1 byte; found -1"),
        (100, "memory: 3 tied concepts in 4 dimensions take about .* GB to learn; found 1e-07 GB"),
    ],
)
def test_budgets_that_make_no_sense_are_refused(memory, message):
    with pytest.raises(ValueError, match=message):
        fit(memory=memory)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("8GB", 8e9),
        ("8gb", 8e9),
        ("1.5 GB", 1.5e9),
        ("300kB", 3e5),
        ("2T", 2e12),
        ("8GiB", 8 * 2**30),
        (".5mib", 2**19),
        ("1e9", 1e9),
        ("1E+3 KiB", 1000 * 1024),
        ("512", 512),
        ("512 B", 512),
        (77, 77),
    ],
)
def test_budgets_are_read_as_people_write_them(text, size):
    from pace.fitting.parameters import memory_of

    assert memory_of(PACE(memory=text), torch.device("cpu")) == size


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    views = []
    for name, view in (("original", DATA.observations), ("perturbed", DATA.perturbed)):
        folder = tmp_path_factory.mktemp(name)
        with StoreWriter(folder, Index({}, total=30, grid=(2, 3), prefix_tokens=1), shard_bytes=2000) as writer:
            for start in range(0, 30, 5):
                batch = view.batch(slice(start, start + 5), dtype=torch.float32)
                writer.append(start, batch)
            writer.finish(30)
        views.append(ObservationStore.open(folder).observations())
    return views


def in_memory(view):
    return Observations(*(np.asarray(array) for array in (view.embeddings, view.attention, view.predictions)))


@pytest.mark.parametrize("minibatch", [None, 12])
def test_a_store_is_read_beside_the_work_with_the_same_result(stored, minibatch):
    loaded = [in_memory(view) for view in stored]
    alike(fit(*stored, minibatch=minibatch, batch_size=7), fit(*loaded, minibatch=minibatch, batch_size=7))


def test_what_fits_into_the_budget_is_read_once_and_kept(stored, monkeypatch):
    reads, real = [], pace.observing.store.StoredArray.__array__

    def counted(self, *options, **more):
        reads.append(self.name)
        return real(self, *options, **more)

    monkeypatch.setattr(pace.observing.store.StoredArray, "__array__", counted)
    often = fit(*stored)
    without = len(reads)
    reads.clear()
    alike(fit(*stored, memory="1GB"), often)
    assert len(reads) < without


def test_room_that_turns_out_to_be_taken_is_done_without(stored, monkeypatch):
    def short(*arguments):
        raise torch.OutOfMemoryError("out of memory")

    expected = fit(*stored)
    monkeypatch.setattr(Feed, "kept", short)
    alike(fit(*stored, memory="1GB"), expected)


def test_half_precision_travels_as_it_is_and_is_widened_where_it_is_used():
    half = Observations(DATA.observations.embeddings.astype(np.float16), DATA.observations.attention)
    with Feed([half], torch.device("cpu"), torch.float32) as feed:
        assert feed._prepare(slice(0, 4))[0]().embeddings.dtype == torch.float16
        (batch,) = feed.load(slice(0, 4))
    assert batch.embeddings.dtype == torch.float32
    np.testing.assert_array_equal(batch.embeddings.numpy(), half.embeddings[:4].astype(np.float32))


def test_what_was_read_ahead_is_used_only_for_what_was_asked(stored):
    with Feed(stored, torch.device("cpu"), torch.float32) as feed:
        feed.load(np.arange(3), following=np.arange(3, 6))
        (batch, _) = feed.load(np.arange(7, 9))  # not what was announced
        np.testing.assert_array_equal(batch.embeddings, np.asarray(stored[0].embeddings[7:9]))
        feed.load(np.arange(3), following=np.arange(3, 6))
        (batch, _) = feed.load(np.arange(3, 6))
        np.testing.assert_array_equal(batch.embeddings, np.asarray(stored[0].embeddings[3:6]))
