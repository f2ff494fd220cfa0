"""Several processes learn what one learns."""

import os
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from planted import planted
from sklearn.exceptions import ConvergenceWarning
from torch.distributed import HashStore

from pace import PACE
from pace.fitting.distributed import Team, fresh_part, processes

# 64 images in the first step, in chunks of 20; 1 in the second, for all processes.
REFINING = {"refine": 3, "max_iter": 1, "images": 65, "batch_size": 20}
KINDS = {
    "full batch": {"covariance": "full", "n_init": 2},
    "one view": {"covariance": "diag", "paired": False},
    "low rank": {"covariance": "low_rank", "rank": 2},
    "online": {"minibatch": 11},
    "refining": REFINING,
    "refining in float32": REFINING | {"dtype": "float32"},
    "refining if need be": {"refine": "auto", "prune": False, "enough": 10},
    "refining left out": {"refine": "auto", "prune": False, "enough": 10, "faithful": 0.0},
    "number found": {"n_concepts": "auto"},
    "more processes than groups": {"negatives": 23},
}


NEAR = {"refining in float32": {"rtol": 5e-6, "atol": 5e-6}}  # measured: 6e-7
# Checkpoints after which the processes are ended; of refining, those in the midst of it.
STOPS = {"full batch": (1, 2, 4, 6), "online": (1, 2, 4, 6), "refining": (1, 2)}


@cache
def drawn(images):
    return planted(0, k=3, d=4, images=images, grid=(2, 3))


