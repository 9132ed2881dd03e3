"""Measure what checkpoints cost a training run: none, each written before training goes on, and --train.async_save.

    python scripts/benchmark_saving.py --model pythia-31m --save_interval 5

Each round trains three runs, one after another, on random tokens; ratios are computed within a round. Columns: seconds
per step of the whole run with its checkpoints; the same relative to the run without checkpoints; seconds for which
training waits per checkpoint; seconds of a step without these waits, which is larger while a checkpoint is written.
"""

from __future__ import annotations

import argparse
import csv
import subprocess
import sys
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

MODES = {"none": ["--train.save_interval=0"], "sync": [], "async": ["--train.async_save=true"]}
WARMUP = 2  # steps left out, which allocate memory


def train(flags: list[str], out: Path, options: argparse.Namespace) -> list[dict[str, float]]:
    """Train in a process of its own, and return the rows of its metrics."""
    steps = WARMUP + options.saves * options.save_interval + 1
    command = [
        sys.executable, "-m", "toolkit", "pretrain", options.model, "--data=SyntheticTokens", "--accelerator=cpu",
        f"--devices={options.devices}", f"--train.max_seq_length={options.seq_length}",
        f"--train.global_batch_size={options.batch_size}", f"--train.micro_batch_size={options.batch_size}",
        f"--train.max_steps={steps}", f"--train.save_interval={options.save_interval}", "--eval.interval=0",
         "--eval.final_validation=false", "--train.keep_last=2", f"--out_dir={out}",
        *flags, *options.flags,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    with open(out / "logs" / "metrics.csv", newline="") as file:
        return [{name: float(row[name]) for name in ("seconds", "step_s")} for row in csv.DictReader(file)]


def read(rows: list[dict[str, float]], n_saves: int) -> tuple[float, float, float]:
    """Return seconds per step of the run, seconds of waiting per checkpoint, and seconds per step without waiting."""
    first, *rest = rows[WARMUP - 1 :]
    total, steps = rest[-1]["seconds"] - first["seconds"], sum(row["step_s"] for row in rest)
    return total / len(rest), (total - steps) / n_saves, steps / len(rest)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="pythia-31m", help="a name of `toolkit pretrain list`")
    parser.add_argument("--seq_length", type=int, default=128)
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--save_interval", type=int, default=5, help="steps between checkpoints")
    parser.add_argument("--saves", type=int, default=4, help="checkpoints per run")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out_dir", type=Path, help="where the checkpoints go; by default a temporary folder")
    parser.add_argument("flags", nargs="*", help="further flags of the run, after --")
    options = parser.parse_args()
    found: dict[str, list[tuple[float, float, float]]] = {mode: [] for mode in MODES}
    for _ in range(options.rounds):
        for mode, flags in MODES.items():
            with TemporaryDirectory(dir=options.out_dir) as folder:
                rows = train(flags, Path(folder) / "run", options)
                found[mode].append(read(rows, options.saves))
    print("| mode | s per step | / none | s waited per checkpoint | s per step without waiting | / none |")
    print("|---|---|---|---|---|---|")
    for mode, runs in found.items():
        totals, waits, steps = zip(*runs, strict=True)
        ratios = [[own[i] / plain[i] for own, plain in zip(runs, found["none"], strict=True)] for i in (0, 2)]
        columns = (totals, ratios[0], waits, steps, ratios[1])
        cells = [f"{median(values):.3f} ({min(values):.3f} to {max(values):.3f})" for values in columns]
        print(f"| {mode} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
