"""Reading ahead in a thread: one step, in order; errors in their place; nothing left over at the end."""

import subprocess
import sys
import threading
from unittest import mock

import pytest
import torch

from tests.data.test_loader import batches, ids_of
from toolkit.data.prefetch import Prefetcher

CPU = torch.device("cpu")


def has_readers() -> bool:
    """Whether a thread still reads; one that has read ends at once."""
    threads = [thread for thread in threading.enumerate() if thread.name == "read-ahead"]
    for thread in threads:
        thread.join(10)
    return any(thread.is_alive() for thread in threads)


@pytest.mark.parametrize("workers", [0, 2])
def test_steps_are_those_of_the_loader(workers):
    state = torch.get_rng_state()
    expected = [ids_of(step) for step in batches(total_positions=45)]
    ahead = Prefetcher(batches(total_positions=45, num_workers=workers), CPU)
    assert [ids_of(step) for step in ahead] == expected
    ahead.close()
    assert not has_readers() and torch.equal(torch.get_rng_state(), state)


def test_one_step_is_read_ahead_and_errors_keep_their_place():
    read = []

    def steps():
        for step in range(4):
            read.append(step)
            if step == 2:
                raise RuntimeError("step 2 is broken")
            yield [step]

    ahead = Prefetcher(steps(), CPU)
    assert read == []
    for step in range(2):
        assert next(ahead) == [step]
        ahead.pause()
        assert read == list(range(step + 2))
    with pytest.raises(RuntimeError, match="step 2 is broken"):
        next(ahead)
    ahead.close()
    assert not has_readers()
    Prefetcher(steps(), CPU).close()  # never used


def test_steps_for_cuda_are_read_when_asked_for():
    """Not while the first kernels of a step are launched, in turns with the thread that reads."""
    read = []

    def steps():
        for step in range(3):
            read.append(step)
            yield []

    ahead = Prefetcher(steps(), torch.device("cuda"))
    with mock.patch("torch.cuda.set_device"):
        for step in range(2):
            assert next(ahead) == [] and read == list(range(step + 1))
            ahead.pause()
            assert read == list(range(step + 1))
            ahead.start_read()
            ahead.start_read()
            ahead.pause()
            assert read == list(range(step + 2))
        ahead.close()


LEFT_OPEN = """
import sys, threading
import torch
from toolkit.data.loader import train_batches
from toolkit.data.order import ShuffledOrder
from toolkit.data.prefetch import Prefetcher

class Hanging:
    def __len__(self): return 100
    def __getitem__(self, index):
        if reads.value == 2:
            stuck.set()
            threading.Event().wait()
        with reads.get_lock():
            reads.value += 1
        return {"input_ids": torch.tensor([index]), "labels": torch.tensor([index])}

if __name__ == "__main__":
    import multiprocessing
    from toolkit.data import prefetch
    prefetch._CLOSE_SECONDS = 0.1
    stuck, reads = multiprocessing.Event(), multiprocessing.Value("i", 0)
    steps = train_batches(Hanging(), ShuffledOrder(100, 0), start_position=0, total_positions=None, global_batch_size=1,
                          micro_batch_size=1, rank=0, world_size=1, num_workers=int(sys.argv[1]))
    ahead = Prefetcher(steps, torch.device("cpu"))
    next(ahead), next(ahead)
    stuck.wait()
    if sys.argv[2] == "closed":
        ahead.close()
    raise SystemExit(7)
"""


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["0", "1"])
@pytest.mark.parametrize("end", ["closed", "left open"])
def test_s3_process_ends_while_a_read_hangs(workers, end):
    command = [sys.executable, "-c", LEFT_OPEN, workers, end]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (7, "")
