"""`toolkit doctor --prove`: compare every path that exists only for CUDA with its reference, in ten minutes."""

import math
import subprocess
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from toolkit.errors import CommandError, UserError, one_line
from toolkit.io.atomic import write_json
from toolkit_doctor.prove_kernels import KERNELS
from toolkit_doctor.prove_row import Machine, NotRunError, Row
from toolkit_doctor.prove_runs import RUNS

ROWS: list[Row] = [*KERNELS, *RUNS]


def prove(
    json_path: str | None = None, rows: Sequence[Row] = ROWS, device: str | None = None, seconds: float = 600
) -> None:
    """Print a table with one line per row.

    Args:
        json_path: File for the results: ``rows`` with name, compared, avoid, result ("held", "failed" or "not run"),
            figure, tolerance, reason and seconds.
        rows: The rows to run.
        device: "cpu" runs the rows there, to test them. None: CUDA; without it, no row is run.
        seconds: Rows that have not ended after this time are not run.

    Raises:
        CommandError: a row failed (exit code 1).
    """
    kind = device or ("cuda" if torch.cuda.is_available() else None)
    name = "no CUDA device" if kind is None else torch.cuda.get_device_name() if kind == "cuda" else kind
    print(f"Proof on {name}, torch {torch.__version__}\n{_line('row', 'difference', 'at most', 'result')}", flush=True)
    results = []
    with TemporaryDirectory(prefix="toolkit-") as folder:
        count = torch.cuda.device_count() if kind == "cuda" else 1
        machine = Machine(torch.device(kind or "cpu"), count, Path(folder), time.monotonic() + seconds)
        for row in rows:
            started_at = time.monotonic()
            outcome = _run(row, machine) if kind else {"result": "not run", "reason": "no CUDA device"}
            result = {"name": row.name, "compared": row.compared, "avoid": row.avoid, "figure": None, "tolerance": None,
                      "reason": "", **outcome, "seconds": round(time.monotonic() - started_at, 1)}  # fmt: skip
            results.append(result)
            print(_format(result), flush=True)
    counts = Counter(result["result"] for result in results)
    print(f"{counts['held']} held, {counts['failed']} failed, {counts['not run']} not run", flush=True)
    if json_path is not None:
        write_json(Path(json_path), {"device": name, "torch": torch.__version__, "rows": results})
    if failed := [result["name"] for result in results if result["result"] == "failed"]:
        raise CommandError(f"{len(failed)} of {len(rows)} rows failed: {'; '.join(failed)}")


def _run(row: Row, machine: Machine) -> dict[str, Any]:
    try:
        if time.monotonic() >= machine.deadline:
            raise NotRunError("no time left")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            figure, tolerance = row.run(machine)
        if not math.isfinite(figure):
            raise CommandError("the difference is not finite")
    except (NotRunError, UserError) as reason:
        return {"result": "not run", "reason": str(reason)}
    except subprocess.TimeoutExpired:
        return {"result": "not run", "reason": "no time left"}
    except Exception as error:  # a kernel or a compiler may raise anything; the other rows still run
        what = "" if isinstance(error, CommandError) else f"{type(error).__name__}: "
        return {"result": "failed", "reason": f"{what}{one_line(error)[:300]}"}
    return {"result": "held" if figure <= tolerance else "failed", "figure": figure, "tolerance": tolerance}


def _format(result: dict[str, Any]) -> str:
    text = f"FAILED: avoid with {result['avoid']}" if result["result"] == "failed" else result["result"]
    reason = f": {result['reason']}" if result["reason"] else ""
    numbers = ["" if result[name] is None else f"{result[name]:.2g}" for name in ("figure", "tolerance")]
    return _line(result["name"], *numbers, f"{text}{reason} [{result['compared']}]")


def _line(*cells: str) -> str:
    return "  {:26}{:>12}{:>10}  {}".format(*cells)
