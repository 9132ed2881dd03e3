"""Measure what one GPU gives with `python scripts/benchmark.py --card`: at most 7 minutes, a line per row as it ends.

    python scripts/benchmark.py --card
    python scripts/benchmark.py --card --rows 1.1B,8B --litgpt_python PATH

Each row runs in a separate process. A row starts only if its estimated time is left; the last line has the command for
the others. With two GPUs, the rows that use both come first. The results, the machine and the versions are in --json;
rows of an existing file of the same machine, versions and source are kept.
"""

import argparse
import json
import math
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmark import in_own_process, prepare
from benchmark_matrix import TINY, Run, run_row, tiny_options
from benchmark_processes import RunFailedError, exit_on_signals, run_process
from benchmark_products import PRODUCTS, Work, read_csv
from benchmark_report import describe, machine, report, usable_cpus, versions

from toolkit.errors import UserError
from toolkit.extension import BUILT_IN
from toolkit.models.config import ModelOverrides
from toolkit.models.families import get_config
from toolkit.source_hash import hash_sources

REPOSITORY = Path(__file__).parents[1]
PACKAGES = ("toolkit", "torch", "lightning", "triton", "torchao", "transformers", "flash-attn-3", "flash-attn-4")
GPT2 = Work("gpt2", 1024, 64, "bf16-mixed", "torch", 24, 8, usable_cpus(), micro_batch_size=32)
LLAMA = Work("tiny-llama-1.1b", 2048, 32, "bf16-mixed", "torch", 12, 4, usable_cpus(), micro_batch_size=8)
FULL_8B = Work("Llama-3.1-8B", 4096, 8, "bf16-true", "torch", 7, 3, usable_cpus(), {}, False, 1, "full")
SWITCHES = {  # what runs on CUDA by default: module, name, and the value without it
    "without late reading": ("toolkit.training.launched_step", "LATE_ON", "set()"),
    "without Triton's loss": ("toolkit.models.cross_entropy", "triton_kernel", "m.compiled_kernel"),
}
Figures = dict[str, Any]


@dataclass
class Card:
    """The machine and what the rows share.

    Args:
        folder: Working folder of the processes.
        deadline: ``time.monotonic()`` at which the last row ends.
        prepared: Folder of the random tokens, and the MFU of one token per second, by workload.
        saved: Rows of earlier calls.
    """

    args: argparse.Namespace
    folder: Path
    deadline: float
    prepared: dict[Any, tuple[Path, float | None]] = field(default_factory=dict)
    saved: dict[str, Figures] = field(default_factory=dict)

    @property
    def seconds_left(self) -> float:
        return self.deadline - time.monotonic()


@dataclass(frozen=True)
class Row:
    """A measurement with a title.

    Args:
        title: Its first word is the row that it is compared with. Without commas, which separate titles.
        seconds: Estimated time on an H100, with compilation.
        run: Returns the figures.
    """

    title: str
    seconds: float
    run: Callable[[Card], Figures]

    @property
    def base(self) -> str:
        return self.title.partition(" ")[0]


def training(title: str, seconds: float, work: Work, product: str = "toolkit") -> Row:
    """A row of random tokens by a product of benchmark_products.py."""

    def run(card: Card) -> Figures:
        python = {"litgpt": card.args.litgpt_python, "transformers": card.args.transformers_python}.get(product)
        if product == "litgpt" and python is None:
            raise UserError("--litgpt_python PATH: a Python with LitGPT, see docs/benchmarking.md")
        sized = tiny(work) if card.args.tiny else work
        overrides = ModelOverrides(**sized.model_config)
        config = get_config(sized.model).override(overrides).with_vocab_size(8192)
        key = sized.model, sized.seq_length, sized.batch_size, sized.steps
        if key not in card.prepared:
            folder = card.folder / f"tokens-{len(card.prepared)}"
            folder.mkdir()
            card.prepared[key] = folder, in_own_process(prepare, folder, sized, config)
        folder, mfu = card.prepared[key]
        try:
            limited = replace(sized, max_seconds=card.seconds_left)
            measured = PRODUCTS[product](limited, config, folder, python or sys.executable)
        finally:
            shutil.rmtree(folder / "out", ignore_errors=True)
        rate = measured.tokens_per_sec
        share = None if mfu is None else mfu * rate / work.devices
        return asdict(measured) | {"mfu": share, "step_ms": 1e3 * sized.tokens_per_step / rate, "work": asdict(sized)}

    return Row(title, seconds, run)


