"""The store on disk: exact, lazy, safe against kills, full disks, damage and mixing."""

import errno
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pace.observations import Batch, Observations
from pace.observing.store import ObservationStore, StoreWriter, check, extremes
from pace.observing.store.reading import _chosen

FACTS = {"model": "tiny", "layer": "-1", "images": "numbers"}
TOKENS, DIM, CLASSES = 5, 3, 4


def make_batch(start: int, count: int) -> Batch:
    """Image i has the same values whoever asks for it."""
    each = [torch.Generator().manual_seed(1000 + image) for image in range(start, start + count)]
    return Batch(
        torch.stack([torch.randn(TOKENS, DIM, generator=random) for random in each]),
        torch.stack([torch.rand(TOKENS, generator=random).softmax(0) for random in each]),
        torch.stack([torch.randn(CLASSES, generator=random).softmax(0) for random in each]),
    )


def write(
    path: Path, images: int = 20, batch: int = 2, shard_bytes: int = 300, total: int | None = 20
) -> ObservationStore:
    with StoreWriter(
        path, fingerprint=FACTS, total=total, grid=(2, 2), prefix_tokens=1, shard_bytes=shard_bytes
    ) as writer:
        for gap in writer.gaps:
            for start in range(gap.start, min(gap.stop, images), batch):
                writer.append(start, make_batch(start, min(batch, images - start)))
    return ObservationStore.open(path)


def files(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir() if file.name != "lock"}


def test_what_is_read_is_what_was_written_in_float16_and_float32(tmp_path: Path) -> None:
    store = write(tmp_path)
    assert len(store.shards) > 3
    assert store.complete
    observations = store.observations()
    expected = make_batch(0, 20)
    batch = observations.batch(slice(None))
    assert torch.equal(batch.embeddings, expected.embeddings.half())
    assert torch.equal(batch.attention, expected.attention)
    assert batch.predictions is not None
    assert torch.equal(batch.predictions, expected.predictions)
    assert (observations.grid, observations.prefix_tokens) == ((2, 2), 1)
    assert repr(observations) == "Observations(20 images, 5 tokens (2 x 2), d = 3, 4 classes)"
    store.verify()


def test_a_batch_may_be_overwritten_once_it_is_appended(tmp_path: Path) -> None:
    batch = make_batch(0, 4)
    batch = batch._replace(embeddings=batch.embeddings.half())  # as the store keeps them: nothing to convert
    with StoreWriter(tmp_path, fingerprint=FACTS) as writer:
        writer.append(0, batch)
        for part in batch:
            assert part is not None
            part.zero_()
    found = ObservationStore.open(tmp_path).observations().batch(slice(None))
    assert torch.equal(found.embeddings, make_batch(0, 4).embeddings.half())
    assert torch.equal(found.attention, make_batch(0, 4).attention)


@settings(max_examples=150, deadline=None)
@given(
    field=st.sampled_from(["embeddings", "attention", "predictions"]),
    value=st.sampled_from([np.nan, np.inf, -np.inf, -1.0, -1e-7, 0.0, 0.015, 0.9, 1e30]),
    place=st.integers(0, 1000),
    whole_image=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
)
def test_a_batch_is_refused_exactly_when_observations_refuse_it(
    field: str, value: float, place: int, whole_image: bool, dtype: torch.dtype
) -> None:
    batch = make_batch(0, 3)._asdict()
    batch[field] = batch[field].to(dtype)
    rows = batch[field].view(3, -1)
    rows[place % 3, slice(None) if whole_image else place % rows.shape[1]] = value
    changed = Batch(**batch)
    try:
        Observations(*changed, grid=(2, 2), prefix_tokens=1)
    except ValueError as error:
        with pytest.raises(ValueError, match=f"in the batch from image 7 on: {re.escape(str(error))}"):
            check(7, changed, extremes(changed.embeddings), (2, 2), 1)
    else:
        check(7, changed, extremes(changed.embeddings), (2, 2), 1)


