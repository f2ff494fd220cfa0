"""The store on disk: exact, lazy, safe against kills, full disks, damage and mixing."""

import errno
import json
import os
import signal
import zlib
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from pace.atomic import write_atomically
from pace.files import DamagedFile
from pace.observations import Batch
from pace.observing.store import Index, ObservationStore, StoreWriter

FACTS = {"model": "tiny", "layer": "-1", "images": "numbers"}
SAME = {"fingerprint": FACTS, "total": 20, "grid": (2, 2), "prefix_tokens": 1}
TOKENS, DIM, CLASSES = 5, 3, 4


def make_batch(start, count):
    """Image i has the same values whoever asks for it."""
    each = [torch.Generator().manual_seed(1000 + image) for image in range(start, start + count)]
    return Batch(
        torch.stack([torch.randn(TOKENS, DIM, generator=random) for random in each]),
        torch.stack([torch.rand(TOKENS, generator=random).softmax(0) for random in each]),
        torch.stack([torch.randn(CLASSES, generator=random).softmax(0) for random in each]),
    )


def write(path, images=20, **changes):
    """Batches of two, three of which make a shard."""
    with StoreWriter(path, Index(**{**SAME, **changes}), shard_bytes=300) as writer:
        for gap in writer.gaps:
            for start in range(gap.start, min(gap.stop, images), 2):
                writer.append(start, make_batch(start, min(2, images - start)))
    return ObservationStore.open(path)


def files(path):
    return {file.name: file.read_bytes() for file in path.iterdir() if file.name != "lock"}


def test_what_is_read_is_what_was_written_in_float16_and_float32(tmp_path):
    store = write(tmp_path)
    assert len(store.shards) > 3
    assert store.complete
    store.verify()
    observations, expected = store.observations(), make_batch(0, 20)
    batch = observations.batch(slice(None))
    assert torch.equal(batch.embeddings, expected.embeddings.half())
    assert torch.equal(batch.attention, expected.attention)
    assert torch.equal(batch.predictions, expected.predictions)
    assert repr(observations) == "Observations(20 images, 5 tokens (2 x 2), d = 3, 4 classes)"
    shard = store.shards[1]
    assert torch.equal(load_file(tmp_path / shard.file)["embeddings"], batch.embeddings[shard.start : shard.stop])


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    return write(tmp_path_factory.mktemp("stored")).observations()


indices = st.lists(st.integers(-20, 19), max_size=30)
masks = st.lists(st.booleans(), min_size=20, max_size=20)


@settings(max_examples=40, deadline=None)
@given(key=st.one_of(indices, st.slices(20), st.integers(-20, 19), masks), first=st.slices(20), second=indices)
def test_indexing_equals_numpy_indexing(stored, key, first, second):
    array = make_batch(0, 20).embeddings.half().numpy()
    index = np.asarray(key, dtype=np.intp) if key == [] else key
    assert np.array_equal(np.asarray(stored.embeddings[key]), array[index])
    part = array[first]
    second = np.array([index for index in second if -len(part) <= index < len(part)], dtype=np.intp)
    assert np.array_equal(np.asarray(stored.embeddings[first][second]), part[second])


def test_an_image_that_does_not_exist_is_an_index_error(stored):
    for wrong in (20, [3, 20], [True, False]):
        with pytest.raises(IndexError):
            stored.embeddings[wrong]


def test_part_of_stored_observations_reads_nothing_until_asked(stored, monkeypatch):
    def read(*_):
        raise AssertionError("read")

    with monkeypatch.context() as patch:
        patch.setattr("pace.observing.store.safe_open", read)
        part = stored[5:15][[0, 3]]
    assert torch.equal(part.batch(slice(None)).attention, make_batch(0, 20).attention[[5, 8]])


def test_a_reader_sees_finished_shards_while_the_writer_goes_on(tmp_path):
    with StoreWriter(tmp_path, Index(FACTS, total=20), shard_bytes=1) as writer:
        with pytest.raises(ValueError, match="no finished shard yet"):
            ObservationStore.open(tmp_path).observations()
        writer.append(0, make_batch(0, 4))
        early = ObservationStore.open(tmp_path)
        observations = early.observations()
        writer.append(4, make_batch(4, 4))
        assert (len(early), len(observations), early.complete) == (4, 4, False)
        assert len(ObservationStore.open(tmp_path)) == 8
    assert torch.equal(observations.batch(slice(None)).attention, make_batch(0, 4).attention)


