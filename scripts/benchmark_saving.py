"""Measure the cost of a checkpoint during training, with and without --train.async_save.

    python scripts/benchmark_saving.py --model pythia-31m --save_interval 10

Each round trains both runs on random tokens, one after the other, in separate processes. Reported per checkpoint:
the seconds that training waits, the CPU seconds of the wait, and the CPU seconds of the thread that writes during
training. Other processes hardly affect CPU seconds.
"""

import argparse
import multiprocessing
import threading
import time
from collections.abc import Callable
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from toolkit.cli import main as toolkit
from toolkit.training.pending_save import PendingSave
from toolkit.training.run import Run

MODES = {"sync": "false", "async": "true"}


class Meter:
    """Sums the time of wrapped functions, in the main thread or in other threads. Nested calls count once."""

    def __init__(self, is_main: bool) -> None:
        self.seconds = self.cpu_seconds = 0.0
        self._is_main, self._is_running = is_main, False

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            is_main = threading.current_thread() is threading.main_thread()
            if self._is_running or is_main != self._is_main:
                return function(*args)
            self._is_running, wall, cpu = True, time.perf_counter(), time.thread_time()
            try:
                return function(*args)
            finally:
                self.seconds += time.perf_counter() - wall
                self.cpu_seconds += time.thread_time() - cpu
                self._is_running = False

        return run


def train(flags: list[str], n_saves: int) -> tuple[float, float, float]:
    """Train, and return the three numbers of the table."""
    waiting, writing = Meter(is_main=True), Meter(is_main=False)
    Run.start_save, Run.finish_save = waiting.wrap(Run.start_save), waiting.wrap(Run.finish_save)  # type: ignore[method-assign]
    PendingSave.write = writing.wrap(PendingSave.write)  # type: ignore[method-assign]
    if code := toolkit(["pretrain", *flags]):
        raise SystemExit(code)
    return waiting.seconds / n_saves, waiting.cpu_seconds / n_saves, writing.cpu_seconds / n_saves


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="pythia-31m", help="a name of `toolkit pretrain list`")
    parser.add_argument("--save_interval", type=int, default=10, help="steps between checkpoints")
    parser.add_argument("--saves", type=int, default=4, help="checkpoints per run")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out_dir", help="folder of the checkpoints (default: a temporary folder)")
    options = parser.parse_args()
    flags = [
        options.model, "--data=SyntheticTokens", "--accelerator=cpu", "--devices=1", "--train.max_seq_length=64",
        "--train.global_batch_size=4", "--train.micro_batch_size=4", "--eval.interval=0",
        "--eval.final_validation=false", f"--train.max_steps={(options.saves + 1) * options.save_interval}",
        f"--train.save_interval={options.save_interval}", "--train.log_interval=10",
    ]  # fmt: skip
    found: dict[str, list[tuple[float, float, float]]] = {mode: [] for mode in MODES}
    for _ in range(options.rounds):
        for mode, value in MODES.items():
            with (
                TemporaryDirectory(dir=options.out_dir) as folder,
                multiprocessing.get_context("spawn").Pool(1) as pool,
            ):
                run_flags = [*flags, f"--out_dir={folder}/run", f"--train.async_save={value}"]
                found[mode].append(pool.apply(train, (run_flags, options.saves)))
    print("| mode | s that training waits | CPU s of this wait | CPU s of the writing thread |\n|---|---|---|---|")
    for mode, rounds in found.items():
        columns = list(zip(*rounds, strict=True))
        cells = [f"{median(column):.2f} ({min(column):.2f} to {max(column):.2f})" for column in columns]
        print(f"| {mode} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
