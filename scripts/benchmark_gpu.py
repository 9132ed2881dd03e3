"""Measure toolkit's LoRA finetuning, packed finetuning, generation and serving, with random weights.

    python scripts/benchmark_gpu.py lora --model Llama-3.1-8B --json lora.json
    python scripts/benchmark_gpu.py packing --model tiny-llama-1.1b
    python scripts/benchmark_gpu.py generation --model tiny-llama-1.1b --new_tokens 512
    python scripts/benchmark_gpu.py batch --model tiny-llama-1.1b --clients 256
    python scripts/benchmark_gpu.py serving --model tiny-llama-1.1b --clients 32

Each row runs toolkit's commands in separate processes, on a GPU or a CPU. `--matrix` runs all of them, see
benchmark_matrix.py.
"""

import argparse
import json
import random
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmark import in_own_process
from benchmark_processes import RunFailedError, end, exit_on_signals, run_process, start, tail
from benchmark_products import has_step, read_csv
from benchmark_report import report, usable_cpus

from toolkit.errors import UserError
from toolkit.models.config import ModelConfig, ModelOverrides
from toolkit.models.families import get_config

SEED, STEPS, WARMUP_STEPS, VOCAB_SIZE = 42, 8, 3, 512
PARTS = ("query", "key", "value", "projection", "mlp")
WORDS = ["a", "ship", "sailed", "over", "the", "cold", "sea", "and", "came", "home", "before", "winter", "storms"]
Figures = dict[str, Any]


def write_base(folder: Path, config: ModelConfig) -> None:
    """Write a checkpoint of random bf16 weights with a tokenizer of 512 tokens."""
    import torch

    from toolkit.checkpoints.folder import write_model_files
    from toolkit.data.tokenizer import train_bpe
    from toolkit.models.gpt import GPT
    from toolkit.models.init import initialize

    with torch.device("meta"):
        model = GPT(config).to(torch.bfloat16)
    initialize(model, SEED)
    folder.mkdir()
    tokenizer = train_bpe(sentences(1000), VOCAB_SIZE)
    write_model_files(folder, state_dict=model.state_dict(), config=config, hyperparameters=None, tokenizer=tokenizer)


def sentences(count: int, longest: int = 40) -> list[str]:
    """Return random sentences of 4 to ``longest`` words, most of them short."""
    generator = random.Random(SEED)
    lengths = [4 + int((longest - 4) * generator.random() ** 3) for _ in range(count)]
    return [" ".join(generator.choices(WORDS, k=length)) for length in lengths]


def finetune(args: argparse.Namespace, folder: Path, name: str, *options: str) -> Figures:
    """Run `toolkit finetune_lora` with adapters on all layers of the blocks, until its last step."""
    command = [
        sys.executable, "-m", "toolkit", "finetune_lora", "base", f"--out_dir={name}", "--devices=1",
        f"--accelerator={args.accelerator}", f"--train.max_steps={STEPS}", f"--train.max_seq_length={args.seq_length}",
        f"--train.global_batch_size={4 * args.batch_size}", f"--train.micro_batch_size={args.batch_size}",
        "--train.log_interval=1", "--train.save_interval=0", "--eval.interval=0", "--eval.final_validation=false",
        f"--compiler={args.compiler}", "--train.max_norm=0", "--lora_r=16", "--lora_alpha=32",
        *(f"--lora_{part}=true" for part in PARTS), f"--seed={SEED}", *options,
    ]  # fmt: skip
    metrics = folder / name / "logs" / "metrics.csv"
    run_process(
        "toolkit", command, folder, usable_cpus(), {}, max_seconds=args.max_seconds,
        is_done=lambda: has_step(metrics, STEPS),
    )  # fmt: skip
    rows = [row for row in read_csv(metrics) if row["loss"]]
    after = rows[WARMUP_STEPS:]
    tokens, seconds = (
        float(after[-1][column]) - float(rows[WARMUP_STEPS - 1][column]) for column in ("tokens", "seconds")
    )
    figures: Figures = {"tokens_per_sec": tokens / seconds, "peak_memory_gb": float(after[-1]["peak_memory_gb"])}
    return figures | ({"mfu": median(float(row["mfu"]) for row in after)} if after[-1]["mfu"] else {})


def lora(args: argparse.Namespace, folder: Path) -> dict[str, Callable[[], Figures]]:
    """Full rows of 100 tokens, with dropout and without recomputation or clipping: the setting of published figures."""
    data = ["--data=SyntheticTokens", "--data.vocab_size=100", "--lora_dropout=0.1"]
    return {"LoRA, rank 16, all layers": lambda: finetune(args, folder, "lora", *data)}


