"""A row of `toolkit doctor --prove`: one comparison on this machine, and what the rows share."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from toolkit.distributed.launchers import run_toolkit
from toolkit.ui.loggers import read_metrics

STEPS = (
    "--data SyntheticTokens --data.vocab_size 512 --data.num_rows 256 --train.global_batch_size 8 --compiler none "
    "--train.micro_batch_size 4 --train.max_seq_length 128 --train.max_steps 8 --train.save_interval 4 "
    "--train.keep_last 0 --eval.final_validation false --devices 1"
)


class NotRunError(Exception):
    """The row cannot run on this machine; the message is the reason."""


class Outcome(NamedTuple):
    """The largest difference, and the largest that is accepted."""

    figure: float
    tolerance: float


class Row(NamedTuple):
    """A comparison.

    Args:
        name: Short name, unique.
        compared: What is compared with what.
        avoid: The option that avoids the path if the row fails.
        run: Makes the comparison.
    """

    name: str
    compared: str
    avoid: str
    run: Callable[[Machine], Outcome]


@dataclass
class Machine:
    """Where the rows run: ``device`` is "cpu" only in tests, ``deadline`` is a ``time.monotonic()``."""

    device: torch.device
    n_devices: int
    folder: Path
    deadline: float
    runs: dict[str, Path] = field(default_factory=dict)

    def require_cuda(self) -> None:
        if self.device.type != "cuda":
            raise NotRunError("needs CUDA")

    def command(self, words: str) -> str:
        """Run a toolkit command and return its output. Raises CommandError with its last line if it fails."""
        return run_toolkit(words.split(), max(1.0, self.deadline - time.monotonic()))

    def train(self, options: str, device: str = "", command: str = f"pretrain pico-llama {STEPS}") -> Path:
        """Train with further options, once; return the folder of the run."""
        words = f"{command} --accelerator {device or self.device.type} {options}"
        if words not in self.runs:
            out = self.folder / f"run-{len(self.runs)}"
            self.command(f"{words} --out_dir {out}")
            self.runs[words] = out
        return self.runs[words]


def metrics_of(out: Path, name: str) -> list[float]:
    """Return a column of a run's metrics, by step."""
    return [row[name] for row in read_metrics(out / "logs" / "metrics.csv")]


def relative_difference(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return the largest norm of a difference relative to the expected tensor; NaN if a value is NaN."""
    pairs = [(a.detach().double().cpu(), b.detach().double().cpu()) for a, b in zip(actual, expected, strict=True)]
    return float(torch.stack([(a - b).norm() / b.norm() for a, b in pairs]).max())
