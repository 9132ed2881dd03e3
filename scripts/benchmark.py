"""Training speed and peak memory of a named model, and of the same work in LitGPT and in transformers' Trainer.

    python scripts/benchmark.py --model pythia-14m --seq_length 256 --batch_size 4 --precision 32-true \
        --peers litgpt,transformers --litgpt_python PATH --transformers_python PATH --rounds 3

Every figure comes from a process of the real product: `toolkit pretrain`, `litgpt pretrain`, Trainer.train. All read
the same random tokens, on the same number of threads, with the same optimizer, and with glibc set to keep freed
memory. The products take turns (A B C A B C ...), so that a machine that slows down slows all of them; the ratio is
taken within each turn. How each product is run: benchmark_products.py; how to make the environments of the peers:
tutorials/performance.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, fields
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any, NoReturn

from benchmark_products import (
    BETAS,
    MALLOC,
    MAX_NORM,
    PEERS,
    PRODUCTS,
    SEED,
    WEIGHT_DECAY,
    Measurement,
    RunFailed,
    Work,
    litgpt_config,
)  # fmt: skip

from toolkit.errors import UserError, did_you_mean
from toolkit.models.config import ModelConfig
from toolkit.models.families import get_config

VOCAB_SIZE = 8192  # for the models that otherwise take their tokenizer's vocabulary
NOTES = [
    "tokens/s: the median step after the warm-up, by the product's own clock. toolkit's includes reading the batch; "
    "LitGPT's (iter_time) and the Trainer's (callback) begin when the batch is there.",
    "end to end: from the end of one step to the end of the next, so that reading and logging count for all.",
    "LitGPT's own Tok/sec line is not used: it divides by a point in time.",
    "Memory: allocated on CUDA; on a CPU the process's resident set, for LitGPT with its saving at the end.",
    f"AdamW, weight decay {WEIGHT_DECAY} (toolkit: matrices; Trainer: no biases and norms; LitGPT: everything), "
    f"betas {BETAS}, clip {MAX_NORM}; every step logged; no validation and no saving among the measured steps.",
    "glibc keeps freed memory in all products: toolkit asks for it itself (on a CPU), the peers get "
    + " ".join(f"{k}={v}" for k, v in MALLOC.items()),
]
LITGPT_ENVIRONMENT = (
    "make an environment with litgpt, requests, boto3, obstore, tifffile and `pip install --no-deps litdata`, "
    "see tutorials/performance.md, and give its Python: --litgpt_python PATH"
)
TRANSFORMERS_ENVIRONMENT = (
    "make an environment with torch, transformers and accelerate, see tutorials/performance.md, and give its Python: "
    "--transformers_python PATH"
)


def write_tokens(folder: Path, work: Work, vocab_size: int) -> None:
    """Write the random tokens of all steps as LitData chunks (toolkit, LitGPT) and as tokens.npy (Trainer)."""
    import numpy as np

    from toolkit.data.chunks import write_chunks

    rows = (work.steps + 1) * work.batch_size
    dtype = np.uint16 if vocab_size <= 1 << 16 else np.int32
    tokens = np.random.default_rng(SEED).integers(0, vocab_size, (rows, work.seq_length + 1), dtype=dtype)
    np.save(folder / "tokens.npy", tokens)
    write_chunks(tokens.reshape(-1), folder / "chunks", work.seq_length + 1)


def in_own_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call the function in another process, and return what it returns.

    Linux counts the memory of the process that starts another among the other's peak: this one must stay small.
    """
    with ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def versions(python: str, *packages: str) -> dict[str, str]:
    """The versions of the packages in the environment of that Python; those that are missing are left out."""
    code = (
        "import importlib.metadata as m, json, sys\n"
        "there = {d.metadata['Name'].lower(): d.version for d in m.distributions() if d.metadata['Name']}\n"
        "print(json.dumps({p: there[p] for p in sys.argv[1:] if p in there}))"
    )
    done = subprocess.run([python, "-c", code, *packages], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


# -- Measuring -------------------------------------------------------------------------------------------------------


def measure(work: Work, config: ModelConfig, pythons: dict[str, str], rounds: int) -> dict[str, list[Measurement]]:
    """Let the products take turns for so many rounds.

    Raises:
        UserError: the products do not build the same model.
    """
    measured: dict[str, list[Measurement]] = {name: [] for name in pythons}
    with tempfile.TemporaryDirectory(prefix="benchmark-") as name:
        folder = Path(name)
        in_own_process(write_tokens, folder, work, config.vocab_size)
        for turn in range(1, rounds + 1):
            for product, python in pythons.items():
                one = PRODUCTS[product](work, config, folder, python)
                measured[product].append(one)
                report(f"round {turn}/{rounds} {product}: {one.tokens_per_sec:,.0f} tokens/s")
                ours = measured["toolkit"][0].parameters
                if one.parameters != ours:
                    raise UserError(
                        f"--peers {product}: it builds {one.parameters:,} parameters, toolkit {ours:,}: "
                        f"not the same work; leave it out for --model {work.model}"
                    )
                for used in ("toolkit", "litgpt", "trainer"):
                    shutil.rmtree(folder / used, ignore_errors=True)
    return measured


def summarize(values: list[float]) -> dict[str, Any]:
    return {"median": median(values), "min": min(values), "max": max(values), "rounds": values}


def compare(ours: list[Measurement], peers: list[Measurement], figure: str) -> dict[str, Any]:
    """Ours / the peer's within each round, then the median of these ratios."""
    return summarize([getattr(a, figure) / getattr(b, figure) for a, b in zip(ours, peers, strict=True)])


def build_report(
    work: Work, measured: dict[str, list[Measurement]], environments: dict[str, dict[str, str]], here: dict[str, Any]
) -> dict[str, Any]:
    figures = [f.name for f in fields(Measurement) if f.name != "parameters"]
    ours = measured["toolkit"]
    return {
        "work": asdict(work),
        "machine": here,
        "environments": environments,
        "notes": NOTES,
        "products": {
            product: {"parameters": runs[0].parameters}
            | {figure: summarize([getattr(run, figure) for run in runs]) for figure in figures}
            for product, runs in measured.items()
        },
        "ratios": {
            product: {figure: compare(ours, runs, figure) for figure in figures}
            for product, runs in measured.items()
            if product != "toolkit"
        },
    }


def machine() -> dict[str, Any]:
    """The processor, and how busy it is (the load of the last minute)."""
    model = ""
    if (info := Path("/proc/cpuinfo")).is_file():
        found = re.search(r"model name\s*: (.+)", info.read_text())
        model = found[1] if found else ""
    load = f"{os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    return {"cpu": model or platform.processor(), "cpus": usable_cpus(), "system": platform.system(), "load": load}


def usable_cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def format_table(result: dict[str, Any]) -> str:
    work, here = result["work"], result["machine"]
    lines = [
        f"{work['model']}: {result['products']['toolkit']['parameters']:,} parameters; sequence {work['seq_length']}, "
        f"batch {work['batch_size']}, {work['precision']}, compiler {work['compiler']}; steps "
        f"{work['warmup_steps'] + 1} to {work['steps']}; {work['threads']} threads; {here['cpu']}, "
        f"{here['cpus']} CPUs, load before {here['load']}",
        "",
        "| product | tokens/s | end to end | peak GB | toolkit / it | end to end |",
        "|---|---|---|---|---|---|",
    ]
    for product, figures in result["products"].items():
        speeds = [spread(figures[name], ",.0f") for name in ("tokens_per_sec", "tokens_per_sec_end_to_end")]
        ratios = result["ratios"].get(product)
        names = ("tokens_per_sec", "tokens_per_sec_end_to_end")
        compared = [spread(ratios[name], ".2f") for name in names] if ratios else ["", ""]
        memory = f"{figures['peak_memory_gb']['median']:.2f}"
        there = ", ".join(f"{package} {version}" for package, version in result["environments"][product].items())
        name = f"{product} ({there})"
        lines.append("| " + " | ".join([name, *speeds, memory, *compared]) + " |")
    return "\n".join([*lines, "", "Medians (lowest to highest round).", *(f"- {note}" for note in result["notes"])])


def spread(summary: dict[str, Any], form: str) -> str:
    return f"{summary['median']:{form}} ({summary['min']:{form}} to {summary['max']:{form}})"


def report(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


# -- The command line ------------------------------------------------------------------------------------------------


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(message)


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Read and check the options.

    Raises:
        UserError: one of them is unusable.
    """
    parser = Parser(description=__doc__.partition("\n\n")[0], allow_abbrev=False)
    add = parser.add_argument
    add("--model", default="pythia-14m", help="a named architecture; `toolkit pretrain list` prints them")
    add("--seq_length", type=int, default=256, help="tokens per sequence (%(default)s)")
    add("--batch_size", type=int, default=4, help="sequences per step (%(default)s)")
    add("--precision", default="32-true", choices=["32-true", "bf16-true", "bf16-mixed", "16-mixed"])
    add("--compiler", default="none", choices=["none", "torch"], help="for all products (%(default)s)")
    add("--steps", type=int, default=40, help="optimizer steps of each run, the warm-up among them (%(default)s)")
    add("--warmup_steps", type=int, default=10, help="first steps, which do not count (%(default)s)")
    add("--rounds", type=int, default=3, help="turns of each product (%(default)s)")
    add("--threads", type=int, default=usable_cpus(), help="OMP_NUM_THREADS of all products (%(default)s)")
    add("--peers", default="", help=f"any of {','.join(PEERS)}; litgpt-shipped is compiled whatever --compiler says")
    add("--litgpt_python", metavar="PATH", help="the Python of an environment with LitGPT")
    add("--transformers_python", metavar="PATH", help="the Python of one with transformers and accelerate (this one)")
    add("--format", default="table", choices=["table", "json"])
    args = parser.parse_args(argv)

    for name in ("seq_length", "batch_size", "rounds", "threads"):
        if getattr(args, name) < 1:
            raise UserError(f"--{name} {getattr(args, name)}: must be at least 1")
    if not 1 <= args.warmup_steps < args.steps:
        raise UserError(f"--warmup_steps {args.warmup_steps}: must be at least 1 and less than --steps {args.steps}")
    args.peers = list(dict.fromkeys(filter(None, args.peers.split(","))))
    for peer in args.peers:
        if peer not in PEERS:
            raise UserError(f"--peers {peer}: must be of {', '.join(PEERS)}{did_you_mean(peer, PEERS)}")
    return args


def choose_config(args: argparse.Namespace) -> ModelConfig:
    """The architecture that all products build.

    Raises:
        UserError: there is no such name, or a product cannot build or run it so.
    """
    config = get_config(args.model).with_vocab_size(VOCAB_SIZE)
    if args.seq_length > config.block_size:
        raise UserError(f"--seq_length {args.seq_length}: {config.name} takes at most {config.block_size} tokens")
    if any(peer.startswith("litgpt") for peer in args.peers):
        litgpt_config(config)
        if args.precision == "16-mixed":
            raise UserError("--precision 16-mixed: `litgpt pretrain` does not take it; use bf16-mixed or 32-true")
    return config


def find_pythons(args: argparse.Namespace) -> tuple[dict[str, str], dict[str, dict[str, str]]]:
    """The Python of each product, and the versions that it has.

    Raises:
        UserError: a peer's environment was not given or is not one.
    """
    pythons = {"toolkit": sys.executable}
    found = {"toolkit": versions(sys.executable, "toolkit", "torch", "lightning")}
    for peer in args.peers:
        if peer == "transformers":
            flag, python, needed = "transformers_python", args.transformers_python, ["transformers", "accelerate"]
            hint = TRANSFORMERS_ENVIRONMENT
        else:
            flag, python, needed = "litgpt_python", args.litgpt_python, ["litgpt", "litdata"]
            hint = LITGPT_ENVIRONMENT
            if python is None:
                raise UserError(f"--peers {peer}: no environment given; {hint}")
        python = python or sys.executable
        try:
            there = versions(os.path.abspath(python), *needed, "torch")
        except (OSError, subprocess.CalledProcessError, ValueError):
            raise UserError(f"--{flag} {python}: is not a Python that runs; {hint}") from None
        for package in needed:
            if package not in there:
                raise UserError(f"--{flag} {python}: {package} is missing there; {hint}")
        # Not resolve(): the links of a virtual environment must stay.
        pythons[peer], found[peer] = os.path.abspath(python), there
    return pythons, found


def main(argv: list[str] | None = None) -> int:
    try:
        args = parse(argv)
        config = choose_config(args)
        pythons, environments = find_pythons(args)
        work = Work(**{f.name: getattr(args, f.name) for f in fields(Work)})
        here = machine()  # before the products load it
        result = build_report(work, measure(work, config, pythons, args.rounds), environments, here)
        print(json.dumps(result, indent=2) if args.format == "json" else format_table(result))
        return 0
    except UserError as error:
        report(f"benchmark: {error}")
        return 2
    except RunFailed as error:
        report(f"benchmark: {error}")
        return 1


if __name__ == "__main__":
    sys.exit(main())