def test_shards_are_plain_safetensors_files(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    store = write(tmp_path)
    tensors = load_file(tmp_path / store.shards[1].file)
    rows = slice(store.shards[1].start, store.shards[1].stop)
    assert torch.equal(tensors["embeddings"], make_batch(0, 20).embeddings[rows].half())


def test_observations_without_predictions_are_stored(tmp_path: Path) -> None:
    with StoreWriter(tmp_path, fingerprint=FACTS) as writer:
        writer.append(0, make_batch(0, 3)._replace(predictions=None))
        writer.finish(3)
    assert ObservationStore.open(tmp_path).observations().predictions is None


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Observations:
    return write(tmp_path_factory.mktemp("stored")).observations()


indices = st.lists(st.integers(-20, 19), max_size=30)
slices = st.slices(20)


@settings(max_examples=60, deadline=None)
@given(key=st.one_of(indices, slices, st.integers(-20, 19), st.lists(st.booleans(), min_size=20, max_size=20)))
def test_indexing_equals_numpy_indexing(stored: Observations, key: list[int] | slice | int) -> None:
    array = make_batch(0, 20).embeddings.half().numpy()
    index = np.asarray(key, dtype=np.intp) if key == [] else key
    assert np.array_equal(np.asarray(stored.embeddings[key]), array[index])


@settings(max_examples=40, deadline=None)
@given(first=slices, second=indices)
def test_a_selection_of_a_selection_equals_numpys(stored: Observations, first: slice, second: list[int]) -> None:
    array = make_batch(0, 20).attention.numpy()[first]
    second = [index for index in second if -len(array) <= index < len(array)]
    assert np.array_equal(np.asarray(stored.attention[first][second]), array[np.asarray(second, dtype=np.intp)])


def test_choosing_images_takes_no_time_for_the_others() -> None:
    many = range(7, 10**15, 3)
    assert _chosen(many, np.array([2, -1, 0])).tolist() == [13, many[-1], 7]
    assert _chosen(range(5, 8), np.array([True, False, True])).tolist() == [5, 7]
    assert _chosen(many, np.array([])).tolist() == []
    for wrong in ([10**15], [-(10**15)], [0.5], [True, False], [[1]]):
        with pytest.raises(IndexError, match="expected"):
            _chosen(many, np.array(wrong))


def test_an_image_that_does_not_exist_is_an_index_error(stored: Observations) -> None:
    with pytest.raises(IndexError):
        stored.embeddings[20]
    with pytest.raises(IndexError):
        stored.embeddings[[3, 20]]
    with pytest.raises(TypeError, match="one index"):
        stored.embeddings[3, 0]


def test_part_of_stored_observations_reads_nothing_until_asked(
    stored: Observations, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(*_: object) -> None:
        raise AssertionError("read")

    with monkeypatch.context() as patch:
        patch.setattr(np, "memmap", read)
        part = stored[5:15][[0, 3]]
    assert torch.equal(part.batch(slice(None)).attention, make_batch(0, 20).attention[[5, 8]])


def test_a_reader_sees_finished_shards_while_the_writer_goes_on(tmp_path: Path) -> None:
    with StoreWriter(tmp_path, fingerprint=FACTS, total=20, shard_bytes=1) as writer:
        with pytest.raises(ValueError, match="no finished shard yet"):
            ObservationStore.open(tmp_path).observations()
        writer.append(0, make_batch(0, 4))
        early = ObservationStore.open(tmp_path)
        observations = early.observations()
        writer.append(4, make_batch(4, 4))
        assert (len(early), len(observations), early.complete) == (4, 4, False)
        assert len(ObservationStore.open(tmp_path)) == 8
    assert torch.equal(observations.batch(slice(None)).attention, make_batch(0, 4).attention)


def test_embeddings_beyond_float16_are_kept_in_float32_never_infinite(tmp_path: Path) -> None:
    batch = make_batch(2, 2)
    batch.embeddings[1, 2, 0] = -70000.0
    with StoreWriter(tmp_path, fingerprint=FACTS, shard_bytes=1) as writer:
        writer.append(0, make_batch(0, 2))
        writer.append(2, batch)
    embeddings = np.asarray(ObservationStore.open(tmp_path).observations().embeddings)
    assert embeddings.dtype == np.float32
    assert embeddings[3, 2, 0] == -70000.0
    assert np.array_equal(embeddings[2:], batch.embeddings.numpy())
    assert np.array_equal(embeddings[:2], make_batch(0, 2).embeddings.half().float().numpy())


def test_small_probabilities_do_not_become_zero(tmp_path: Path) -> None:
    predictions = torch.tensor([[1 - 1e-12, 1e-12, 1e-30, 0.0]])
    with StoreWriter(tmp_path, fingerprint=FACTS) as writer:
        writer.append(0, make_batch(0, 1)._replace(predictions=predictions))
    stored = ObservationStore.open(tmp_path).observations().batch(slice(None)).predictions
    assert stored is not None
    assert torch.equal(stored, predictions)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("embeddings", float("nan"), "in the batch from image 6 on: embeddings of image 1 is NaN or infinite"),
        ("embeddings", float("inf"), "embeddings of image 1 is NaN or infinite"),
        ("attention", -1.0, "attention of image 1 is negative"),
        ("predictions", 3.0, "not a distribution"),
    ],
)
def test_bad_values_are_refused_and_the_good_ones_before_stay(
    tmp_path: Path, field: str, value: float, message: str
) -> None:
    batch = make_batch(6, 2)
    getattr(batch, field)[1, 0] = value
    with StoreWriter(tmp_path, fingerprint=FACTS) as writer:
        writer.append(0, make_batch(0, 6))
        with pytest.raises(ValueError, match=message):
            writer.append(6, batch)
    assert len(ObservationStore.open(tmp_path).observations()) == 6