def tiny(work: Work) -> Work:
    """Return the row's work in a size for a test on a CPU."""
    sizes = {"seq_length": 32, "batch_size": 2, "micro_batch_size": 1, "steps": 4, "warmup_steps": 2, "threads": 1}
    changes: dict[str, Any] = sizes | {"accelerator": "cpu", "compiler": "none", "activation_checkpointing": "none"}
    precision = "bf16-mixed" if work.options else "32-true"
    return replace(work, **changes, precision=precision, model_config=TINY | {"block_size": 256})


def script(title: str, seconds: float, words: str) -> Row:
    """A row of benchmark_gpu.py, which writes its figures by title."""

    def run(card: Card) -> Figures:
        parts = ["benchmark_gpu.py", *words.split(), "--max_seconds", str(math.ceil(card.seconds_left))]
        result = run_row(Run(title, [*parts, *(tiny_options(parts) if card.args.tiny else [])]), card.seconds_left)
        if result.not_run is not None:
            raise RunFailedError(result.not_run)
        figures: Figures = next(iter(result.values.values()))
        return figures | {"command": result.command}

    return Row(title, seconds, run)


def command(card: Card, *words: str) -> tuple[str, float]:
    """Run a toolkit command, and return what it printed and the seconds."""
    started = time.monotonic()
    line = [sys.executable, "-m", "toolkit", *words]
    done = run_process("toolkit", line, card.folder, usable_cpus(), {}, max_seconds=card.seconds_left)
    return done.output, time.monotonic() - started