def test_embeddings_beyond_float16_and_tiny_probabilities_survive(tmp_path):
    batch = make_batch(2, 1)._replace(predictions=torch.tensor([[1 - 1e-12, 1e-12, 1e-30, 0.0]]))
    batch.embeddings[0, 2, 0] = -70000.0
    with StoreWriter(tmp_path, Index(FACTS), shard_bytes=1) as writer:
        writer.append(0, make_batch(0, 2))
        writer.append(2, batch)
    found = ObservationStore.open(tmp_path).observations().batch(slice(None))
    assert found.embeddings.dtype == torch.float32
    assert torch.equal(found.embeddings[2:], batch.embeddings)
    assert torch.equal(found.embeddings[:2], make_batch(0, 2).embeddings.half().float())
    assert torch.equal(found.predictions[2:], batch.predictions)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("embeddings", float("inf"), "in the batch from image 6 on: embeddings of image 1 is NaN or infinite"),
        ("attention", -1.0, "attention of image 1 is negative"),
        ("predictions", 3.0, "not a distribution"),
    ],
)
def test_bad_values_are_refused_and_the_good_ones_before_stay(tmp_path, field, value, message):
    batch = make_batch(6, 2)
    getattr(batch, field)[1, 0] = value
    with StoreWriter(tmp_path, Index(FACTS)) as writer:
        writer.append(0, make_batch(0, 6))
        with pytest.raises(ValueError, match=message):
            writer.append(6, batch)
    assert len(ObservationStore.open(tmp_path).observations()) == 6


def test_a_store_of_unknown_length_is_complete_after_finish_also_without_predictions(tmp_path):
    with StoreWriter(tmp_path, Index(FACTS)) as writer:
        writer.append(0, make_batch(0, 3)._replace(predictions=None))
    assert not ObservationStore.open(tmp_path).complete
    with StoreWriter(tmp_path, Index(FACTS)) as writer:
        assert writer.gaps[0].start == 3
        assert writer.finish(3).predictions is None
    assert ObservationStore.open(tmp_path).complete


def test_crops_are_read_only_if_every_shard_has_them(tmp_path):
    crops = torch.rand(4, 4).sort(1).values.numpy()
    halves = {"all": (crops[:2], crops[2:]), "late": (None, crops[2:]), "early": (crops[:2], None)}
    for folder, parts in halves.items():
        with StoreWriter(tmp_path / folder, Index(FACTS, total=4), shard_bytes=1) as writer:
            for start, some in zip((0, 2), parts, strict=True):
                writer.append(start, make_batch(start, 2), crops=some)
    found, *partly = (ObservationStore.open(tmp_path / name).observations() for name in halves)
    np.testing.assert_array_equal(found.crops, crops)
    np.testing.assert_array_equal(found[[3, 0]].crops, crops[[3, 0]])
    for observations in partly:
        assert observations.crops is None
        assert torch.equal(observations.batch(slice(None)).attention, make_batch(0, 4).attention)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fingerprint": {**FACTS, "layer": "3"}}, "layer was -1, now 3"),
        ({"grid": (4, 1)}, r"grid was \(2, 2\), now \(4, 1\)"),
        ({"total": 21}, "number of images was 20, now 21"),
    ],
)
def test_other_observations_are_refused_and_the_message_says_what_differs(tmp_path, change, message):
    write(tmp_path, images=6)
    before = files(tmp_path)
    with pytest.raises(ValueError, match=message):
        write(tmp_path, **change)
    assert files(tmp_path) == before


def test_a_folder_of_something_else_is_refused_untouched(tmp_path):
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(ValueError, match=r"not an observation store \(it holds thesis.tex\)"):
        write(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"no index\.json"):
        ObservationStore.open(tmp_path)
    assert files(tmp_path) == {"thesis.tex": b"precious"}
    assert not (tmp_path / "lock").exists()


def test_an_unreadable_index_is_a_clear_error(tmp_path):
    write(tmp_path)
    good = json.loads((tmp_path / "index.json").read_text())
    shard = good["shards"][0]
    spoiled = [{**good, "version": 99}, {**good, "format": "other"}, {**good, "total": 3}, {**good, "grid": [2]}, []]
    spoiled += [
        {**good, "shards": shards} for shards in ([{"file": "../x"}], [{**shard, "file": "../x"}], [shard, shard])
    ]
    for content in ["", "{", *map(json.dumps, spoiled)]:
        (tmp_path / "index.json").write_text(content)
        with pytest.raises(ValueError, match=r"index\.json cannot be used: .*; delete the folder"):
            ObservationStore.open(tmp_path)


