"""Write tutorials/recipes.md: for each file of config_hub its command, hardware, plan and measurements.

    python scripts/write_recipes.py
    python scripts/write_recipes.py --add out/pretrain config_hub/pretrain/default.yaml --hardware "one RTX 4090"

--add writes what a finished run measured to config_hub/measured, from its metrics.csv and hyperparameters.yaml. Give
--command if it was not the file's own.
"""

import argparse
import csv
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the plan of the file, not of this machine
ROOT = Path(__file__).resolve().parents[1]
HUB, PAGE = ROOT / "config_hub", ROOT / "tutorials" / "recipes.md"
MEASURED = HUB / "measured"
GPUS = {24: "RTX 4090", 40: "A100-SXM4-40GB", 80: "H100"}
"""The GPU whose speed is predicted, by the memory that a file names in its first lines."""
LOGGED = ("step", "tokens", "seconds", "loss", "val_loss", "val_bpb", "tokens_per_sec", "peak_memory_gb")
QUALITIES = {"val_bpb": "bits per byte", "val_loss": "validation loss"}
"""Figures of quality; the first that a measurement has is shown."""
GROUPS = {
    "pretrain": "Pretraining",
    "finetune": "Finetuning and preferences",
    "data": "Datasets of the Hugging Face hub",
}
HEAD = """\
# Recipes

Every file of [config_hub](../config_hub) with its command. Memory and time are predictions of `toolkit plan`
([how far off](plans.md#how-fast-will-it-be)); the last column is measured, or says "prediction".

- **Memory** is per device. Files for CPU cores are planned on a CPU, without Python and its libraries (about 0.5 GB, in
  the measured memory); on a GPU they need about 0.6 GB more, for CUDA's context.
- **Time** is for a GPU with the memory that the file is for. In finetuning it is an upper bound: all samples as long as
  `--train.max_seq_length`.

To add a measurement, run the command, then `python scripts/write_recipes.py --add OUT_DIR FILE --hardware "one RTX
4090"`, and open a pull request with the new file of `config_hub/measured` and this page.
"""
COLUMNS = "| command | hardware | planned memory | predicted time | measured |\n|---|---|---|---|---|\n"
END = """
`config_hub/measured` has the logs of the measurements. `python scripts/write_recipes.py` writes this page.
"""


class Recipe(NamedTuple):
    """A file of config_hub, from its comments: GPU memory in GB (None: CPU cores), and samples of one epoch."""

    file: str
    command: str
    memory_gb: int | None
    n_samples: int | None


def read_recipe(path: Path) -> Recipe:
    text = path.read_text()
    group = path.relative_to(HUB).parts[0]
    card = re.search(r"GPUs? with (\d+) GB", text)
    samples = re.search(r"on ([\d,]+) (?:instructions|pairs)", text)
    return Recipe(
        str(path.relative_to(ROOT)),
        "toolkit " + re.search(r"^#\s+toolkit (\w+ .*)$", text, re.M)[1],
        int(card[1]) if card else 24 if group == "data" else None,
        int(samples[1].replace(",", "")) if samples else None,
    )


def recipes() -> list[Recipe]:
    return [read_recipe(path) for group in GROUPS for path in sorted((HUB / group).rglob("*.yaml"))]


def plan(recipe: Recipe) -> tuple[str, str, str]:
    """Return hardware, planned memory and predicted time as `toolkit plan` computes them."""
    from toolkit_plan.plan import plan_run, run_args_of
    from toolkit_plan.predict import predict

    from toolkit.cli.parser import parse
    from toolkit.distributed.gpus import GPUS as SPECS
    from toolkit.planning.resolve import device_spec_of

    on_cpu = ["--accelerator", "cpu", "--devices", "1"] if recipe.memory_gb is None else []
    arguments = parse("plan", [*shlex.split(recipe.command)[1:], *on_cpu])
    with run_args_of(arguments["run"]) as args:
        planned = plan_run(args, device_spec_of(args, recipe.memory_gb))
        memory = f"{round(planned.memory.total / 1e9, 3):.2f} GB"  # rounded as in the output of plan
        if recipe.memory_gb is None:
            return "two CPU cores", memory, ""
        name = GPUS[recipe.memory_gb]
        prediction = predict(planned, SPECS[name])
        devices, batch = planned.config.devices, planned.config.batch
    steps = planned.config.steps
    if recipe.n_samples is not None:
        steps = round(recipe.n_samples * (args.train.epochs or 1) / batch.global_batch_size)
    nodes = f"{devices.num_nodes} nodes of " if devices.num_nodes > 1 else ""
    time = f"{duration(steps * prediction.seconds)} ({prediction.tokens_per_sec:,.0f} tokens/s)"
    return f"{nodes}{devices.devices} x {name}", memory, time