def test_batches_of_another_shape_are_refused(tmp_path: Path) -> None:
    write(tmp_path, images=4)
    other = make_batch(4, 2)._replace(predictions=torch.full((2, 9), 1 / 9))
    with StoreWriter(tmp_path, fingerprint=FACTS, total=20, grid=(2, 2), prefix_tokens=1) as writer:
        with pytest.raises(ValueError, match=r"\(9,\).*those before.*\(4,\)"):
            writer.append(4, other)
        writer.append(4, make_batch(4, 2))
    assert len(ObservationStore.open(tmp_path)) == 6


def test_images_that_are_there_are_not_written_twice(tmp_path: Path) -> None:
    with StoreWriter(tmp_path, fingerprint=FACTS, total=6) as writer:
        writer.append(0, make_batch(0, 4))
        with pytest.raises(ValueError, match=r"images 2 to 3 are in .* already"):
            writer.append(2, make_batch(2, 2))
        with pytest.raises(ValueError, match="beyond its end"):
            writer.append(4, make_batch(4, 4))
    assert len(ObservationStore.open(tmp_path)) == 4


def test_resuming_writes_the_rest_only_and_gives_the_same_files(tmp_path: Path) -> None:
    write(tmp_path / "whole")
    write(tmp_path / "parts", images=6)
    before = files(tmp_path / "parts")
    write(tmp_path / "parts")
    after = files(tmp_path / "parts")
    assert after == files(tmp_path / "whole")
    assert all(after[name] == data for name, data in before.items() if name != "index.json")


def test_a_complete_store_asks_for_nothing_more(tmp_path: Path) -> None:
    write(tmp_path)
    with StoreWriter(tmp_path, fingerprint=FACTS, total=20, grid=(2, 2), prefix_tokens=1) as writer:
        assert writer.gaps == []


def test_a_store_of_unknown_length_is_complete_after_finish(tmp_path: Path) -> None:
    assert not write(tmp_path, images=10, total=None).complete
    with StoreWriter(tmp_path, fingerprint=FACTS, grid=(2, 2), prefix_tokens=1) as writer:
        assert writer.gaps[0].start == 10
        assert writer.finish(10).complete


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fingerprint": {**FACTS, "layer": "3"}}, "layer was -1, now 3"),
        ({"fingerprint": {"model": "tiny", "layer": "-1"}}, "images was numbers, now not given"),
        ({"grid": (4, 1)}, r"grid was \(2, 2\), now \(4, 1\)"),
        ({"total": 21}, "number of images was 20, now 21"),
    ],
)
def test_other_observations_are_refused_and_the_message_says_what_differs(
    tmp_path: Path, change: dict[str, object], message: str
) -> None:
    write(tmp_path, images=6)
    before = files(tmp_path)
    same = {"fingerprint": FACTS, "total": 20, "grid": (2, 2), "prefix_tokens": 1}
    with pytest.raises(ValueError, match=message):
        StoreWriter(tmp_path, **{**same, **change})  # type: ignore[arg-type]
    assert files(tmp_path) == before
    write(tmp_path)  # the refused writer left no lock behind


