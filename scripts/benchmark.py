"""Benchmark training speed and peak memory of a named model, compared with LitGPT, Trainer, and a plain PyTorch loop.

    python scripts/benchmark.py --model pythia-14m --seq_length 256 --batch_size 4 --precision 32-true \
        --peers litgpt,transformers --litgpt_python PATH --transformers_python PATH --rounds 3

Every figure comes from a process of the real product: `toolkit pretrain`, `litgpt pretrain`, Trainer.train. All read
the same random tokens, with the same number of threads, optimizer, and glibc settings (keep freed memory). Runs are
interleaved (A B C A B C ...), so that machine slowdowns affect all products; ratios are computed within each round.
Each run is printed when it ends, and the table at the end. `--matrix` runs all benchmarks of this folder, see
benchmark_matrix.py; `--card` measures a GPU in 7 minutes, see benchmark_card.py. benchmark_products.py runs the
products; docs/benchmarking.md describes how to create the peer environments.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from dataclasses import fields, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NoReturn

from benchmark_processes import RunFailedError, end_with_parent, exit_on_signals, run_script, take_turns
from benchmark_products import (
    PEERS,
    PRODUCTS,
    SEED,
    Measurement,
    Work,
    litgpt_config,
    plain_config,
)
from benchmark_report import build_report, describe_run, format_table, machine, report, usable_cpus, versions

from toolkit.errors import UserError, did_you_mean
from toolkit.models.config import ModelConfig, ModelOverrides
from toolkit.models.families import get_config

PRECISIONS = ["32-true", "bf16-true", "bf16-master", "bf16-mixed", "16-mixed"]
VOCAB_SIZE = 8192  # for models without a vocab_size
LITGPT_ENVIRONMENT = (
    "create an environment with litgpt, requests, boto3, obstore, tifffile and `pip install --no-deps litdata`, "
    "see docs/benchmarking.md, and specify its Python: --litgpt_python PATH"
)
TRANSFORMERS_ENVIRONMENT = (
    "create an environment with torch, transformers and accelerate, see docs/benchmarking.md, and specify its "
    "Python: --transformers_python PATH"
)


def write_tokens(folder: Path, work: Work, vocab_size: int) -> None:
    """Write the random tokens of all steps as LitData chunks (toolkit, LitGPT) and as tokens.npy (Trainer)."""
    import numpy as np

    from toolkit.data.tokens.token_store import TOKENS_PER_CHUNK, TokenWriter

    rows = (work.steps + 1) * work.batch_size
    dtype = np.uint16 if vocab_size <= 1 << 16 else np.int32
    tokens = np.random.default_rng(SEED).integers(0, vocab_size, (rows, work.seq_length + 1), dtype=dtype)
    np.save(folder / "tokens.npy", tokens)
    block_size = work.seq_length + 1  # LitData reads only blocks within a chunk
    writer = TokenWriter(folder, dtype, tokens_per_chunk=TOKENS_PER_CHUNK // block_size * block_size)
    writer.add(tokens.reshape(-1))
    writer.finish()


def in_own_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call the function in a separate process, and return its result.

    This process must stay small, because Linux includes the parent's memory at fork in a child's peak.
    """
    with ProcessPoolExecutor(1, get_context("spawn"), initializer=end_with_parent) as pool:
        return pool.submit(function, *arguments).result()


# -- Measuring -------------------------------------------------------------------------------------------------------


def mfu_per_token(work: Work, config: ModelConfig) -> float | None:
    """Return the MFU of one token per second; None if the device's peak is unknown, as on a CPU."""
    if work.accelerator == "cpu" or work.precision == "32-true":
        return None
    import torch

    from toolkit.distributed.device import peak_flops
    from toolkit.models.flops import flops_per_token
    from toolkit.models.gpt import GPT

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if (peak := peak_flops(device, work.precision)) is None:
        return None
    with torch.device("meta"):
        model = GPT(config)
    return flops_per_token(model, config, work.seq_length) / peak


