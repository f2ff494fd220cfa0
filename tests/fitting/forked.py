"""Fits in several processes, and in processes that are killed: `python forked.py FOLDER` leaves there what they learned.

They are forked, since starting Python and torch anew takes longer than all that these processes do.
"""

import os
import random
import signal
import sys
import tempfile
import time
import traceback
import warnings
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import torch
from sklearn.exceptions import ConvergenceWarning
from torch import distributed as dist

sys.path.append(str(Path(__file__).parents[1]))
from planted import planted

from pace import PACE, Observations
from pace.fitting.arguments import plan_of, settings_of
from pace.fitting.checkpoints import Checkpoint
from pace.fitting.distributed import Team
from pace.fitting.loop import run
from pace.fitting.start import find_start

# 130 images are three groups of negatives; with so little memory a process works on a few at a time.
KINDS = {
    "full batch": {"covariance": "full", "n_init": 2},
    "low rank": {"covariance": "low_rank"},
    "one view": {"covariance": "diag", "paired": False, "memory": "30kB"},
    "online": {"minibatch": 70},
    "refining": {"refine": 3, "memory": "30kB"},
    "number found": {"n_concepts": "auto"},
    "more processes than groups": {"images": 23},
}
STOPPED = {"full batch": 3, "online": 5, "refining": 4}  # checkpoints: the start, epochs or minibatches, refining
KILLED = [(1, "online"), (1, "refining"), (2, "full batch")]  # processes


@cache
def drawn(images, seed=0):
    return planted(seed, k=3, d=4, images=images, grid=(2, 3))


def fit(kind, seed=0, checkpoint=None, **more):
    chosen = {"n_concepts": 3, "max_iter": 2, "n_init": 1, "dtype": "float64", "device": "cpu"} | KINDS[kind] | more
    data = drawn(chosen.pop("images", 130), seed)
    perturbed = data.perturbed if chosen.pop("paired", True) else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return PACE(**chosen).fit(data.observations, perturbed=perturbed, checkpoint=checkpoint, checkpoint_every=0.0)


def refining_steps(random_predictions, team):
    """How many are made where concepts are refined only if the prediction does not follow from them already."""
    seen, rng = drawn(130).observations, np.random.default_rng(0)
    predicted = rng.integers(0, 2, len(seen)) if random_predictions else np.zeros(len(seen), int)
    seen = Observations(seen.embeddings, seen.attention, np.eye(2)[predicted])
    model = PACE(3, refine=3, max_iter=1, n_init=1, device="cpu")
    settings = settings_of(model, seen)
    plan = replace(plan_of(model, seen, None, settings), refine_anyway=False)

    def start():
        return find_start(model, seen, None, settings)

    return len(run(seen, None, settings, plan, team, None, start, lambda *_: None).refinement)


def begin(size, what):
    """The ids of so many processes that call `what` with their rank."""
    meeting, children = Path(tempfile.mkdtemp()) / "meeting", []
    for rank in range(size):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                if size > 1:
                    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size)
                what(rank)
                if size > 1:
                    dist.barrier()
                code = 0
            except BaseException:
                traceback.print_exc()
            os._exit(code)
        children.append(child)
    return children


def together(size, what, code=0):
    ends = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in begin(size, what)]
    assert ends == [code] * size, ends


def learn(rank):
    for kind in KINDS:
        fit(kind, distributed=True).save(f"{dist.get_world_size()}-{rank}-{kind}", statistics=True)


def stop_after_a_checkpoint():
    write = Checkpoint.write

    def stop(self, *tensors):
        write(self, *tensors)
        if dist.is_initialized():
            dist.barrier()
        os._exit(9)

    Checkpoint.write = stop


def stopped_and_resumed(kind, stops):
    def resume(rank):
        fit(kind, checkpoint=f"fit-{kind}", distributed=True).save(f"stopped-{rank}-{kind}", statistics=True)

    for _ in range(stops):
        together(2, lambda rank: (stop_after_a_checkpoint(), resume(rank)), code=9)
    together(2, resume)


def killed_and_resumed(kind, size):
    def resume(rank):
        name = f"killed-{size}-{rank}-{kind}"
        fit(kind, checkpoint=f"fit-{size}-{kind}", distributed=size > 1).save(name, statistics=True)

    kills, longest = 0, 0.02 * size
    while not all(Path(f"killed-{size}-{rank}-{kind}").exists() for rank in range(size)):
        children = begin(size, resume)
        time.sleep(random.uniform(0, longest))
        for child in children:
            os.kill(child, signal.SIGKILL)
        for child in children:
            os.waitpid(child, 0)
        kills, longest = kills + 1, longest * 1.2
    assert kills > 3


def say(name, ask):
    try:
        answer = ask()
    except ValueError as error:
        answer = error
    Path(name).write_text(str(answer))


def agree(rank):
    team = Team.of_all(torch.device("cpu"))
    say(f"refined-{rank}", lambda: [refining_steps(random_predictions, team) for random_predictions in (True, False)])
    say(f"unlike-{rank}", lambda: fit("one view", seed=rank, distributed=True))
    say(f"fewer-{rank}", lambda: fit("one view", checkpoint="fit-alone", distributed=True))


if __name__ == "__main__":
    torch.set_num_threads(1)  # a forked process cannot have the threads of the one it came from
    os.chdir(sys.argv[1])
    random.seed(0)
    for kind in KINDS:  # also imports whatever is imported on first use, once for all
        fit(kind).save(f"1-0-{kind}", statistics=True)
    for size in (2, 3):
        together(size, learn)
    for kind, stops in STOPPED.items():
        stopped_and_resumed(kind, stops)
    for size, kind in KILLED:
        killed_and_resumed(kind, size)
    together(1, lambda rank: (stop_after_a_checkpoint(), fit("one view", checkpoint="fit-alone")), code=9)
    together(2, agree)
