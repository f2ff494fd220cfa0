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
from pathlib import Path

import torch
from torch import distributed as dist

sys.path.append(str(Path(__file__).parents[1]))
from fits import KINDS, drawn, fit

from pace.fitting.checkpoints import Checkpoint

STOPPED = {
    "full batch": 3,
    "online": 5,
    "parts and kinds": 4,
}  # checkpoints: the start, epochs or minibatches, refining


def begin(size, what):
    """The ids of so many processes that call `what` with their rank."""
    meeting, children = Path(tempfile.mkdtemp(dir=".")).resolve() / "meeting", []
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


def killed_and_resumed(kind):
    def resume(rank):
        fit(kind, checkpoint=f"fit-{kind}", distributed=True).save(f"killed-{rank}-{kind}", statistics=True)

    kills, longest = 0, 0.1
    while not all(Path(f"killed-{rank}-{kind}").exists() for rank in (0, 1)):
        children = begin(2, resume)
        time.sleep(random.uniform(0, longest))
        for child in children:
            os.kill(child, signal.SIGKILL)
        for child in children:
            os.waitpid(child, 0)
        kills, longest = kills + 1, longest * 1.2
    assert kills > 3


def refuse(rank):
    for name, options in {"unlike": {"data": drawn(seed=rank)}, "fewer": {"checkpoint": "fit-alone"}}.items():
        try:
            fit("one view", distributed=True, **options)
        except ValueError as error:
            Path(f"{name}-{rank}").write_text(str(error))


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
    killed_and_resumed("parts and kinds")
    together(1, lambda rank: (stop_after_a_checkpoint(), fit("one view", checkpoint="fit-alone")), code=9)
    together(2, refuse)