def packing(args: argparse.Namespace, folder: Path) -> dict[str, Callable[[], Figures]]:
    """Tokens/s without padding, of rows of varying length: packed, and padded to the longest of a micro-batch."""
    rows = [{"prompt": "go on", "completion": text} for text in sentences(args.rows, args.seq_length // 4)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    data = ["--data=JSON", "--data.json_path=rows.jsonl", "--data.cache_dir=cache", "--data.prompt_style=chatml"]
    return {
        "packed": lambda: finetune(args, folder, "packed", *data, "--data.packing=best_fit"),
        "padded": lambda: finetune(args, folder, "padded", *data),
    }


def generation(args: argparse.Namespace, folder: Path) -> dict[str, Callable[[], Figures]]:
    """The last of three greedy samples of `toolkit generate`; on a GPU the first captures a CUDA graph."""

    def generate() -> Figures:
        command = [
            sys.executable, "-m", "toolkit", "generate", "base", f"--accelerator={args.accelerator}",
            f"--max_new_tokens={args.new_tokens}", "--num_samples=3", "--temperature=0", "--prompt=the cold sea",
        ]  # fmt: skip
        done = run_process("toolkit", command, folder, usable_cpus(), {}, max_seconds=args.max_seconds)
        return {"tokens_per_sec": float(re.findall(r"([\d.]+) tokens/s", done.output)[-1])}

    return {"generate": generate}


def batch(args: argparse.Namespace, folder: Path) -> dict[str, Callable[[], Figures]]:
    """`toolkit generate` of four batches of prompts, with the first one's CUDA graph."""
    prompts = sentences(4 * args.clients, 8)
    (folder / "prompts.txt").write_text("".join(f"{i} {text}\n" for i, text in enumerate(prompts)), encoding="utf-8")

    def generate() -> Figures:
        command = [
            sys.executable, "-m", "toolkit", "generate", "base", f"--accelerator={args.accelerator}",
            f"--max_new_tokens={args.new_tokens}", "--prompts_path=prompts.txt", f"--batch_size={args.clients}",
        ]  # fmt: skip
        done = run_process("toolkit", command, folder, usable_cpus(), {}, max_seconds=args.max_seconds)
        return {"tokens_per_sec": float(re.findall(r"([\d.]+) tokens/s", done.output)[-1])}

    return {f"generate, batches of {args.clients}": generate}


def serving(args: argparse.Namespace, folder: Path) -> dict[str, Callable[[], Figures]]:
    """Generated tokens/s of `toolkit serve`, over all clients, each with one request at a time."""

    def serve() -> Figures:
        command = [
            sys.executable, "-m", "toolkit", "serve", "base", "--port=0", f"--accelerator={args.accelerator}",
            f"--max_concurrent_requests={args.clients}", f"--max_seq_length={args.new_tokens + 64}",
        ]  # fmt: skip
        log = folder / "serve.log"
        with open(log, "wb") as file:
            server = start(command, cwd=folder, stdout=file, stderr=subprocess.STDOUT)
        try:
            started = time.monotonic()
            while not (match := re.search(r"(http://\S+) serves", log.read_text(errors="replace"))):
                if server.poll() is not None or time.monotonic() - started > args.max_seconds:
                    raise RunFailedError(f"toolkit serve did not start; its output ends:\n{tail(log.read_text())}")
                time.sleep(0.1)
            ask = partial(complete, f"{match[1]}/completions", args.new_tokens, args.max_seconds)
            with ThreadPoolExecutor(args.clients) as pool:
                list(pool.map(ask, range(args.clients)))  # warms up
                started = time.perf_counter()
                tokens = sum(pool.map(ask, range(2 * args.clients)))
                return {"tokens_per_sec": tokens / (time.perf_counter() - started)}
        finally:
            end(server)

    return {f"serve, {args.clients} clients": serve}


def complete(url: str, new_tokens: int, seconds: float, number: int) -> int:
    """Send a request, and return the number of generated tokens."""
    body = {"model": "base", "prompt": f"ship {number}", "max_tokens": new_tokens, "seed": number}
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=seconds) as response:
        count: int = json.load(response)["usage"]["completion_tokens"]
        return count


def describe(title: str, figures: Figures) -> str:
    mfu, memory = (figures.get(key) for key in ("mfu", "peak_memory_gb"))
    cells = [f"{figures['tokens_per_sec']:,.0f}", f"{mfu:.1%}" if mfu else "", f"{memory:.1f}" if memory else ""]
    return f"| {title} | " + " | ".join(cells) + " |"


ROWS = {row.__name__: row for row in (lora, packing, generation, batch, serving)}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("row", choices=ROWS)
    add("--model", default="tiny-llama-1.1b", help="a named architecture (%(default)s)")
    add("--model_config", metavar="JSON", default={}, type=json.loads, help="fields that override the architecture")
    add("--accelerator", default="auto", choices=["auto", "cpu", "cuda"])
    add("--compiler", default="torch", choices=["none", "torch"], help="of lora and packing (%(default)s)")
    add("--seq_length", type=int, default=4096, help="of lora and packing (%(default)s)")
    add("--batch_size", type=int, default=2, help="sequences per forward pass; four per step (%(default)s)")
    add("--rows", type=int, default=20_000, help="rows of packing (%(default)s)")
    add("--new_tokens", type=int, default=256, help="of generation, batch and serving (%(default)s)")
    add("--clients", type=int, default=32, help="of serving; sequences of a batch (%(default)s)")
    add("--max_seconds", type=float, default=600, help="limit of each process (%(default)s)")
    add("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args(argv)
    exit_on_signals()
    results: dict[str, Figures] = {}
    with tempfile.TemporaryDirectory(prefix="benchmark-") as name:
        folder = Path(name)
        try:
            config = get_config(args.model).override(ModelOverrides(**args.model_config)).with_vocab_size(VOCAB_SIZE)
            started = time.perf_counter()
            in_own_process(write_base, folder / "base", config)
            report(f"wrote {config.name} in {time.perf_counter() - started:.0f} s")
            for title, measure in ROWS[args.row](args, folder).items():
                results[title] = measure()
                report(describe(title, results[title]))
        except (RunFailedError, UserError, OSError) as error:
            report(f"benchmark_gpu: {error}")
            return 1
    print("| row | tokens/s | MFU | peak GB |\n|---|---:|---:|---:|")
    print("\n".join(describe(title, figures) for title, figures in results.items()))
    if args.json is not None:
        args.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
