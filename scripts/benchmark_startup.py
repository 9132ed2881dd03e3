"""Measure the seconds of `--help` and of a complete run of two steps, for toolkit and LitGPT.

    python scripts/benchmark_startup.py --litgpt_python ../env-litgpt/bin/python

Products run in separate processes and take turns. The model is tiny, so imports and preparation take most of the run.
Both products save the model at the end, and LitGPT does not compile.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmark import VOCAB_SIZE, in_own_process, write_tokens
from benchmark_products import PRODUCTS, Work
from benchmark_report import describe, machine, report, spread, summarize

from toolkit.models.families import get_config

WORK = Work("pythia-14m", 32, 1, "32-true", "none", steps=2, warmup_steps=1, threads=1, saves=True)


def seconds(action: Callable[[], Any]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def measure(litgpt_python: str | None, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each command in each round, without the first round, which fills the page cache."""
    pythons = {"toolkit": sys.executable} | ({"litgpt": litgpt_python} if litgpt_python else {})
    config = get_config(WORK.model).with_vocab_size(VOCAB_SIZE)
    times: dict[str, list[float]] = {}
    for number in range(rounds + 1):
        for words in (["--help"], ["pretrain", "--help"]):
            for product, python in pythons.items():
                command = [python, "-m", product, *words]
                taken = seconds(lambda c=command: subprocess.run(c, stdout=subprocess.DEVNULL, check=True))
                times.setdefault(f"{product} {' '.join(words)}", []).append(taken)
        for product, python in pythons.items():
            with tempfile.TemporaryDirectory(prefix="benchmark-") as name:
                in_own_process(write_tokens, Path(name), WORK, VOCAB_SIZE)
                taken = seconds(lambda p=product, e=python, n=name: PRODUCTS[p](WORK, config, Path(n), e))
            times.setdefault(f"{product} pretrain, two steps", []).append(taken)
            report(f"round {number}: {product}: two steps in {taken:.1f} s")
    return {name: values[1:] for name, values in times.items()}


def format_table(result: dict[str, Any]) -> str:
    lines = ["| command | seconds | toolkit / it |", "|---|---:|---:|"]
    for name, values in result["seconds"].items():
        ratio = spread(result["ratio"][name], ".2f") if name in result["ratio"] else ""
        lines.append(f"| {name} | {spread(values, '.2f')} | {ratio} |")
    return "\n".join([*lines, "", "Medians (lowest to highest round).", describe(result["machine"])])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--litgpt_python", metavar="PATH", help="Python of an environment with LitGPT")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="also write the result to this file")
    options = parser.parse_args()
    host = machine()
    times = measure(options.litgpt_python and os.path.abspath(options.litgpt_python), options.rounds)
    peers = {name: name.replace("litgpt", "toolkit") for name in times if name.startswith("litgpt")}
    result = {
        "machine": host,
        "seconds": {name: summarize(values) for name, values in times.items()},
        "ratio": {
            peer: summarize([a / b for a, b in zip(times[toolkit_name], times[peer], strict=True)])
            for peer, toolkit_name in peers.items()
        },
    }
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(format_table(result))


if __name__ == "__main__":
    main()
