"""Benchmark speed and memory of `toolkit finetune_lora`, compared with `litgpt finetune_lora`.

    python scripts/smollm2_to_hf.py SmolLM2-135M-Instruct
    python scripts/benchmark_finetune.py SmolLM2-135M-Instruct --litgpt_python PATH

LitGPT infers the model from the folder name. Both train one epoch of the same rows, each in its own order, and must
count the same number of tokens. Runs are interleaved, see benchmark.py. Step times are end to end.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import median

from benchmark import in_own_process
from benchmark_processes import MALLOC, CompletedRun, RunFailedError, run_process
from benchmark_products import find_parameters, read_csv
from benchmark_report import compare, machine, report, spread, summarize, usable_cpus, versions
from chatterbot_to_jsonl import conversations

from toolkit.errors import UserError

MICRO, GLOBAL, ROWS, WARMUP_STEPS, SEED, LEARNING_RATE, BETAS = 4, 16, 256, 4, 42, 2e-4, [0.9, 0.999]
COMMON = [
    "--data=JSON", "--data.json_path=data", "--data.prompt_style=alpaca", "--data.mask_prompt=true",
    "--data.num_workers=0", f"--train.max_steps={ROWS // GLOBAL}", f"--train.global_batch_size={GLOBAL}",
    f"--train.micro_batch_size={MICRO}", "--train.lr_warmup_steps=1", "--train.log_interval=1", "--lora_r=8",
    "--lora_alpha=16", "--lora_dropout=0", "--eval.final_validation=false", "--devices=1", f"--seed={SEED}",
]  # fmt: skip
# Skip its final merge, which sets its peak memory: toolkit has a separate command for that.
LITGPT = "from litgpt.finetune import lora; lora.merge_lora = lambda **_: 0; from litgpt.__main__ import main; main()"


@dataclass
class Measurement:
    """One run of one product. Tokens are input tokens: all tokens of a row except the last."""

    parameters: int  # trainable
    tokens: int  # per epoch
    tokens_per_sec: float
    padded_per_sec: float  # including padding
    seconds_per_step: float
    peak_memory_gb: float


def measurement(parameters: int, memory: float, ends: list[tuple[float, int, int]]) -> Measurement:
    """Return medians over the steps after the warm-up, from (seconds, tokens, positions) at the end of each."""
    steps = [[b - a for a, b in zip(*pair, strict=True)] for pair in pairwise(ends[WARMUP_STEPS - 1 :])]
    real, padded = median(n / s for s, n, _ in steps), median(n / s for s, _, n in steps)
    return Measurement(parameters, ends[-1][1], real, padded, median(s for s, *_ in steps), memory)


def prepare(hf_dir: Path, folder: Path, python: str) -> None:
    """Write the trivia of chatterbot-corpus (with five validation rows, required by LitGPT) and both checkpoints."""
    pairs = dict.fromkeys((turns[0], turns[1]) for turns in conversations(["trivia"]))
    lines = [json.dumps({"instruction": question, "input": "", "output": answer}) + "\n" for question, answer in pairs]
    (folder / "data").mkdir()
    (folder / "data" / "train.jsonl").write_text("".join(lines[:ROWS]), encoding="utf-8")
    (folder / "data" / "val.jsonl").write_text("".join(lines[ROWS:]), encoding="utf-8")
    shutil.copytree(hf_dir, folder / hf_dir.name)
    command = [sys.executable, "-m", "toolkit", "convert_from_hf", hf_dir.name, "toolkit-base"]
    run_process("toolkit", command, folder, 1, {})
    run_process("litgpt", [python, "-m", "litgpt", "convert_to_litgpt", hf_dir.name], folder, 1, {})
    (folder / hf_dir.name).rename(folder / "litgpt-base")


def positions(folder: Path) -> list[int]:
    """Count the positions of toolkit's batches, including padding, by reading the data again."""
    from toolkit.data.loader import train_batches
    from toolkit.data.order import ShuffledOrder
    from toolkit.data.sft.datasets import JSON
    from toolkit.data.tokenizer import Tokenizer

    data = JSON(json_path=str(folder / "data"), prompt_style="alpaca", cache_dir=str(folder / "cache"))
    tokenizer = Tokenizer.load(folder / "toolkit-base")
    rows = data.prepare(tokenizer=tokenizer, max_seq_length=2048, report=lambda _: None).train
    steps = train_batches(
        rows, ShuffledOrder(len(rows), SEED),
        start_position=0, total_positions=ROWS, global_batch_size=GLOBAL, micro_batch_size=MICRO,
        rank=0, world_size=1, num_workers=0,
    )  # fmt: skip
    return list(accumulate(sum(batch.input_ids.numel() for batch in step) for step in steps))