def prepare(folder: Path, work: Work, config: ModelConfig) -> float | None:
    """Write the tokens, and return :func:`mfu_per_token`."""
    write_tokens(folder, work, config.vocab_size)
    return mfu_per_token(work, config)


def run_round(
    work: Work, config: ModelConfig, pythons: dict[str, str], folder: Path, turn_seconds: float, deadline: float | None
) -> Iterator[tuple[str, Measurement | RunFailedError]]:
    """Run each product once, sequentially or alternating every ``turn_seconds``. Yield each when it ends."""

    def run(product: str, shares: int) -> tuple[str, Measurement | RunFailedError]:
        seconds = None if deadline is None else max(1.0, (deadline - time.monotonic()) / shares)
        try:
            return product, PRODUCTS[product](replace(work, max_seconds=seconds), config, folder, pythons[product])
        except RunFailedError as error:
            return product, error

    if turn_seconds == 0:
        yield from map(run, pythons, range(len(pythons), 0, -1))
        return
    with ThreadPoolExecutor(len(pythons)) as pool:
        runs = [pool.submit(run, product, 1) for product in pythons]
        take_turns(runs, turn_seconds)
        yield from (run.result() for run in as_completed(runs))


def measure(
    work: Work, config: ModelConfig, pythons: dict[str, str], rounds: int, turn_seconds: float = 0
) -> tuple[dict[str, list[Measurement]], dict[str, str]]:
    """Run all products in each of ``rounds`` rounds, and print each run when it ends.

    Returns:
        The runs of each product, and the reason for each peer that failed, which later rounds leave out.

    Raises:
        UserError: The products do not build the same model.
        RunFailedError: toolkit failed.
    """
    measured: dict[str, list[Measurement]] = {name: [] for name in pythons}
    failed: dict[str, str] = {}
    deadline = None if work.max_seconds is None else time.monotonic() + work.max_seconds
    with tempfile.TemporaryDirectory(prefix="benchmark-") as name:
        folder = Path(name)
        mfu = in_own_process(prepare, folder, work, config)
        for number in range(1, rounds + 1):
            started = time.monotonic()
            able = {product: python for product, python in pythons.items() if product not in failed}
            for product, run in run_round(work, config, able, folder, turn_seconds, deadline):
                title = f"round {number}/{rounds} {product}"
                if isinstance(run, RunFailedError):
                    if product == "toolkit":
                        raise run
                    report(f"{title}: {run}")
                    lines = str(run).splitlines()
                    failed[product] = " ".join(dict.fromkeys([lines[0], lines[-1]]))
                    del measured[product]
                    continue
                run.mfu = None if mfu is None else run.tokens_per_sec * mfu
                measured[product].append(run)
                report(f"{title}: {describe_run(run)}, {time.monotonic() - started:.0f} s")
                started = time.monotonic()
            parameters = {product: runs[-1].parameters for product, runs in measured.items()}
            for product, count in parameters.items():
                if count != parameters["toolkit"]:
                    raise UserError(
                        f"--peers {product}: its model has {count:,} parameters, toolkit's {parameters['toolkit']:,}: "
                        f"the results are not comparable; remove it for --model {work.model}"
                    )
            shutil.rmtree(folder / "out", ignore_errors=True)
    return measured, failed


def measure_case(
    work: Work,
    config: ModelConfig,
    pythons: dict[str, str],
    environments: dict[str, dict[str, str]],
    rounds: int,
    turn_seconds: float = 0,
) -> dict[str, Any]:
    """Measure one case, and return the result that ``--format json`` prints.

    ``pythons`` and ``environments`` come from :func:`find_pythons`, ``config`` from :func:`choose_config`.
    """
    host = machine()  # before the runs increase the load
    return build_report(work, *measure(work, config, pythons, rounds, turn_seconds), environments, host)