def test_there_is_one_writer_at_a_time(tmp_path: Path) -> None:
    with StoreWriter(tmp_path, fingerprint=FACTS), pytest.raises(BlockingIOError, match="somebody else is writing"):
        StoreWriter(tmp_path, fingerprint=FACTS)
    StoreWriter(tmp_path, fingerprint=FACTS).__exit__(None, None, None)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_children_of_a_killed_writer_do_not_keep_the_store_locked(tmp_path: Path) -> None:
    waiting, release = os.pipe()
    ready, tell = os.pipe()
    parent = os.fork()
    if parent == 0:
        writer = StoreWriter(tmp_path, fingerprint=FACTS)
        if os.fork() == 0:  # as the workers of a DataLoader are
            os.close(release)
            os.write(tell, b"x")
            os.read(waiting, 1)
            os._exit(0)
        os.read(ready, 1)
        os.write(tell, b"x")
        os.kill(os.getpid(), signal.SIGKILL)
        writer.finish()
    try:
        os.waitpid(parent, 0)
        assert os.read(ready, 1) == b"x"
        with StoreWriter(tmp_path, fingerprint=FACTS) as writer:  # while the child lives
            writer.append(0, make_batch(0, 2))
    finally:
        for file in (waiting, release, ready, tell):
            os.close(file)


def test_a_folder_of_something_else_is_refused_untouched(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(ValueError, match=r"not an observation store \(it holds thesis.tex\)"):
        StoreWriter(tmp_path, fingerprint=FACTS)
    assert files(tmp_path) == {"thesis.tex": b"precious"}
    with pytest.raises(FileNotFoundError, match=r"no index\.json"):
        ObservationStore.open(tmp_path)


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"format": "other"}', '{"format": "pace-observations", "version": 99}']
)
def test_an_unreadable_index_is_a_clear_error(tmp_path: Path, content: str) -> None:
    (tmp_path / "index.json").write_text(content)
    with pytest.raises(ValueError, match=r"index\.json cannot be read"):
        ObservationStore.open(tmp_path)


def damage(file: Path, how: str) -> None:
    if how == "missing":
        file.unlink()
    elif how == "truncated":
        os.truncate(file, file.stat().st_size - 7)
    else:
        data = bytearray(file.read_bytes())
        data[-9] ^= 1
        file.write_bytes(data)


@pytest.mark.parametrize("how", ["missing", "truncated", "one bit"])
def test_a_damaged_shard_is_named_and_only_it_is_done_again(tmp_path: Path, how: str) -> None:
    write(tmp_path / "whole")
    store = write(tmp_path / "store")
    damage(tmp_path / "store" / store.shards[2].file, how)
    if how == "one bit":
        with pytest.raises(ValueError, match=store.shards[2].file):
            ObservationStore.open(tmp_path / "store").verify()
    else:
        with pytest.raises(ValueError, match=f"{store.shards[2].file} is damaged: it .*repair"):
            ObservationStore.open(tmp_path / "store")
        with pytest.raises(ValueError, match="is damaged"):
            write(tmp_path / "store")
    untouched = {name: data for name, data in files(tmp_path / "store").items() if name != store.shards[2].file}
    assert ObservationStore.repair(tmp_path / "store") == store.shards[2].images
    del untouched["index.json"]
    assert untouched.items() <= files(tmp_path / "store").items()
    with pytest.raises(ValueError, match=f"lacks images {store.shards[2].start} to {store.shards[2].stop - 1}"):
        ObservationStore.open(tmp_path / "store").observations()
    write(tmp_path / "store")
    assert files(tmp_path / "store") == files(tmp_path / "whole")