@pytest.mark.parametrize("how", ["missing", "truncated", "one bit"])
def test_a_damaged_shard_is_named_and_only_it_is_computed_again(tmp_path, how):
    write(tmp_path / "whole")
    store = write(tmp_path / "store")
    shard = store.shards[2]
    file = tmp_path / "store" / shard.file
    if how == "missing":
        file.unlink()
    elif how == "truncated":
        os.truncate(file, file.stat().st_size - 7)
    else:
        data = bytearray(file.read_bytes())
        data[-9] ^= 1
        file.write_bytes(data)
    if how == "one bit":
        damaged = ObservationStore.open(tmp_path / "store")
        with pytest.raises(DamagedFile, match=f"{shard.file}: wrong checksum .* delete what is damaged"):
            damaged.verify()
        with pytest.raises(DamagedFile, match=f"{shard.file} cannot be used: its checksum is wrong; delete it"):
            damaged.observations().batch(slice(None))
        damaged.observations()[: shard.start].batch(slice(None))  # the others are good
        file.unlink()
    with pytest.raises(ValueError, match=f"{shard.file}: missing or truncated"):
        ObservationStore.open(tmp_path / "store")
    with StoreWriter(tmp_path / "store", Index(**SAME)) as writer:
        assert writer.gaps == [range(shard.start, shard.stop)]
    with pytest.raises(ValueError, match=f"lacks images {shard.start} to {shard.stop - 1}"):
        ObservationStore.open(tmp_path / "store").observations()
    write(tmp_path / "store")
    assert files(tmp_path / "store") == files(tmp_path / "whole")


def test_files_that_only_look_like_shards_are_left_alone(tmp_path):
    store = tmp_path / "store"
    write(store, images=6)
    mine = {"shard-notes.txt", "shard-000000099.safetensors.bak", "shard-1"}
    for name in mine:
        (store / name).touch()
    (store / "shard-000000098.safetensors").mkdir()
    (store / "shard-000000099.safetensors").touch()
    index = json.loads((store / "index.json").read_text())
    (tmp_path / "victim.txt").write_text("precious")
    index["shards"][0]["start"] = "../victim.txt"
    (store / "evil").mkdir()
    (store / "evil" / "index.json").write_text(json.dumps(index))
    with pytest.raises(DamagedFile, match="start: expected int"):
        write(store / "evil")
    write(store)
    assert (tmp_path / "victim.txt").read_text() == "precious"
    assert mine | {"shard-000000098.safetensors"} <= set(os.listdir(store))
    assert "shard-000000099.safetensors" not in os.listdir(store)


def test_a_shard_whose_tensors_do_not_fit_together_is_refused_even_with_a_right_checksum(tmp_path):
    from safetensors.torch import save

    index, shard = write(tmp_path)._index, write(tmp_path).shards[2]
    good = load_file(tmp_path / shard.file)
    for change in (
        {"embeddings": good["embeddings"][:-1]},
        {"attention": torch.ones(shard.images, TOKENS + 1)},
        {"embeddings": good["embeddings"].to(torch.int64)},
        {"crops": torch.ones(())},
    ):
        content = save(good | change)
        (tmp_path / shard.file).write_bytes(content)
        changed = replace(shard, bytes=len(content), crc32=zlib.crc32(content))
        replace(index, shards=tuple(changed if one == shard else one for one in index.shards)).write(tmp_path)
        with pytest.raises(DamagedFile, match=r"^[^\n]*cannot be used: [^\n]* run the extraction again[^\n]*$"):
            ObservationStore.open(tmp_path).observations()


def test_a_full_disk_is_a_clear_error_and_what_was_finished_stays(tmp_path, monkeypatch):
    finished = len(write(tmp_path, images=8))

    def full(path, data):
        if path.name != "index.json":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        write_atomically(path, data)

    with monkeypatch.context() as patch:
        patch.setattr("pace.observing.store.write_atomically", full)
        with pytest.raises(OSError, match=r"No space left on device: .*shard-\d+\.safetensors"):
            write(tmp_path)
    assert len(ObservationStore.open(tmp_path).observations()) == finished
    write(tmp_path).verify()


def in_a_child(run):
    """Whether `run` came to its end in a process of its own."""
    child = os.fork()
    if child == 0:
        try:
            run()
        finally:
            os._exit(0)
    return os.waitpid(child, 0)[1] == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_one_process_writes_at_a_time(tmp_path):
    def blocked():
        try:
            write(tmp_path)
        except BlockingIOError as error:
            if "another process is writing" in str(error):
                os.kill(os.getpid(), signal.SIGKILL)

    with StoreWriter(tmp_path, Index(**SAME)):
        assert not in_a_child(blocked)
    assert in_a_child(blocked)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_killed_at_any_point_and_resumed_a_store_is_the_same_bit_for_bit(tmp_path):
    def die_at(step, store):
        steps = iter(range(1000))

        def counted(real, *arguments):
            if next(steps) == step:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments)

        for name in ("fsync", "replace", "rename"):
            setattr(os, name, partial(counted, getattr(os, name)))
        write(store, images=8, total=8)

    expected = files(write(tmp_path / "whole", images=8, total=8).path)
    for step in range(11):  # every flush and rename of the first index, the first shard and the index that lists it
        store = tmp_path / f"killed-{step}"
        assert not in_a_child(lambda: die_at(step, store))  # noqa: B023
        assert files(write(store, images=8, total=8).path) == expected
