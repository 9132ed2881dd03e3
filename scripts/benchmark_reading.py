"""Measure how long training waits for data, and the memory of a long pass over the data, on the CPU.

    python scripts/benchmark_reading.py

`toolkit.train` runs a model that sleeps instead of computing, as a CPU waits for a GPU: a step takes its tokens divided
by the rate. The wait is data_wait_s in metrics.csv, without the first three steps, which start the readers. The long
pass reads the steps of the highest rate without pauses.
"""

import argparse
import json
import re
import sys
import tempfile
import time
from contextlib import redirect_stdout
from itertools import islice
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from benchmark import in_own_process
from benchmark_report import describe, machine, report
from torch import nn

import toolkit
from toolkit.data import HuggingFaceText, LitData, PythonStdlib, TextFiles
from toolkit.data.base import DataModule, sample_order
from toolkit.data.loader import train_batches
from toolkit.data.prefetch import Prefetcher
from toolkit.data.text.python_stdlib import find_sources
from toolkit.data.tokenizer import Tokenizer
from toolkit.ui.loggers import read_metrics

T = 1024  # tokens per sequence
WARMUP_STEPS = 3
ROWS = {3_000: 4, 200_000: 64}  # per step; another rate has steps of about a third of a second
SOURCES = ("LitData", "TextFiles", "HuggingFaceText")


class Sleeper(nn.Module):
    """Model that sleeps as long as a device that trains ``rate`` tokens per second computes."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate, self.weight = rate, nn.Parameter(torch.zeros(()))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, int]:
        time.sleep(input_ids.numel() / self.rate)
        return self.weight.square() + labels.numel(), labels.numel()


def write_sources(folder: Path) -> None:
    """Write texts, a tokenizer trained on them, and token chunks in other tools' formats."""
    (folder / "text").mkdir()
    for i, path in enumerate(find_sources()):
        (folder / "text" / f"{i:05}.txt").write_text(path.read_text(encoding="utf-8"), encoding="utf-8")
    quiet: dict[str, Any] = {"max_seq_length": T, "report": lambda line: None}
    prepared = PythonStdlib(cache_dir=str(folder / "cache")).prepare(tokenizer=None, **quiet)
    assert prepared.tokenizer is not None
    (folder / "tokenizer").mkdir()
    prepared.tokenizer.save(folder / "tokenizer")
    for name in SOURCES:  # do not measure the preparation
        make_data(name, folder, 0).prepare(tokenizer=Tokenizer.load(folder / "tokenizer"), **quiet)


def make_data(name: str, folder: Path, workers: int) -> DataModule:
    text, options = str(folder / "text"), {"cache_dir": str(folder / "cache"), "num_workers": workers}
    if name == "LitData":
        (chunks,) = (folder / "cache").glob("python_stdlib-*")
        return LitData(str(chunks), num_workers=workers)
    return TextFiles(text, **options) if name == "TextFiles" else HuggingFaceText(path=text, **options)


def rows_per_step(rate: int) -> int:
    return ROWS.get(rate, max(1, rate // 3 // T))


def measure_wait(name: str, folder: Path, workers: int, rate: int, steps: int) -> dict[str, Any]:
    """Return the mean and longest wait of a step, and the mean step time, in seconds."""
    rows, out_dir = rows_per_step(rate), folder / f"{name}-{workers}-{rate}"
    sizes = {"max_seq_length": T, "global_batch_size": rows, "micro_batch_size": rows}
    with redirect_stdout(sys.stderr):
        toolkit.train(
            Sleeper(rate), dataset=make_data(name, folder, workers), tokenizer_dir=str(folder / "tokenizer"),
            train={"max_steps": steps + WARMUP_STEPS} | sizes, eval={"final_validation": False},
            out_dir=str(out_dir), accelerator="cpu", devices=1,
        )  # fmt: skip
    rows = read_metrics(out_dir / "logs" / "metrics.csv")[WARMUP_STEPS:]
    waits, seconds = [row["data_wait_s"] for row in rows], mean(row["step_s"] for row in rows)
    return {"wait_s": mean(waits), "longest_wait_s": max(waits), "step_s": seconds, "share": mean(waits) / seconds}


def measure_memory(name: str, folder: Path, steps: int) -> dict[str, Any]:
    """Return MB of anonymous memory after a tenth, half and all of the steps, and tokens per second."""
    tokenizer = Tokenizer.load(folder / "tokenizer")
    data = make_data(name, folder, 0).prepare(tokenizer=tokenizer, max_seq_length=T, report=lambda line: None)
    rows = ROWS[200_000]
    batches = train_batches(
        data.train, sample_order(data.train, 42, {}), start_position=0, total_positions=None, global_batch_size=rows,
        micro_batch_size=rows, rank=0, world_size=1, num_workers=0,
    )  # fmt: skip
    ahead, memory, started = Prefetcher(batches, torch.device("cpu")), [], time.perf_counter()
    for step, _ in enumerate(islice(ahead, steps), 1):
        if step in (steps // 10, steps // 2, steps):
            memory.append(anonymous_mb())
    speed = steps * rows * T / (time.perf_counter() - started)
    ahead.close()
    return {"memory_mb": memory, "tokens_per_s": speed}


def anonymous_mb() -> float:
    """Return the anonymous memory of this process in MB, without file pages."""
    match = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match is not None
    return int(match[1]) * 1024 / 1e6


def format_table(result: dict[str, Any]) -> str:
    lines = [
        "| data | workers | tokens/s | step | mean wait | longest wait | share of the step |",
        "|---|" + "---:|" * 6,
    ]
    for row in result["waits"]:
        lines.append(
            f"| {row['data']} | {row['workers']} | {row['rate']:,} | {row['step_s']:.3f} s | "
            f"{1e3 * row['wait_s']:.2f} ms | {1e3 * row['longest_wait_s']:.2f} ms | {row['share']:.2%} |"
        )
    lines += ["", "| data | steps | MB after 10 % | after 50 % | after all | tokens/s |", "|---|" + "---:|" * 5]
    for row in result["passes"]:
        memory = " | ".join(f"{mb:.1f}" for mb in row["memory_mb"])
        lines.append(f"| {row['data']} | {row['steps']:,} | {memory} | {row['tokens_per_s']:,.0f} |")
    return "\n".join([*lines, "", describe(result["machine"])])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=int, nargs="+", default=list(ROWS), help="simulated tokens per second")
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 2], help="data loading processes")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--pass_steps", type=int, default=2000)
    parser.add_argument("--json", type=Path, help="also write the result to this file")
    options = parser.parse_args()
    waits, passes = [], []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        in_own_process(write_sources, folder)
        for name in SOURCES:
            for workers in options.workers:
                for rate in options.rates:
                    report(f"{name}, {workers} workers, {rate:,} tokens/s")
                    result = in_own_process(measure_wait, name, folder, workers, rate, options.steps)
                    waits.append({"data": name, "workers": workers, "rate": rate} | result)
            report(f"{name}, {options.pass_steps:,} steps")
            result = in_own_process(measure_memory, name, folder, options.pass_steps)
            passes.append({"data": name, "steps": options.pass_steps} | result)
    result = {"machine": machine(), "waits": waits, "passes": passes}
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(format_table(result))


if __name__ == "__main__":
    sys.exit(main())