def run_toolkit(folder: Path, python: str, precision: str, threads: int) -> Measurement:
    """Run `toolkit finetune_lora` without gradient clipping, as in LitGPT."""
    command = [
        python, "-m", "toolkit", "finetune_lora", "toolkit-base", "--out_dir=toolkit", f"--precision={precision}",
        *COMMON, "--data.cache_dir=cache", "--train.max_norm=0", "--train.save_interval=0", "--eval.interval=0",
        f"--train.learning_rate={LEARNING_RATE}", "--optimizer.weight_decay=0", f"--optimizer.betas={BETAS}",
    ]  # fmt: skip
    done = run_process("toolkit", command, folder, threads, {})
    rows, padded = read_csv(folder / "toolkit" / "logs" / "metrics.csv"), in_own_process(positions, folder)
    ends = [(float(row["seconds"]), int(row["tokens"]), n) for row, n in zip(rows, padded, strict=True)]
    parameters = find_parameters(r"([\d,]+) of them trained", done.output, "toolkit")
    return measurement(parameters, float(rows[-1]["peak_memory_gb"]), ends)


def run_litgpt(folder: Path, python: str, precision: str, threads: int) -> Measurement:
    optimizer = {"lr": LEARNING_RATE, "weight_decay": 0.0, "betas": BETAS}
    command = [
        python, "-c", LITGPT, "finetune_lora", "litgpt-base", "--out_dir=litgpt", f"--precision={precision}",
        *COMMON, "--train.epochs=1", "--train.save_interval=1000", "--eval.interval=1000",
        "--optimizer", json.dumps({"class_path": "torch.optim.AdamW", "init_args": optimizer}),
    ]  # fmt: skip
    done = run_process("litgpt", command, folder, threads, MALLOC)
    return read_litgpt(next((folder / "litgpt" / "logs").rglob("metrics.csv")), done)


def read_litgpt(metrics: Path, done: CompletedRun) -> Measurement:
    """Read LitGPT's CSV log: each iteration has a row with ``time`` and ``lengths``, and another with ``tokens``."""
    rows, last = read_csv(metrics), slice(GLOBAL // MICRO - 1, None, GLOBAL // MICRO)  # iterations that end a step
    times, counts = ([row for row in rows if row[column]][last] for column in ("time", "tokens"))
    both = enumerate(zip(times, counts, strict=True), start=1)
    ends = [(float(a["time"]), int(b["tokens"]) - GLOBAL * step, int(a["lengths"])) for step, (a, b) in both]
    parameters = find_parameters(r"Number of trainable parameters: ([\d,]+)", done.output, "LitGPT")
    return measurement(parameters, done.peak_memory_gb, ends)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("hf_dir", type=Path, help="SmolLM2-135M-Instruct, or another model name known to LitGPT")
    parser.add_argument("--litgpt_python", required=True, metavar="PATH", help="Python of an environment with LitGPT")
    parser.add_argument("--precision", default="bf16-true", choices=["32-true", "bf16-true", "bf16-mixed"])
    parser.add_argument("--threads", type=int, default=usable_cpus(), help="OMP_NUM_THREADS of both (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each product (%(default)s)")
    parser.add_argument("--json", type=Path, help="also write the runs to this file")
    args = parser.parse_args(argv)
    products = {"toolkit": (run_toolkit, sys.executable), "litgpt": (run_litgpt, os.path.abspath(args.litgpt_python))}
    runs: dict[str, list[Measurement]] = {name: [] for name in products}
    with tempfile.TemporaryDirectory(prefix="benchmark-") as name:
        folder = Path(name)
        try:
            prepare(args.hf_dir, folder, products["litgpt"][1])
            for number in range(args.rounds):
                for product, (run, python) in products.items():
                    load = machine()["load"]
                    runs[product].append(run(folder, python, args.precision, args.threads))
                    shutil.rmtree(folder / product)
                    report(f"round {number + 1}, load before {load}: {product} {runs[product][-1]}")
            if len({(run.parameters, run.tokens) for both in runs.values() for run in both}) > 1:
                raise RunFailedError("the numbers of parameters or tokens differ: the results are not comparable")
        except (RunFailedError, UserError, OSError) as error:
            report(f"benchmark_finetune: {error}")
            return 1
    if args.json is not None:
        values = {product: [asdict(run) for run in product_runs] for product, product_runs in runs.items()}
        args.json.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    print("| product | tokens/s | with padding | s per step | peak GB |\n|---|---|---|---|---|")
    figures = {"tokens_per_sec": ".0f", "padded_per_sec": ".0f", "seconds_per_step": ".2f", "peak_memory_gb": ".2f"}
    for product, (_, python) in products.items():
        packages = ", ".join(f"{k} {v}" for k, v in versions(python, "toolkit", "litgpt", "torch", "lightning").items())
        cells = [spread(summarize([getattr(run, f) for run in runs[product]]), form) for f, form in figures.items()]
        print("| " + " | ".join([f"{product} ({packages})", *cells]) + " |")
    ratios = [spread(compare(runs["toolkit"], runs["litgpt"], f), ".2f") for f in figures]
    print("| " + " | ".join(["toolkit / litgpt", *ratios]) + " |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