def first_run(card: Card) -> Figures:
    """Train the default configuration to its end, with data preparation, validations, samples and checkpoints."""
    path, limit = REPOSITORY / "config_hub" / "pretrain" / "default.yaml", []
    if card.args.tiny:
        limit = ["--train.max_tokens=50000", "--accelerator=cpu"]
    _, seconds = command(card, "pretrain", "--config", str(path), "--out_dir=default", *limit)
    rows = read_csv(card.folder / "default" / "logs" / "metrics.csv")
    rates = [float(row["tokens_per_sec"]) for row in rows if row["loss"]]
    bits = next(float(row["val_bpb"]) for row in reversed(rows) if row["val_bpb"])
    return {"tokens_per_sec": median(rates[len(rates) // 2 :]), "bits_per_byte": bits, "seconds": seconds}


def proof(card: Card) -> Figures:
    """Run `toolkit doctor --prove`."""
    output, seconds = command(card, "doctor", "--prove", "true", "--json_path=prove.json")
    shutil.copy(card.folder / "prove.json", card.args.json.with_name("prove.json"))
    return {"result": output.strip().splitlines()[-1], "seconds": seconds}


def all_rows(n_gpus: int) -> list[Row]:
    """Return the rows, the most important ones first."""
    residual = ("--train.residual_dtype=bf16",)
    micro_64, bf16 = replace(GPT2, micro_batch_size=64), replace(GPT2, precision="bf16-master")
    switched = [
        training(f"gpt2 {title}", 30, replace(GPT2, switch=switch_off(*where))) for title, where in SWITCHES.items()
    ]
    of_two = [
        training("2-GPU ddp", 50, replace(GPT2, devices=2, options=("--strategy=ddp",))),
        training("2-GPU fsdp", 50, replace(GPT2, devices=2, options=("--strategy=fsdp",))),
        Row("2-GPU doctor --prove", 200, proof),
    ]
    return [
        training("gpt2", 45, GPT2),
        *(of_two if n_gpus > 1 else []),
        *switched,
        training("gpt2 residual in bf16", 35, replace(GPT2, options=residual)),
        training("gpt2 micro-batch 64", 35, micro_64),
        training("gpt2 residual in bf16 at micro-batch 64", 35, replace(micro_64, options=residual)),
        training("gpt2 bf16-master", 35, bf16),
        training("gpt2 bf16-master at micro-batch 64", 35, replace(bf16, micro_batch_size=64)),
        training("gpt2 once more", 30, GPT2),
        script("1.1B generate", 35, "generation"),
        script("1.1B generate 256 rows", 45, "batch --clients 256"),
        script("1.1B serve 32 clients", 45, "serving --clients 32"),
        script("1.1B LoRA packed", 100, "packing --batch_size 4 --seq_length 2048 --rows 4000"),
        training("gpt2 plain loop", 40, GPT2, "plain"),
        training("gpt2 Trainer", 60, GPT2, "transformers"),
        training("1.1B", 70, LLAMA),
        training("1.1B LitGPT", 90, LLAMA, "litgpt"),
        Row("default run", 80, first_run),
        script("8B LoRA", 180, 'lora --model Llama-3.1-8B --model_config {"vocab_size":128256}'),
        training("8B all weights", 150, FULL_8B),
    ]


def switch_off(module: str, name: str, value: str) -> str:
    return f"import {module} as m; m.{name}; m.{name} = {value}"


def describe_row(row: Row, figures: Figures, base: Figures) -> str:
    """Return the line of a row, with the ratio to its base if both train."""
    if "not_run" in figures:
        return f"{row.title}: not run: {figures['not_run']}"
    parts = [figures["result"]] if "result" in figures else []
    if rate := figures.get("tokens_per_sec"):
        is_comparable = "parameters" in figures and "parameters" in base
        ratio = f" ({rate / base['tokens_per_sec']:.3f} x {row.base})" if is_comparable else ""
        parts.append(f"{rate:,.0f} tokens/s{ratio}")
    for name, form in {
        "mfu": "MFU {:.1%}",
        "step_ms": "{:.1f} ms per step",
        "peak_memory_gb": "{:.1f} GB",
        "bits_per_byte": "{:.3f} bits per byte",
        "seconds": "{:.0f} s",
    }.items():
        if (value := figures.get(name)) is not None:
            parts.append(form.format(value))
    return f"{row.title}: {', '.join(parts)}"


def choose_rows(rows: list[Row], texts: str) -> list[Row]:
    """Return the rows that have one of these titles, or one of the other texts in their title; all without a text.

    Raises:
        UserError: A text is in no title.
    """
    titles, chosen = {row.title for row in rows}, set[str]()
    for text in filter(None, map(str.strip, texts.split(","))):
        if not (matches := {text} & titles or {title for title in titles if text in title}):
            raise UserError(f"--rows {text}: in no title of {', '.join(row.title for row in rows)}")
        chosen |= matches
    return [row for row in rows if not chosen or row.title in chosen]


def read_saved(path: Path, host: dict[str, Any], packages: dict[str, str]) -> dict[str, Figures]:
    """Return the rows of an existing file.

    Raises:
        UserError: The file cannot be written, or its rows are not of this machine, these versions and this source.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+", encoding="utf-8") as file:
            file.seek(0)
            text = file.read()
        values = json.loads(text) if text else {"machine": host, "versions": packages, "rows": {}}
        same = [{k: v for k, v in one.items() if k not in ("load", "commit")} for one in (host, values["machine"])]
        if same[0] == same[1] and values["versions"] == packages:
            rows: dict[str, Figures] = values["rows"]
            return rows
    except OSError as error:
        raise UserError(f"--json {path}: {error.strerror}; specify another file") from error
    except (ValueError, TypeError, KeyError, AttributeError):
        pass  # another file
    raise UserError(f"--json {path}: not of this machine, these versions and this source; specify another file")


def merge(saved: dict[str, Figures], results: dict[str, Figures]) -> dict[str, Figures]:
    """Return the rows of both, of a row that both have the newer one, unless only the older one ran."""
    ran = {title: row for title, row in saved.items() if "not_run" not in row and "not_run" in results.get(title, {})}
    return saved | results | ran


def follow_up(args: argparse.Namespace, titles: list[str]) -> str:
    """Return the command that runs these rows with the user's other options."""
    words = ["python", "scripts/benchmark.py", "--card", "--rows", ",".join(titles)]
    for name in ("max_seconds", "litgpt_python", "transformers_python", "json"):
        if (value := getattr(args, name)) != getattr(parse([]), name):
            words += [f"--{name}", str(value)]
    return shlex.join(words)


def run_rows(card: Card, rows: list[Row], save: Callable[[dict[str, Figures]], None]) -> dict[str, Figures]:
    """Run the rows for which time is left; print and save each when it ends.

    A row that did not run has the reason, ``not_run``, and ``is_failed`` if it began.
    """
    results: dict[str, Figures] = {}
    figures: Figures
    began = time.monotonic()
    for row in rows:
        started = time.monotonic()
        base = merge(card.saved, results).get(row.base, {}) if row.base != row.title else {}
        try:
            if card.seconds_left < row.seconds:
                figures = {"not_run": f"takes an estimated {row.seconds:.0f} s, and {card.seconds_left:.0f} s are left"}
            else:
                figures = row.run(card)
                size, other = figures.get("parameters"), base.get("parameters")
                if None not in (size, other) and size != other:
                    raise RunFailedError(f"its model has {size:,} parameters, that of {row.base} {other:,}")
        except (RunFailedError, UserError, OSError) as error:
            lines = str(error).splitlines()
            figures = {"not_run": " ".join(dict.fromkeys([lines[0], lines[-1]])), "is_failed": True}
        results[row.title] = figures | {"took_s": time.monotonic() - started}
        report(f"[{time.monotonic() - began:4.0f} s] {describe_row(row, figures, base)}")
        save(merge(card.saved, results))
    return results


def count_gpus() -> int:
    import torch

    return torch.cuda.device_count()


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--card", action="store_true", help="measure a GPU")
    add("--rows", metavar="TITLES", default="", help="only rows whose title contains one of these, such as 1.1B,LoRA")
    add("--max_seconds", type=float, default=420, help="limit in all (%(default)s)")
    add("--litgpt_python", metavar="PATH", help="Python of an environment with LitGPT")
    add("--transformers_python", metavar="PATH", help="Python with transformers and accelerate (default: this one)")
    add("--json", type=Path, default=Path("out/card.json"), help="file of the results (%(default)s)")
    add("--tiny", action="store_true", help=argparse.SUPPRESS)  # for tests: tiny sizes on a CPU
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    deadline = time.monotonic()
    exit_on_signals()
    args = parse(argv)
    n_gpus = 1 if args.tiny else in_own_process(count_gpus)
    if n_gpus == 0:
        report("benchmark: --card: no CUDA device is here; run it on a machine with a GPU")
        return 2
    host, packages = machine(), versions(sys.executable, *PACKAGES)
    host |= {"gpus": n_gpus, "source": hash_sources(["toolkit", *BUILT_IN])}
    try:
        rows = choose_rows(all_rows(n_gpus), args.rows)
        saved = read_saved(args.json, host, packages)
    except UserError as error:
        report(f"benchmark: {error}")
        return 2
    report(describe(host, packages))

    def save(results: dict[str, Figures]) -> None:
        values = {"machine": host, "versions": packages, "max_seconds": args.max_seconds, "rows": results}
        args.json.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")

    with tempfile.TemporaryDirectory(prefix="card-") as name:
        results = run_rows(Card(args, Path(name), deadline + args.max_seconds, saved=saved), rows, save)
    report(f"wrote {args.json}")
    rows_of_all = merge(saved, results)
    late = [title for title in results if "not_run" in rows_of_all[title] and "is_failed" not in rows_of_all[title]]
    if late:
        report(f"the others: {follow_up(args, late)}")
    return int(any("is_failed" in figures for figures in results.values()))


if __name__ == "__main__":
    sys.exit(main())
