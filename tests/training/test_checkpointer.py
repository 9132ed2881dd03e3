"""Saving on several ranks: what one rank finds, or fails at, is voted on before any of them goes on."""

import time
from concurrent.futures import Future
from datetime import timedelta

import pytest
from helpers.groups import free_port, start_ranks
from torch import distributed as dist

from toolkit.distributed import ranks
from toolkit.errors import GuardError
from toolkit.training.pending_save import require_finite


def ended(found: list[str] | Exception) -> Future:
    search: Future = Future()
    if isinstance(found, Exception):
        search.set_exception(found)
    else:
        search.set_result(found)
    return search


def rank_main(rank, port, folder) -> None:
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", address, rank=rank, world_size=2, timeout=timedelta(seconds=30))
    try:
        require_finite(folder, ended(MemoryError("full") if rank == 1 else []))
    except Exception as error:
        reason = type(error).__name__
    total = ranks.all_reduce_sum(value=rank + 1)["value"]  # the vote of save(), where the ranks must meet
    (folder / str(rank)).write_text(f"{reason} {total}")
    dist.barrier()
    dist.destroy_process_group()
    time.sleep(0.2)  # otherwise gloo's threads may free tensors during interpreter exit


def test_n7_failed_search_on_one_rank_leaves_the_ranks_in_step(tmp_path):
    start_ranks(rank_main, (free_port(), tmp_path), 2)
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == ["PeerLostError 3", "MemoryError 3"]


def test_n7_search_of_one_process_raises_what_it_found(tmp_path):
    require_finite(tmp_path, ended([]))
    with pytest.raises(GuardError, match="NaN, Inf or too large numbers in a, b;"):
        require_finite(tmp_path, ended(["b", "a"]))
    with pytest.raises(MemoryError, match="full"):
        require_finite(tmp_path, ended(MemoryError("full")))
