"""Measure seconds per GB to save, load and convert a checkpoint, against the disk and safetensors.

    python scripts/benchmark_checkpoints.py --model pythia-160m

The weights are random fp32. Reads come from the page cache, and writes end with fsync. Each round runs all actions
one after the other.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from benchmark import in_own_process
from benchmark_report import describe, machine, report, spread, summarize

BLOCK = 16 << 20  # bytes per write
VOCAB_SIZE = 8192


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def write_bytes(path: Path, size: int) -> None:
    """Write and sync bytes as `dd conv=fsync` does, to measure the disk."""
    block = os.urandom(BLOCK)
    with open(path, "wb", buffering=0) as file:
        for start in range(0, size, BLOCK):
            file.write(block[: size - start])
    sync(path)


def measure(model_name: str, rounds: int) -> dict[str, Any]:
    """Return the size of the weights in GB, and the seconds of each action in each round."""
    import torch
    from safetensors.torch import load_file, save_file

    from toolkit.checkpoints.folder import write_model_files
    from toolkit.checkpoints.manifest import require_intact
    from toolkit.checkpoints.store import begin_checkpoint, commit_checkpoint
    from toolkit.checkpoints.weights import load_weights
    from toolkit.commands import convert_from_hf, convert_to_hf
    from toolkit.models.families import get_config
    from toolkit.models.gpt import GPT

    config = get_config(model_name).with_vocab_size(VOCAB_SIZE)
    with torch.device("meta"):
        shapes = GPT(config).state_dict()
    weights = {name: torch.randn(value.shape) for name, value in shapes.items()}
    size = sum(value.nbytes for value in weights.values())
    with tempfile.TemporaryDirectory(dir=".") as temporary, redirect_stdout(sys.stderr):
        folder = Path(temporary)
        run, hf, imported, plain = folder / "step-00000001", folder / "hf", folder / "imported", folder / "plain"

        def save() -> None:
            files = {"state_dict": dict(weights), "config": config, "hyperparameters": None, "tokenizer": None}
            tmp = begin_checkpoint(run)
            write_model_files(tmp, **files)
            commit_checkpoint(tmp, run, {})

        def load() -> None:
            require_intact(run, report)
            for value in load_weights(run).values():
                value.clone()  # they are memory-mapped

        def save_safetensors() -> None:
            save_file(weights, plain)
            sync(plain)

        def load_safetensors() -> None:
            for value in load_file(plain).values():
                value.clone()

        def copy_safetensors() -> None:
            save_file(load_file(plain), folder / "copy")
            sync(folder / "copy")

        actions: dict[str, Callable[[], None]] = {
            "disk: write bytes": lambda: write_bytes(folder / "bytes", size),
            "toolkit: save": save,
            "safetensors: save": save_safetensors,
            "toolkit: verify and load": load,
            "safetensors: load": load_safetensors,
            "toolkit: convert_to_hf": lambda: convert_to_hf.setup(str(run), str(hf)),
            "toolkit: convert_from_hf": lambda: convert_from_hf.setup(str(hf), str(imported)),
            "safetensors: load and save": copy_safetensors,
        }
        seconds: dict[str, list[float]] = {name: [] for name in actions}
        for _ in range(rounds + 1):  # the first imports
            for name in (hf, imported, run):
                shutil.rmtree(name, ignore_errors=True)
            for name, action in actions.items():
                os.sync()
                started = time.perf_counter()
                action()
                seconds[name].append(time.perf_counter() - started)
    return {"gb": size / 1e9, "seconds": {name: values[1:] for name, values in seconds.items()}}


def format_table(result: dict[str, Any]) -> str:
    lines = [f"{result['model']}: {result['gb']:.2f} GB", "", "| action | s per GB | / the disk |", "|---|---:|---:|"]
    for name, values in result["seconds_per_gb"].items():
        lines.append(f"| {name} | {spread(values, '.2f')} | {spread(result['ratio'][name], '.2f')} |")
    return "\n".join([*lines, "", "Medians (lowest to highest round).", describe(result["machine"])])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="pythia-160m", help="a name of `toolkit pretrain list`")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="also write the result to this file")
    options = parser.parse_args()
    host = machine()
    results = in_own_process(measure, options.model, options.rounds)
    per_gb = {name: [s / results["gb"] for s in values] for name, values in results["seconds"].items()}
    disk = per_gb["disk: write bytes"]
    result = {
        "model": options.model,
        "machine": host,
        "gb": results["gb"],
        "seconds_per_gb": {name: summarize(values) for name, values in per_gb.items()},
        "ratio": {name: summarize([a / b for a, b in zip(v, disk, strict=True)]) for name, v in per_gb.items()},
    }
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(format_table(result))


if __name__ == "__main__":
    main()
