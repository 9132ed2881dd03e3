"""A data module that fails or hangs on one rank; ``--data helpers.failing_data.Fails`` in test_failures.py."""

import os
import time
from dataclasses import dataclass

import numpy as np

from toolkit.data import SyntheticTokens
from toolkit.errors import DataError, UserError


@dataclass
class Fails(SyntheticTokens):
    """Fails on one rank.

    Args:
        rank: The rank that fails, on one node or of nodes with one process each.
        how: "row": an exception at its first row; "prepare": a user error; "asleep": hangs; "slow": takes long;
            "once": as "row", but not after a restart by torchrun;
            "preparing": prints that and hangs.
    """

    rank: int = 1
    how: str = "row"

    def prepare(self, **options):
        here = int(os.environ.get("LOCAL_RANK", "0")) + int(os.environ.get("NODE_RANK", "0"))
        if here == self.rank and self.how == "preparing":
            print("preparing", flush=True)
            time.sleep(1000)
        if here == self.rank and self.how == "prepare":
            raise UserError("--data.how prepare: this file is broken; take another")
        prepared = super().prepare(**options)
        restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
        if here == self.rank and self.how != "prepare" and not (restarted and self.how == "once"):
            prepared.train = FailingRows(prepared.train, self.how)
        return prepared


class FailingRows:
    def __init__(self, rows, how):
        self.rows, self.how = rows, how

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        if index and self.how in ("row", "once"):  # the run inspects row 0 before the first step
            raise ValueError(f"row {index} is broken")
        if index and self.how == "asleep":
            time.sleep(1000)
        return self.rows[index]


@dataclass
class Endless(SyntheticTokens):
    """Random tokens in a fixed order: of unknown length, and known only from where the run goes on.

    Args:
        broken_at: Position that cannot be read; -1: none.
        broken_rank: The rank of a node that cannot read it.
    """

    broken_at: int = -1
    broken_rank: int = 1

    def prepare(self, **options):
        prepared = super().prepare(**options)
        here = int(os.environ.get("LOCAL_RANK", "0"))
        prepared.train = EndlessRows(prepared.train, self.broken_at if here == self.broken_rank else -1)
        return prepared


class EndlessRows:
    def __init__(self, rows, broken_at):
        self.rows, self.broken_at = rows, broken_at

    def __getitem__(self, index):
        return self.rows[index % len(self.rows)]

    def order(self, seed, state):
        return Countdown(self.broken_at, state.get("position", 0))


class Countdown:
    """Knows nothing of positions before ``first``."""

    def __init__(self, broken_at, first):
        self.broken_at, self.first = broken_at, first

    def ids(self, positions):
        assert (positions >= self.first).all(), (positions, self.first)
        if self.broken_at in positions:
            raise DataError("shard-7.parquet: is damaged; download it again")
        return np.int64(1 << 40) - positions

    def state(self, position):
        return {"position": position}
