"""A data module that fails or hangs on one rank; ``--data helpers.failing_data.Fails`` in test_failures.py."""

import os
import time
from dataclasses import dataclass

from toolkit.data import SyntheticTokens
from toolkit.errors import UserError


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
