"""Describe the machine of a benchmark, summarize its runs, and format the results."""

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import asdict, fields
from pathlib import Path
from statistics import median
from typing import Any

from benchmark_processes import MALLOC
from benchmark_products import BETAS, MAX_NORM, WEIGHT_DECAY, Measurement, Work

from toolkit import __version__

NOTES_ON_TIME = [
    "tokens/s: median step after the warm-up, by the product's own clock. toolkit's includes data loading; "
    "LitGPT's (iter_time) and the Trainer's (callback) start after data loading.",
    "end to end: from the end of one step to the end of the next, including data loading and logging for all.",
    "LitGPT's own Tok/sec line is not used: it divides by a timestamp.",
    "Memory: allocated on CUDA; on a CPU the resident set size.",
    "MFU: (6 x weights in matrix products + 12 x layers x width x tokens) x tokens/s / the GPU's dense bf16 peak.",
    "toolkit's run ends with its last step, LitGPT's without its final save.",
]
NOTES_ON_SETTINGS = [
    f"AdamW, weight decay {WEIGHT_DECAY} (toolkit: matrices; Trainer: no biases and norms; LitGPT: everything), "
    f"betas {BETAS}, clip {MAX_NORM}; every step logged; no validation or checkpoint during the measured steps.",
    "glibc keeps freed memory in all products: toolkit configures it (on a CPU), the peers get "
    + " ".join(f"{k}={v}" for k, v in MALLOC.items()),
]


def versions(python: str, *packages: str) -> dict[str, str]:
    """Return the versions of the installed packages in the environment of ``python``."""
    code = (
        "import importlib.metadata as m, json, sys\n"
        "found = {d.metadata['Name'].lower(): d.version for d in m.distributions() if d.metadata['Name']}\n"
        "print(json.dumps({p: found[p] for p in sys.argv[1:] if p in found}))"
    )
    done = subprocess.run([python, "-c", code, *packages], capture_output=True, text=True, check=True)
    versions_here = {"toolkit": __version__} if python == sys.executable and "toolkit" in packages else {}
    return versions_here | json.loads(done.stdout)


def describe_run(run: Measurement) -> str:
    mfu = "" if run.mfu is None else f", MFU {run.mfu:.1%}"
    return f"{run.tokens_per_sec:,.0f} tokens/s{mfu}, {run.peak_memory_gb:.2f} GB"


def summarize(values: list[float]) -> dict[str, Any]:
    return {"median": median(values), "min": min(values), "max": max(values), "rounds": values}


def compare(toolkit: list[Measurement], peer: list[Measurement], figure: str) -> dict[str, Any]:
    """Summarize the ratios toolkit / peer of all rounds."""
    return summarize([getattr(a, figure) / getattr(b, figure) for a, b in zip(toolkit, peer, strict=True)])


def build_report(
    work: Work,
    measured: dict[str, list[Measurement]],
    failed: dict[str, str],
    environments: dict[str, dict[str, str]],
    host: dict[str, Any],
) -> dict[str, Any]:
    skipped = ["parameters"] + ["mfu"] * (measured["toolkit"][0].mfu is None)
    figures = [f.name for f in fields(Measurement) if f.name not in skipped]
    return {
        "work": asdict(work),
        "machine": host,
        "environments": environments,
        "notes": NOTES_ON_TIME + ([] if work.as_shipped else NOTES_ON_SETTINGS),
        "failed": failed,
        "products": {
            product: {"parameters": runs[0].parameters}
            | {figure: summarize([getattr(run, figure) for run in runs]) for figure in figures}
            for product, runs in measured.items()
        },
        "ratios": {
            product: {figure: compare(measured["toolkit"], runs, figure) for figure in figures}
            for product, runs in measured.items()
            if product != "toolkit"
        },
    }


def machine() -> dict[str, Any]:
    """Describe the CPU, its load average over the last minute, the first GPU, and the commit of this checkout."""
    model = ""
    if (info := Path("/proc/cpuinfo")).is_file():
        match = re.search(r"model name\s*: (.+)", info.read_text())
        model = match[1] if match else ""
    load = f"{os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    return {
        "cpu": model or platform.processor(), "cpus": usable_cpus(), "system": platform.system(), "load": load,
        "gpu": first_line("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"),
        "commit": first_line("git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"),
    }  # fmt: skip


def first_line(*command: str) -> str:
    """Return the first line that a command prints; empty if it fails."""
    if shutil.which(command[0]) is None:
        return ""
    done = subprocess.run(command, capture_output=True, text=True)
    return "" if done.returncode else done.stdout.partition("\n")[0]


def describe(host: dict[str, Any], packages: dict[str, str] | None = None) -> str:
    """Format the result of :func:`machine` and package versions as one line."""
    parts = [host["gpu"], f"{host['cpu']}, {host['cpus']} CPUs, load before {host['load']}"]
    parts += [f"commit {host['commit']}" if host["commit"] else "", ", ".join(map(" ".join, (packages or {}).items()))]
    return "; ".join(filter(None, parts))


def usable_cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def format_table(result: dict[str, Any]) -> str:
    work, host = result["work"], result["machine"]
    settings = "each as shipped" if work["as_shipped"] else f"{work['precision']}, compiler {work['compiler']}"
    lines = [
        f"{work['model']}: {result['products']['toolkit']['parameters']:,} parameters; sequence {work['seq_length']}, "
        f"batch {work['batch_size']}, micro-batch {work['micro_batch_size'] or work['batch_size']}, {settings}; steps "
        f"{work['warmup_steps'] + 1} to {work['steps']}; {work['threads']} threads; {describe(host)}",
        "",
        "| product | tokens/s | MFU | end to end | peak GB | toolkit / it | end to end |",
        "|---|---|---|---|---|---|---|",
    ]
    for product, figures in result["products"].items():
        speeds = [spread(figures[name], ",.0f") for name in ("tokens_per_sec", "tokens_per_sec_end_to_end")]
        ratios = result["ratios"].get(product)
        names = ("tokens_per_sec", "tokens_per_sec_end_to_end")
        compared = [spread(ratios[name], ".2f") for name in names] if ratios else ["", ""]
        speeds.insert(1, f"{figures['mfu']['median']:.1%}" if "mfu" in figures else "")
        memory = f"{figures['peak_memory_gb']['median']:.2f}"
        packages = ", ".join(f"{package} {version}" for package, version in result["environments"][product].items())
        name = f"{product} ({packages})"
        lines.append("| " + " | ".join([name, *speeds, memory, *compared]) + " |")
    lines += [f"\n{product}: {reason}" for product, reason in result["failed"].items()]
    return "\n".join([*lines, "", "Medians (lowest to highest round).", *(f"- {note}" for note in result["notes"])])


def spread(summary: dict[str, Any], form: str) -> str:
    return f"{summary['median']:{form}} ({summary['min']:{form}} to {summary['max']:{form}})"


def report(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