# -- The command line ------------------------------------------------------------------------------------------------


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(message)


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Read and check the options.

    Raises:
        UserError: An option is invalid.
    """
    parser = Parser(description=__doc__.partition("\n\n")[0], allow_abbrev=False)
    add = parser.add_argument
    add("--model", default="pythia-14m", help="a named architecture; `toolkit pretrain list` prints them")
    add("--seq_length", type=int, default=256, help="tokens per sequence (%(default)s)")
    add("--batch_size", type=int, default=4, help="sequences per step (%(default)s)")
    add("--micro_batch_size", type=int, default=0, help="sequences per forward pass (default: --batch_size)")
    add("--precision", default="32-true", choices=PRECISIONS, help="for all products; bf16-master needs no --peers")
    add("--compiler", default="none", choices=["none", "torch"], help="for all products (%(default)s)")
    add("--activation_checkpointing", default="none", choices=["none", "full"], help="full: not with LitGPT and plain")
    add("--accelerator", default="auto", choices=["auto", "cpu"], help="auto: CUDA if available (%(default)s)")
    add("--steps", type=int, default=40, help="optimizer steps per run, including the warm-up (%(default)s)")
    add("--warmup_steps", type=int, default=10, help="first steps to exclude (%(default)s)")
    add("--rounds", type=int, default=3, help="runs of each product (%(default)s)")
    add(
        "--turn_seconds",
        type=float,
        default=0,
        help="alternate between the products of a round every so many seconds, pausing the others; use several steps "
        "per turn; for machines with varying speed (default: run one product after the other)",
    )
    add("--max_seconds", type=float, help="limit for all runs: each may take its share of the time left")
    add("--threads", type=int, default=usable_cpus(), help="OMP_NUM_THREADS of all products (%(default)s)")
    add("--model_config", metavar="JSON", default={}, type=json.loads, help="fields that override the architecture")
    add("--as_shipped", action="store_true", help="run each product with its own defaults, on the same tokens")
    add("--peers", default="", help=f"any of {','.join(PEERS)}; litgpt-shipped is always compiled")
    add("--litgpt_python", metavar="PATH", help="Python of an environment with LitGPT")
    add(
        "--transformers_python",
        metavar="PATH",
        help="Python with transformers and accelerate (default: this one)",
    )
    add("--format", default="table", choices=["table", "json"])
    add("--matrix", action="store_true", help="run all benchmarks instead; --matrix --help lists its options")
    add("--card", action="store_true", help="measure a GPU in 7 minutes instead; --card --help lists its options")
    matrix = {"only": "PARTS", "rows": "TITLES", "out_dir": "DIR"}
    for name, value in matrix.items():
        add(f"--{name}", metavar=value, help="with --matrix")
    add("--quick", action="store_true", help="with --matrix")
    args = parser.parse_args(argv)

    for name in (*matrix, "quick"):
        if getattr(args, name):
            raise UserError(f"--{name}: has no effect without --matrix")
    for name in ("seq_length", "batch_size", "rounds", "threads"):
        if getattr(args, name) < 1:
            raise UserError(f"--{name} {getattr(args, name)}: must be at least 1")
    if args.micro_batch_size < 0 or (args.micro_batch_size and args.batch_size % args.micro_batch_size):
        raise UserError(f"--micro_batch_size {args.micro_batch_size}: must divide --batch_size {args.batch_size}")
    if not 1 <= args.warmup_steps < args.steps:
        raise UserError(f"--warmup_steps {args.warmup_steps}: must be at least 1 and less than --steps {args.steps}")
    args.peers = list(dict.fromkeys(filter(None, args.peers.split(","))))
    for peer in args.peers:
        if peer not in PEERS:
            raise UserError(f"--peers {peer}: must be one of {', '.join(PEERS)}{did_you_mean(peer, PEERS)}")
    return args


def choose_config(args: argparse.Namespace) -> ModelConfig:
    """Return the model config for all products.

    Raises:
        UserError: The name is unknown, or a product does not support the model or precision.
    """
    field_names = [f.name for f in fields(ModelOverrides)]
    for name in args.model_config:
        if name not in field_names:
            raise UserError(
                f"--model_config {name}: is not a field of the architecture{did_you_mean(name, field_names)}"
            )
    config = get_config(args.model).override(ModelOverrides(**args.model_config)).with_vocab_size(VOCAB_SIZE)
    if args.seq_length > config.block_size:
        raise UserError(f"--seq_length {args.seq_length}: {config.name} takes at most {config.block_size} tokens")
    if args.peers and args.precision == "bf16-master":
        raise UserError("--precision bf16-master: no peer has it; remove --peers, or use bf16-mixed or bf16-true")
    if "plain" in args.peers:
        plain_config(config)
        if args.precision == "16-mixed":
            raise UserError("--precision 16-mixed: not supported by the plain loop; use bf16-mixed or 32-true")
    if "toolkit-fp8" in args.peers and args.precision not in ("bf16-mixed", "bf16-true"):
        raise UserError(f"--precision {args.precision}: not supported with --peers toolkit-fp8; use bf16-mixed")
    others = [peer for peer in args.peers if peer not in ("transformers", "toolkit-fp8")]
    if args.activation_checkpointing == "full" and others:
        raise UserError(f"--activation_checkpointing full: not supported with --peers {','.join(others)}; remove them")
    if any(peer.startswith("litgpt") for peer in args.peers):
        litgpt_config(config)
        if args.precision == "16-mixed":
            raise UserError("--precision 16-mixed: not supported by `litgpt pretrain`; use bf16-mixed or 32-true")
    return config


def find_pythons(args: argparse.Namespace) -> tuple[dict[str, str], dict[str, dict[str, str]]]:
    """Return the Python of each product, and its package versions.

    Raises:
        UserError: The environment of a peer is not specified or not usable.
    """
    pythons = {"toolkit": sys.executable}
    result = {"toolkit": versions(sys.executable, "toolkit", "torch", "lightning")}
    for peer in args.peers:
        if peer in ("plain", "toolkit-fp8"):
            pythons[peer] = sys.executable
            result[peer] = versions(sys.executable, "torch", *(["torchao"] if peer == "toolkit-fp8" else []))
            if peer == "toolkit-fp8" and "torchao" not in result[peer]:
                raise UserError("--peers toolkit-fp8: needs torchao; run: pip install 'torchao>=0.18'")
            continue
        if peer == "transformers":
            flag, python, needed = "transformers_python", args.transformers_python, ["transformers", "accelerate"]
            hint = TRANSFORMERS_ENVIRONMENT
        else:
            flag, python, needed = "litgpt_python", args.litgpt_python, ["litgpt", "litdata"]
            hint = LITGPT_ENVIRONMENT
            if python is None:
                raise UserError(f"--peers {peer}: no environment specified; {hint}")
        python = python or sys.executable
        try:
            packages = versions(os.path.abspath(python), *needed, "torch")
        except (OSError, subprocess.CalledProcessError, ValueError):
            raise UserError(f"--{flag} {python}: is not a working Python; {hint}") from None
        for package in needed:
            if package not in packages:
                raise UserError(f"--{flag} {python}: {package} is not installed; {hint}")
        # Not resolve(): keep the symbolic links of a virtual environment.
        pythons[peer], result[peer] = os.path.abspath(python), packages
    return pythons, result


def main(argv: list[str] | None = None) -> int:
    exit_on_signals()
    try:
        words = sys.argv[1:] if argv is None else argv
        for mode in ("matrix", "card"):
            if f"--{mode}" in words:
                return run_script([sys.executable, str(Path(__file__).with_name(f"benchmark_{mode}.py")), *words])[0]
        args = parse(argv)
        config = choose_config(args)
        pythons, environments = find_pythons(args)
        work = Work(**{f.name: getattr(args, f.name) for f in fields(Work) if hasattr(args, f.name)})
        result = measure_case(work, config, pythons, environments, args.rounds, args.turn_seconds)
        print(json.dumps(result, indent=2) if args.format == "json" else format_table(result))
        return 0
    except UserError as error:
        report(f"benchmark: {error}")
        return 2
    except RunFailedError as error:
        report(f"benchmark: {error}")
        return 1


if __name__ == "__main__":
    sys.exit(main())
