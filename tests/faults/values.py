"""All values that a run has written, by name: tensors, numbers and texts of a checkpoint, and cells of metrics.csv."""

import csv
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from toolkit.checkpoints.adapters import ADAPTERS
from toolkit.checkpoints.run.sharded import read_sharded
from toolkit.checkpoints.weights import load_state, load_weights

MEASURED = ("mfu", "peak_memory_gb", "seconds", "slowest_rank", "metrics_crc")
"""Columns and numbers that differ between equal runs, as do times in seconds and speeds, see :func:`is_measured`."""


def is_measured(name: str) -> bool:
    return name in MEASURED or name.endswith(("_s", "tokens_per_sec"))


def leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield (path, value) of all that is no container, and of empty containers."""
    if isinstance(value, dict | list | tuple) and value:
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(inner, f"{name} {key}")
    else:
        yield name, value


def values_of(folder: Path) -> dict[str, Any]:
    """Return all values of a checkpoint but the time. The order of keys does not matter."""
    weights = load_state(folder / ADAPTERS) if (folder / ADAPTERS).exists() else load_weights(folder)
    found, trainer = dict(leaves(weights, "weights")), folder / "trainer"
    for path in sorted(trainer.glob("*.pth")):
        found |= leaves(load_state(path), path.name)
    if (trainer / "optimizer").is_dir():
        found |= leaves(read_sharded(trainer / "optimizer"), "shards")
    meta = json.loads((trainer / "meta.json").read_text())
    return found | dict(leaves({name: value for name, value in meta.items() if not is_measured(name)}, "meta.json"))


def metrics_of(out: Path) -> dict[str, str]:
    """Return all cells of metrics.csv, as text, but measurements; a step has a row."""
    with open(out / "logs" / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    names = [name for name in (rows[0] if rows else ()) if not is_measured(name)]
    return {f"metrics.csv row {i}, {name}": row[name] for i, row in enumerate(rows) for name in names}


def is_same(a: Any, b: Any) -> bool:
    """Whether two values have the same type and are equal bit for bit; NaN equals NaN."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    return a == b or (isinstance(a, float) and math.isnan(a) and math.isnan(b))


def require_same(seen: dict[str, Any], expected: dict[str, Any]) -> None:
    """Require the same names and values."""
    names = sorted(seen.keys() ^ expected.keys())
    assert not names, f"{len(names)} values are in one run only, such as {names[0]}"
    different = sorted(name for name in seen if not is_same(seen[name], expected[name]))
    if different:
        pair = [shown(values[different[0]]) for values in (seen, expected)]
        raise AssertionError(f"{len(different)} values differ, such as {different[0]}: {' instead of '.join(pair)}")


def shown(value: Any) -> str:
    return f"a tensor {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"{value!r:.60}"
