import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import time
from itertools import islice
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import numpy as np
import pytest
import torch

from toolkit.data.batch import NO_ROUNDING, Batch, Padding, choose_padding
from toolkit.data.loader import train_batches, val_batches
from toolkit.data.order import ShuffledOrder, shuffled_index
from toolkit.data.prefetch import Prefetcher
from toolkit.data.tokens.synthetic import SyntheticRows
from toolkit.errors import DataError

T = 8
N = 29
ROWS = SyntheticRows(vocab_size=100, num_rows=N, seed=0, block_size=T + 1)


def batches(**changes):
    options = {
        "start_position": 0, "total_positions": None, "global_batch_size": 8, "micro_batch_size": 2,
        "rank": 0, "world_size": 1, "num_workers": 0,
    }  # fmt: skip
    return train_batches(ROWS, ShuffledOrder(N, 5), **(options | changes))


def ids_of(step: list[Batch]) -> list[int]:
    return [i for batch in step for i in batch.ids]


def stream(start: int, stop: int) -> list[int]:
    return [shuffled_index(p, N, 5) for p in range(start, stop)]


@pytest.mark.parametrize(("world", "micro"), [(1, 8), (1, 4), (1, 1), (2, 4), (2, 2), (4, 2), (4, 1)])
def test_n3_ranks_and_micro_batches_share_one_global_batch(world, micro):
    """For any layout, the union is the global batch, in order, across the end of an epoch."""
    ranks = [batches(world_size=world, rank=r, micro_batch_size=micro) for r in range(world)]
    for s in range(8):  # 64 positions: two epochs of 29 rows and more
        steps = [next(rank) for rank in ranks]
        assert all(len(step) == 8 // (world * micro) for step in steps)
        in_order = [i for a in range(8 // (world * micro)) for step in steps for i in step[a].ids]
        assert in_order == stream(s * 8, s * 8 + 8)


def test_n3_sample_keys_are_positions_in_the_stream_and_rows_in_validation():
    """For any layout, workers included; filler rows have none."""
    for world, micro, workers in ((1, 8, 0), (2, 2, 0), (1, 4, 1)):
        options = {"world_size": world, "micro_batch_size": micro, "num_workers": workers, "total_positions": 45}
        for rank in range(world):
            for batch in (one for step in batches(rank=rank, start_position=40, **options) for one in step):
                assert batch.ids == [-1 if key < 0 else shuffled_index(key, N, 5) for key in batch.sample_keys]
                assert all(40 <= key < 45 for key in batch.sample_keys if key >= 0)
                assert batch.inputs(torch.device("cpu"), with_keys=True)["sample_keys"].tolist() == batch.sample_keys
    for batch in val_batches(ROWS, micro_batch_size=4, rank=1, world_size=2, max_rows=None):
        assert batch.sample_keys == batch.ids


def test_s2_starting_at_a_step_equals_continuing():
    through = list(islice(batches(), 9))
    for step, later in zip(range(4, 9), batches(start_position=4 * 8), strict=False):
        assert ids_of(through[step]) == ids_of(later)
        assert all(torch.equal(a.input_ids, b.input_ids) for a, b in zip(through[step], later, strict=True))


def test_seeking_to_a_far_step_is_instant():
    assert ids_of(next(batches(start_position=8 * 10**9))) == stream(8 * 10**9, 8 * 10**9 + 8)


def test_batches_equal_their_rows():
    batch = next(batches())[1]
    assert batch.input_ids.shape == batch.labels.shape == (2, T)
    assert batch.input_ids.dtype == batch.labels.dtype == torch.int64
    for i, row in enumerate(batch.ids):
        assert torch.equal(batch.input_ids[i], ROWS[row]["input_ids"])
        assert torch.equal(batch.labels[i, :-1], batch.input_ids[i, 1:])
    assert batch.n_tokens == batch.n_inputs == 2 * T


@pytest.mark.parametrize("world", [1, 2, 4])
def test_short_last_batch_is_completed_with_fillers(world):
    """Of 21 rows, the third step has 5 real rows; all ranks have equally many batches of equal shape."""
    ranks = [list(batches(total_positions=21, world_size=world, rank=r)) for r in range(world)]
    assert [len(rank) for rank in ranks] == [3] * world
    last = [batch for rank in ranks for batch in rank[-1]]
    assert len(last) == 4 and all(batch.input_ids.shape == (2, T) for batch in last)
    real = [i for batch in last for i in batch.ids if i >= 0]
    assert sorted(real) == sorted(stream(16, 21))
    assert sum(batch.n_tokens for batch in last) == sum(batch.n_inputs for batch in last) == 5 * T
    for batch in last:
        for i, row in enumerate(batch.ids):
            assert (batch.labels[i] == -100).all() == (row == -1)


def test_no_batches_after_the_last_step():
    assert list(batches(total_positions=16, start_position=2 * 8)) == []
    assert list(batches(total_positions=16, start_position=5 * 8)) == []


def test_workers_do_not_change_the_result():
    expected = list(batches(total_positions=45))
    found = list(batches(total_positions=45, num_workers=2))
    assert len(expected) == len(found)
    for step, other in zip(expected, found, strict=True):
        assert ids_of(step) == ids_of(other)
        assert all(torch.equal(a.labels, b.labels) for a, b in zip(step, other, strict=True))


@pytest.mark.parametrize("workers", [0, 2])
def test_global_random_state_is_unchanged(workers):
    torch.manual_seed(0)
    before = torch.get_rng_state()
    next(batches(num_workers=workers))
    assert torch.equal(before, torch.get_rng_state())


def test_batches_of_workers_need_no_shared_memory():
    """A tensor would be sent through /dev/shm; without space there, a run hung."""
    batch = next(batches())[0]
    batch.values = {"weight": torch.ones(2, dtype=torch.float64)}
    sent = bytes(ForkingPickler.dumps(batch))
    assert batch.input_ids.numpy().tobytes() in sent and batch.labels.numpy().tobytes() in sent
    received = pickle.loads(sent)
    assert torch.equal(received.input_ids, batch.input_ids) and torch.equal(received.values["weight"], torch.ones(2))
    assert received.counts == batch.counts and received.ids == batch.ids


SMALL_MEMORY = """
from tests.data.test_loader import batches
assert len(next(batches(num_workers=2))) == 4
"""


@pytest.mark.slow
def test_workers_with_little_shared_memory():
    mount = "mount -t tmpfs -o size=64k tmpfs /dev/shm"
    if subprocess.run(["unshare", "-m", "sh", "-c", mount], capture_output=True).returncode:
        pytest.skip("mounting a small /dev/shm needs the right to")
    script = ["unshare", "-m", "sh", "-c", f'{mount}; exec "$0" -c "$1"', sys.executable, SMALL_MEMORY]
    subprocess.run(script, check=True, timeout=120, cwd=Path(__file__).parents[2])


@pytest.mark.parametrize(("error", "what"), [(None, "unexpectedly"), (OSError(28, "No space"), "No space")])
def test_a_worker_that_fails_is_a_data_error(monkeypatch, error, what):
    def fail(*args, **options):
        raise error

    if error is not None:
        monkeypatch.setattr("torch.multiprocessing.Event", fail)
    poll = "torch.utils.data.dataloader._MultiProcessingDataLoaderIter._try_get_data.__defaults__"
    monkeypatch.setattr(poll, (0.1,))  # seconds; 5 s by default
    steps = Prefetcher(batches(num_workers=1), torch.device("cpu"))
    torch_handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # set in the main thread only, not in a run
    try:
        with pytest.raises(DataError, match=f"--data.num_workers 1: a process failed: .*{what}.*use fewer, or 0"):
            for step in steps:
                assert len(step) == 4
                for worker in multiprocessing.active_children():
                    worker.kill()
    finally:
        steps.close()
        signal.signal(signal.SIGCHLD, torch_handler)


def test_rows_are_read_lazily():
    read = []

    class Recorded:
        def __len__(self):
            return N

        def __getitem__(self, index):
            read.append(index)
            return ROWS[index]

    endless = train_batches(
        Recorded(), ShuffledOrder(N, 0), start_position=0, total_positions=None, global_batch_size=8,
        micro_batch_size=2, rank=0, world_size=1, num_workers=0,
    )  # fmt: skip
    assert read == []
    next(endless)
    assert len(read) == 8


def test_ragged_rows_are_padded_to_the_longest():
    lengths = [3, 5]
    rows = [{"input_ids": torch.arange(1, n + 1), "labels": torch.full((n,), 7)} for n in lengths]
    (batch,) = val_batches(rows, micro_batch_size=3, rank=0, world_size=1, max_rows=None, padding=Padding(token=9))
    assert batch.input_ids.tolist() == [[1, 2, 3, 9, 9], [1, 2, 3, 4, 5], [9] * 5]
    assert batch.labels.tolist() == [[7, 7, 7, -100, -100], [7] * 5, [-100] * 5]
    assert (batch.n_inputs, batch.n_tokens, batch.ids) == (8, 8, [0, 1, -1])


def test_lengths_are_rounded_up_only_on_cuda_and_within_the_context():
    assert choose_padding("cuda", True, 100) == Padding(64, 100)
    assert choose_padding("cuda", True, 384, 6) == Padding(192, 384)
    assert choose_padding("cpu", False, 100, 4) == Padding(4, 100)
    for case in [("cuda", True, None), ("cuda", False, 100), ("cpu", True, 100), ("mps", True, 100)]:
        assert choose_padding(*case).multiple == 1
    assert [Padding(64, 100).width(n) for n in (1, 63, 64, 65, 100)] == [64, 64, 64, 100, 100]
    assert [NO_ROUNDING.width(n) for n in (1, 65, 100)] == [1, 65, 100]


def test_eos_used_as_padding_is_supervised_at_the_end_of_a_text():
    """Padding is identified by its position, not by its id."""
    eos = 9
    rows = [
        {"input_ids": torch.tensor(ids[:-1]), "labels": torch.tensor(ids[1:])} for ids in ([1, 2, eos], [1, 2, 3, eos])
    ]
    (batch,) = val_batches(rows, micro_batch_size=2, rank=0, world_size=1, max_rows=None, padding=Padding(token=eos))
    assert batch.input_ids.tolist() == [[1, 2, eos], [1, 2, 3]]
    assert batch.labels.tolist() == [[2, eos, -100], [2, 3, eos]]
    assert (batch.n_inputs, batch.n_tokens) == (5, 5)


def test_n1_indivisible_global_batch_is_an_error():
    with pytest.raises(ValueError, match="cannot reshape"):
        next(batches(world_size=3))


@pytest.mark.parametrize("world", [1, 2, 4])
def test_n6_validation_reads_every_row_once(world):
    ranks = [list(val_batches(ROWS, micro_batch_size=4, rank=r, world_size=world, max_rows=None)) for r in range(world)]
    assert len({len(rank) for rank in ranks}) == 1
    in_order = [i for step in zip(*ranks, strict=True) for batch in step for i in batch.ids if i >= 0]
    assert in_order == list(range(N))
    assert sum(batch.n_tokens for rank in ranks for batch in rank) == N * T


@pytest.mark.parametrize(("micro_batch_size", "world_size"), [(1, 1), (2, 2), (4, 1), (3, 2)])
def test_max_rows_selects_the_same_rows_on_any_layout(micro_batch_size, world_size):
    found = [
        row
        for rank in range(world_size)
        for batch in val_batches(ROWS, micro_batch_size=micro_batch_size, rank=rank, world_size=world_size, max_rows=11)
        for row in batch.ids
        if row >= 0
    ]
    assert sorted(found) == list(range(11))


LISTENING = """
import signal, sys
from toolkit.data.loader import train_batches
from toolkit.data.order import ShuffledOrder
from toolkit.data.prefetch import Prefetcher
from toolkit.data.tokens.synthetic import SyntheticRows
from toolkit.errors import DataError

if __name__ == "__main__":
    received = []
    for name in ("SIGINT", "SIGTERM", "SIGUSR1"):
        signal.signal(getattr(signal, name), lambda number, frame: received.append(number))
    rows = SyntheticRows(vocab_size=100, num_rows=1000, seed=0, block_size=9)
    batches = train_batches(
        rows, ShuffledOrder(1000, 0), start_position=0, total_positions=None, global_batch_size=1,
        micro_batch_size=1, rank=0, world_size=1, num_workers=2,
    )
    for _ in range(4):  # both workers have returned a batch
        next(batches)
    print("ready", flush=True)
    sys.stdin.readline()
    for _ in range(20):
        next(batches)
    print(*map(int, received), flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGUSR1"])
def test_s3_workers_survive_a_signal_to_the_process_group(name):
    """Launchers signal all processes of a run; without workers the run could not finish its step."""
    number = getattr(signal, name)
    process = subprocess.Popen(
        [sys.executable, "-c", LISTENING], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, start_new_session=True,
    )  # fmt: skip
    try:
        assert process.stdout.readline() == "ready\n", process.stderr.read()
        os.killpg(process.pid, number)
        time.sleep(0.3)  # enough for a worker to die
        out, err = process.communicate("continue\n", timeout=60)
    finally:
        process.kill()
    assert (process.returncode, out) == (0, f"{int(number)}\n"), err


class UnequalRows:
    """Row i has 1 + (7 i mod 11) input tokens, all equal to i."""

    lengths = np.array([1 + 7 * i % 11 for i in range(N)])

    def __len__(self):
        return N

    def __getitem__(self, i):
        tokens = torch.full((int(self.lengths[i]),), i)
        return {"input_ids": tokens, "labels": tokens}


@pytest.mark.parametrize(("world", "micro"), [(1, 8), (1, 2), (2, 2), (4, 1)])
def test_n3_rows_of_unequal_length_stay_in_their_global_batch_longest_first(world, micro):
    options = {
        "start_position": 0, "total_positions": 27, "global_batch_size": 8, "micro_batch_size": micro,
        "world_size": world, "num_workers": 0,
    }  # fmt: skip
    ranks = [train_batches(UnequalRows(), ShuffledOrder(N, 5), rank=r, **options) for r in range(world)]
    for s in range(4):
        steps = [next(rank) for rank in ranks]
        ids = [i for a in range(8 // (world * micro)) for step in steps for i in step[a].ids]
        expected = stream(s * 8, min(s * 8 + 8, 27))
        assert sorted(i for i in ids if i >= 0) == sorted(expected)
        assert ids[len(expected) :] == [-1] * (8 - len(expected))  # fillers are last
        keys = [key for a in range(8 // (world * micro)) for step in steps for key in step[a].sample_keys]
        assert ids == [-1 if key < 0 else shuffled_index(key, N, 5) for key in keys]
        lengths = [UnequalRows.lengths[i] for i in ids if i >= 0]
        assert lengths == sorted(lengths, reverse=True)
        assert sum(batch.n_inputs for step in steps for batch in step) == sum(lengths)


def test_validation_reads_the_same_rows_longest_first():
    for world in (1, 2):
        read = [
            [i for batch in val_batches(UnequalRows(), micro_batch_size=2, rank=r, world_size=world, max_rows=7)
             for i in batch.ids if i >= 0]
            for r in range(world)
        ]  # fmt: skip
        assert sorted(i for rank in read for i in rank) == list(range(7))
        assert UnequalRows.lengths[read[0][0]] == max(UnequalRows.lengths[:7])


def test_packed_batches_have_positions_and_documents_with_padding_as_a_separate_document():
    class Packed:
        def __len__(self):
            return 2

        def __getitem__(self, i):
            n = 4 - i
            documents = torch.tensor([0, 0, 1, 1][:n])
            return {
                "input_ids": torch.full((n,), 7), "labels": torch.full((n,), 7),
                "positions": torch.tensor([0, 1, 0, 1][:n]), "documents": documents,
            }  # fmt: skip

    (batch,) = val_batches(Packed(), micro_batch_size=2, rank=0, world_size=1, max_rows=None)
    assert batch.packed["documents"].tolist() == [[0, 0, 1, 1], [0, 0, 1, -1]]
    assert batch.packed["positions"].tolist() == [[0, 1, 0, 1], [0, 1, 0, 0]]
    assert set(batch.inputs(torch.device("cpu"))) == {"input_ids", "labels", "positions", "documents"}
    documents, bounds = batch.inputs(torch.device("cpu"), with_bounds=True)["documents"]
    assert documents is batch.packed["documents"]
    assert bounds.cu_seqlens.tolist() == [0, 2, 4, 6, 7, 8, 8, 8, 8] and bounds.cu_seqlens.dtype == torch.int32
    (plain,) = val_batches(ROWS, micro_batch_size=2, rank=0, world_size=1, max_rows=2)
    assert set(plain.inputs(torch.device("cpu"))) == {"input_ids", "labels"}