def duration(seconds: float) -> str:
    for unit, size in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}" if seconds < 1000 * size else f"{seconds / size:,.0f} {unit}"
    return f"{seconds:.0f} s"


def measurements() -> list[dict[str, Any]]:
    """Return the files of config_hub/measured, each with its path as ``path``."""
    paths = sorted(MEASURED.glob("*.json"))
    return [json.loads(path.read_text()) | {"path": str(path.relative_to(ROOT))} for path in paths]


def describe(measured: dict[str, Any], recipe: Recipe) -> str:
    figures = measured["figures"]
    parts = [duration(figures["seconds"]), f"{figures['tokens_per_sec']:,.0f} tokens/s"]
    parts += [f"{figures['peak_memory_gb']:.2f} GB"] if "peak_memory_gb" in figures else []
    parts += [f"{figures[key]:.3f} {text}" for key, text in QUALITIES.items() if key in figures][:1]
    added = measured["command"].removeprefix(recipe.command).strip()
    other = f"; with `{added}`" if added else ""
    return f"{', '.join(parts)}: {measured['hardware']}, [{measured['commit']}](../{measured['path']}){other}"


def rows_of(recipe: Recipe, planned: tuple[str, str, str], measured: list[dict[str, Any]]) -> str:
    hardware, memory, time = planned
    found = [describe(entry, recipe) for entry in measured if entry["file"] == recipe.file]
    last = "<br>".join(found) or "prediction"
    return f"| [`{recipe.command}`](../{recipe.file}) | {hardware} | {memory} | {time} | {last} |"


def render() -> str:
    """Return the page. Plans every file, which takes a minute."""
    page, measured = HEAD, measurements()
    for group, title in GROUPS.items():
        page += f"\n## {title}\n\n{COLUMNS}"
        for recipe in recipes():
            if recipe.file.startswith(f"config_hub/{group}/"):
                page += rows_of(recipe, plan(recipe), measured) + "\n"
    return page + END


def add(run_dir: Path, file: str, hardware: str, command: str | None, note: str) -> Path:
    """Write a measurement from the metrics of a finished run."""
    import torch

    with open(run_dir / "logs" / "metrics.csv", newline="") as stream:
        rows = [
            {name: round(float(row[name]), 4) for name in LOGGED if row.get(name)} for row in csv.DictReader(stream)
        ]
    first, last = rows[0], rows[-1]
    figures = {
        "seconds": round(last["seconds"], 1),
        "tokens": int(last["tokens"]),
        "tokens_per_sec": round((last["tokens"] - first["tokens"]) / (last["seconds"] - first["seconds"])),
    } | {name: last[name] for name in ("peak_memory_gb", "val_loss", "val_bpb") if name in last}
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    entry = {
        "file": file,
        "command": command or read_recipe(ROOT / file).command,
        "hardware": hardware,
        "commit": commit.stdout.strip(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        **({"note": note} if note else {}),
        "figures": figures,
        "log": [row for row in rows if "val_loss" in row],
    }
    MEASURED.mkdir(exist_ok=True)
    stem = "-".join([*Path(file).with_suffix("").parts[1:], re.sub(r"\W+", "-", hardware.lower())])
    path = MEASURED / f"{stem}.json"
    path.write_text(json.dumps(entry, indent=1) + "\n")
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--add", nargs=2, metavar=("RUN_DIR", "FILE"), help="add the measurements of a run")
    parser.add_argument("--hardware", help="with --add: device and number, such as 'one RTX 4090'")
    parser.add_argument("--command", help="with --add: the command, if not the file's")
    parser.add_argument("--note", default="", help="with --add: what else a reader should know")
    args = parser.parse_args()
    if args.add:
        if not args.hardware:
            parser.error("--add needs --hardware")
        print(add(Path(args.add[0]), args.add[1], args.hardware, args.command, args.note))
    PAGE.write_text(render())


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    os.chdir(ROOT)
    main()