def test_a_shard_truncated_while_a_reader_has_it_is_an_error_not_a_crash(tmp_path: Path) -> None:
    store = write(tmp_path)
    observations = store.observations()
    os.truncate(tmp_path / store.shards[0].file, 200)
    with pytest.raises(ValueError, match="damaged"):
        observations.batch(slice(0, 1))


def test_a_full_disk_is_a_clear_error_and_what_was_finished_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, images=8)
    finished = len(ObservationStore.open(tmp_path))

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        real = os.fsync
        calls = iter([real])  # the index at the start is still written
        patch.setattr(os, "fsync", lambda descriptor: next(calls, full)(descriptor))
        patch.setattr(os, "name", "other")  # count files alone, not folders
        with pytest.raises(OSError, match=f"the disk is full; the {finished} images finished before stay") as caught:
            write(tmp_path)
    assert caught.value.errno == errno.ENOSPC
    assert not list(tmp_path.glob("*.tmp"))
    assert len(ObservationStore.open(tmp_path).observations()) == finished
    write(tmp_path).verify()


LIMITED = """
import resource, sys
sys.path[:0] = {path!r}
from pathlib import Path
import test_store
resource.setrlimit(resource.RLIMIT_FSIZE, (1100, 1100))
test_store.write(Path(sys.argv[1]), shard_bytes=20000)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs RLIMIT_FSIZE")
def test_a_file_that_cannot_grow_is_a_clear_error(tmp_path: Path) -> None:
    write(tmp_path, images=6, shard_bytes=400)
    code = LIMITED.format(path=[str(Path(__file__).parent), *sys.path])
    ended = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    assert "OSError: [Errno 27] cannot write" in ended.stderr
    assert "the 6 images finished before stay" in ended.stderr
    assert not list(tmp_path.glob("*.tmp"))
    assert len(ObservationStore.open(tmp_path).observations()) == 6


# Children are forked from a small process of their own, which has not used torch's threads yet.
KILLED = """
import os, random, signal, sys, time
sys.path[:0] = {path!r}
from pathlib import Path
import test_store

def die(): os.kill(os.getpid(), signal.SIGKILL)

def child(store, before_call, after_call):
    calls = 0
    for name in ("fsync", "replace", "rename"):
        def counted(*arguments, real=getattr(os, name)):
            nonlocal calls
            calls += 1
            calls == before_call and die()
            result = real(*arguments)
            calls == after_call and die()
            return result
        setattr(os, name, counted)
    test_store.write(store)
    os._exit(0)

def run(store, before_call=None, after_call=None, seconds=None):
    pid = os.fork()
    if pid == 0:
        child(store, before_call, after_call)
    if seconds is not None:
        time.sleep(seconds)
        os.kill(pid, signal.SIGKILL)
    return os.waitpid(pid, 0)[1] == 0

target = Path(sys.argv[1])
begin = time.perf_counter()
assert run(target / "whole")
whole = time.perf_counter() - begin
kills = 0
for call in range(1, 14):  # at every flush and rename of the index and the first two shards
    for when in ("before_call", "after_call"):
        kills += not run(target / f"{{when}}-{{call}}", **{{when: call}})
        assert run(target / f"{{when}}-{{call}}")
choose = random.Random(0)
for trial in range(6):  # anywhere, several times
    for _ in range(3):
        ended = run(target / f"random-{{trial}}", seconds=choose.uniform(0, whole))
        kills, whole = kills + (not ended), whole / 2 if ended else whole  # too late: sooner next time
    assert run(target / f"random-{{trial}}")
print(kills)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_killed_at_any_point_and_resumed_a_store_is_the_same_bit_for_bit(tmp_path: Path) -> None:
    code = KILLED.format(path=[str(Path(__file__).parent), *sys.path])
    ended = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout) > 26
    expected = files(tmp_path / "whole")
    assert json.loads(expected["index.json"])["total"] == 20
    for store in tmp_path.iterdir():
        assert files(store) == expected, store.name