def fit(kind, data=None, checkpoint=None, **more):
    chosen = {"n_concepts": 3, "negatives": 5, "batch_size": 5, "max_iter": 2, "max_sweeps": 4, "sweep_tol": 0.0,
              "head_steps": 3, "n_init": 1, "dtype": "float64", "device": "cpu"} | KINDS[kind] | more  # fmt: skip
    data = drawn(chosen.pop("images", 23)) if data is None else data
    perturbed = data.perturbed if chosen.pop("paired", True) else None
    enough, faithful = chosen.pop("enough", 1000), chosen.pop("faithful", 0.99)  # when to refine by default
    with (
        patch.multiple("pace.fitting.parameters", _AUTO_IMAGES=enough, _AUTO_STEPS=3),
        patch("pace.fitting.loop._FAITHFUL", faithful),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore", ConvergenceWarning)
        return PACE(**chosen).fit(data.observations, perturbed=perturbed, checkpoint=checkpoint, checkpoint_every=0.0)


# Forked, since starting Python and torch anew takes longer than all that these processes do.
FORKED = """
import os, sys, tempfile
sys.path.insert(0, sys.argv[1])
import torch, torch.distributed as dist
import test_distributed as t
torch.set_num_threads(1)
os.chdir(sys.argv[2])
t.fit("refining")  # imports whatever is imported on first use, once for all

def together(size, what):
    meeting = tempfile.mktemp()
    children = []
    for rank in range(size):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size)
                what(rank)
                dist.barrier()
                code = 0
            finally:
                os._exit(code)
        children.append(child)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]

def learn(rank):
    for kind in t.KINDS:
        t.fit(kind, distributed=True).save(f"{dist.get_world_size()}-{rank}-{kind}.safetensors")

assert [together(size, learn) for size in (2, 3)] == [[0, 0], [0, 0, 0]]

from pace.fitting.checkpoints import Checkpoint
write = Checkpoint.write

def stopping(kind, stop):
    writes = []
    def stopped(self, saved):
        write(self, saved)
        if kind != "refining" or "refining.step" in saved.common:
            writes.append(1)
        if len(writes) == stop:
            os._exit(9)
    Checkpoint.write = stopped

for kind, stops in t.STOPS.items():
    for stop in (None, *stops):
        def resumable(rank):
            t.fit(kind, checkpoint=f"fit-{kind}-{stop}", distributed=True).save(f"{kind}-{stop}-{rank}.safetensors")
        if stop is not None:
            assert together(2, lambda rank: (stopping(kind, stop), resumable(rank))) == [9, 9]
        assert together(2, resumable) == [0, 0]

def refusal(name, *arguments, **options):
    try:
        t.fit(*arguments, distributed=True, **options)
    except ValueError as error:
        open(name, "w").write(str(error))

assert together(2, lambda rank: refusal(f"unlike-{rank}", "one view", t.planted(rank, k=3, d=4, images=23))) == [0, 0]

child = os.fork()
if child == 0:
    stopping("one view", 2)
    t.fit("one view", checkpoint="fit")
os.waitpid(child, 0)
assert together(2, lambda rank: refusal(f"fewer-{rank}", "one view", checkpoint="fit")) == [0, 0]
"""


def alike(one, two, rtol=1e-7, atol=1e-9):
    for name in ("means_", "covariances_", "label_head_", "pair_weights_", "alpha_", "concept_weights_", "refinement_"):
        np.testing.assert_allclose(getattr(one, name), getattr(two, name), rtol=rtol, atol=atol, err_msg=name)
    np.testing.assert_allclose(np.array(one.lower_bounds_), np.array(two.lower_bounds_), rtol=max(1e-9, rtol / 100))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the processes leave what they learned."""
    if not hasattr(os, "fork"):
        pytest.skip("forks processes")
    where = tmp_path_factory.mktemp("processes")
    command = [sys.executable, "-c", FORKED, str(Path(__file__).parent), str(where)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return where


@pytest.mark.parametrize("kind", KINDS)
def test_two_and_three_processes_learn_what_one_learns(kind, folder):
    alone = fit(kind)
    for size in (2, 3):
        found = [PACE.load(folder / f"{size}-{rank}-{kind}.safetensors", device="cpu") for rank in range(size)]
        alike(found[0], alone, **NEAR.get(kind, {}))
        for other in found[1:]:  # all of them end with the same bits
            assert np.array_equal(found[0].means_, other.means_)
            assert np.array_equal(found[0].label_head_, other.label_head_)
            assert np.array_equal(found[0].refinement_, other.refinement_)


def test_the_first_process_says_for_all_whether_to_refine(folder):
    for kind, steps in (("refining if need be", 3), ("refining left out", 0)):
        found = [PACE.load(folder / f"2-{rank}-{kind}.safetensors").refinement_ for rank in (0, 1)]
        assert [len(terms) for terms in found] == [steps, steps]


def test_the_first_process_finds_the_number_for_all(folder):
    alone = fit("number found").selection_
    for rank in (0, 1):
        found = PACE.load(folder / f"2-{rank}-number found.safetensors").selection_
        assert found.bounds.equal(alone.bounds)
        assert found.evidence.equal(alone.evidence)


@pytest.mark.parametrize(("kind", "stop"), [(kind, stop) for kind, stops in STOPS.items() for stop in stops])
def test_stopped_anywhere_they_resume_together_to_the_same_bits(kind, stop, folder):
    whole = PACE.load(folder / f"{kind}-None-0.safetensors")
    for rank in (0, 1):
        again = PACE.load(folder / f"{kind}-{stop}-{rank}.safetensors")
        assert np.array_equal(again.means_, whole.means_)
        assert np.array_equal(again.covariances_, whole.covariances_)
        assert np.array_equal(again.refinement_, whole.refinement_)
        assert again.lower_bounds_ == whole.lower_bounds_
    assert not (folder / f"fit-{kind}-{stop}").exists()


def test_processes_that_were_given_different_things_say_so_instead_of_waiting(folder):
    messages = [(folder / f"unlike-{rank}").read_text() for rank in (0, 1)]
    assert all("were given different images or parameters" in message for message in messages)


def test_a_checkpoint_of_fewer_processes_is_refused_by_all(folder):
    messages = [(folder / f"fewer-{rank}").read_text() for rank in (0, 1)]
    assert all("is a checkpoint of 1 processes; resume it with as many, not 2" in message for message in messages)


def test_what_an_earlier_attempt_left_in_the_store_is_not_read():
    store, size = HashStore(), 3
    for attempt in range(3):
        with ThreadPoolExecutor(size) as pool:
            parts = list(pool.map(lambda rank: fresh_part(store, rank, size), range(size)))
        for rank, part in enumerate(parts):
            assert not any(part.check([f"address of {other}"]) for other in range(rank, size)), attempt
            part.set(f"address of {rank}", str(attempt))
        assert {part.get("address of 2") for part in parts} == {str(attempt).encode()}  # and all have the same part


def test_there_have_to_be_processes_to_share_with():
    with pytest.raises(ValueError, match=r"distributed=True needs the processes of torch.distributed"):
        fit("one view", distributed=True)
    with (
        pytest.raises(ValueError, match="start this program with torchrun --nproc-per-node"),
        processes("cpu"),
    ):
        pass


def test_one_process_alone_is_a_team():
    team = Team()
    assert team.gathered(7) == [7]
    assert team.from_first({}) == {}
