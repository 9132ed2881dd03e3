"""Repeat the leaderboard's baseline, or try an idea: train for three minutes per seed, then measure bits per byte.

    python scripts/leaderboard.py
    python scripts/leaderboard.py --name "AdamW" -- --optimizer.name AdamW --train.learning_rate 3e-3
    python scripts/leaderboard.py --table

The options after -- are those of `toolkit pretrain`, added to the baseline's; a later one wins. Each run adds a line to
build/leaderboard.jsonl, and --table prints what is there. The rules are in tutorials/experiments.md.
"""

import argparse
import csv
import json
import os
import platform
import resource
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from statistics import mean, median, stdev

from toolkit_report.compare import estimate

ROOT = Path(__file__).resolve().parents[1]
BASELINE = [
    *["--config", "config_hub/pretrain/default.yaml", "--train.max_tokens", "null", "--train.max_time", "3"],
    *["--train.save_interval", "0", "--eval.interval", "0", "--eval.final_validation", "false"],
]
SEEDS = [42, 1, 2, 3, 4]
HELD_OUT = 0.04
"""Last share of the text's bytes that is evaluated. PythonStdlib trains on the first 95 % of its tokens."""
DISTURBED = 0.95
"""A run with less than this share of the median tokens/s of its name had to share the cores: repeat it."""
CRITICAL = 3.36
"""Standard errors of a difference with p < 0.01: Student's t with 8 degrees of freedom, two-sided."""


def write_held_out(folder: Path) -> None:
    """Write the files of the standard library that no tokenizer's training part reaches, one per document."""
    from toolkit.data.text.documents import fingerprint
    from toolkit.data.text.python_stdlib import find_sources

    documents = fingerprint(find_sources(), "--data PythonStdlib")  # in the order of the tokens
    start, total = 0, sum(document.size for document in documents)
    folder.mkdir()
    for number, document in enumerate(documents):
        if start >= (1 - HELD_OUT) * total:
            shutil.copyfile(document.path, folder / f"{number:04}.txt")
        start += document.size


def toolkit(*arguments: str) -> str:
    """Run a command of toolkit in the repository's root; return what it printed."""
    command = [sys.executable, "-m", "toolkit", *arguments]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"{shlex.join(command)}: exit code {done.returncode}")
    return done.stdout


def run(seed: int, options: list[str], folder: Path, held_out: Path) -> dict[str, float]:
    """Train with a seed and evaluate ``final/`` on the held-out files."""
    arguments = ["pretrain", *BASELINE, *options, "--seed", str(seed), "--out_dir", str(folder)]
    cpu_before, started_at = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    toolkit(*arguments)
    cpu, wall = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter() - started_at
    with open(folder / "logs" / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    first, last = ({name: float(row[name]) for name in ("step", "tokens", "seconds")} for row in (rows[0], rows[-1]))
    text = ["--data", "TextFiles", "--data.train_data_path", str(held_out), "--data.val_fraction", "0"]
    result = json.loads(toolkit("evaluate", str(folder / "final"), *text, "--split", "train", "--format", "json"))
    return {
        "bpb": result["bits_per_byte"],
        "steps": last["step"],
        "tokens": last["tokens"],
        "seconds": last["seconds"],
        "tokens_per_sec": (last["tokens"] - first["tokens"]) / (last["seconds"] - first["seconds"]),
        "cores": (cpu.ru_utime + cpu.ru_stime - cpu_before.ru_utime - cpu_before.ru_stime) / wall,
    }


def environment() -> dict[str, str]:
    import torch

    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    return {"commit": commit.stdout.strip(), **versions, "cpus": str(len(os.sched_getaffinity(0)))}


def table(lines: list[dict]) -> str:
    """Return a Markdown table of all runs by name; the first name is the baseline."""
    by_name = defaultdict(list)
    for line in lines:
        by_name[line["name"]].append(line)
    names = ("name", "bits per byte", "each seed", "tokens", "seconds", "tokens/s", "from the baseline")
    rows = [names, ["---"] * len(names)]
    baseline = [line["bpb"] for line in next(iter(by_name.values()))]
    for name, runs in by_name.items():
        values, speeds = [line["bpb"] for line in runs], [line["tokens_per_sec"] for line in runs]
        slow = [" (disturbed)" if speed < DISTURBED * median(speeds) else "" for speed in speeds]
        each = [f"{line['seed']}: {line['bpb']:.4f}{note}" for line, note in zip(runs, slow, strict=True)]
        spread = f" (sd {stdev(values):.4f})" if len(values) > 1 else ""
        size, seconds = (max(line[key] for line in runs) for key in ("tokens", "seconds"))
        figures = (f"{size / 1e6:.2f} M", f"{seconds:.0f}", f"{min(speeds):,.0f} to {max(speeds):,.0f}")
        rows.append((name, f"{mean(values):.4f}{spread}", ", ".join(each), *figures, difference(values, baseline)))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def difference(values: list[float], baseline: list[float]) -> str:
    """Return the difference of two means, and whether it counts (five seeds each, p < 0.01 of Welch's test)."""
    found = estimate(values, baseline)
    text = f"{found['difference']:+.4f}"
    if min(len(values), len(baseline)) < len(SEEDS) or values == baseline:
        return text
    ratio = abs(found["difference"]) / found["difference_stderr"]
    return f"{text}, {ratio:.1f} standard errors: " + ("counts" if ratio > CRITICAL else "does not count")


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--name", default="baseline", help="name of the idea in the table")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--log", type=Path, default=ROOT / "build" / "leaderboard.jsonl", help="file of the runs")
    parser.add_argument("--table", action="store_true", help="only print the table of --log")
    parser.add_argument("options", nargs="*", help="options of toolkit pretrain, after --")
    return parser.parse_args(argv)


def main() -> None:
    args = parse_arguments()
    args.log.parent.mkdir(parents=True, exist_ok=True)
    if not args.table:  # train the tokenizer and tokenize before the three minutes
        toolkit("pretrain", *BASELINE, *args.options, "--dry_run", "true")
    for seed in [] if args.table else args.seeds:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            write_held_out(folder / "held_out")
            figures = run(seed, args.options, folder / "run", folder / "held_out")
        line = {"name": args.name, "options": shlex.join(args.options), "seed": seed} | figures | environment()
        with open(args.log, "a") as log:
            log.write(json.dumps(line) + "\n")
    print(table([json.loads(line) for line in args.log.read_text().splitlines()]))


if __name__ == "__main__":
    main()
