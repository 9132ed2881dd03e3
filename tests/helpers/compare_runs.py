"""Compare runs: the columns of metrics.csv, and the weights or adapters of ``final``."""

import csv
import shutil
from pathlib import Path

import torch

from toolkit.checkpoints.adapters import ADAPTERS
from toolkit.checkpoints.weights import load_state, load_weights
from toolkit.ui.loggers import read_metrics


def rows_of(run: Path) -> list[dict[str, str]]:
    with open(run / "logs" / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file))


def column(run: Path, name: str) -> list[float]:
    return [float(row[name]) for row in rows_of(run) if row[name]]


def losses(run: Path) -> list[float]:
    return column(run, "loss")


def curve(run: str | Path) -> list[dict[str, float]]:
    """Return the rows of metrics.csv without times and memory."""
    skipped = ("second", "step_s", "update_s", "wait", "slowest", "tokens_per_sec", "memory", "mfu")
    rows = read_metrics(Path(run, "logs", "metrics.csv"))
    return [{k: v for k, v in row.items() if not any(part in k for part in skipped)} for row in rows]


def relative(a: list[float], b: list[float]) -> float:
    """Return the largest relative difference of two curves."""
    assert len(a) == len(b) >= 4
    return max(abs(x - y) / abs(y) for x, y in zip(a, b, strict=True))


def trained(run: Path, name: str = "final") -> dict[str, torch.Tensor]:
    """Return the adapters of a run, or its weights."""
    adapters = run / name / ADAPTERS
    return load_state(adapters) if adapters.exists() else load_weights(run / name)


def assert_same_weights(a: Path, b: Path) -> None:
    """Compare the weights or adapters of two checkpoints bit for bit."""
    first, second = (trained(folder.parent, folder.name) for folder in (a, b))
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(first[name], second[name]), name


def differs(values: torch.Tensor, reference: torch.Tensor) -> float:
    """Return the largest difference, relative to the largest reference value."""
    return float((values - reference).abs().max() / reference.abs().max())


def require_same(run: Path, reference: Path) -> None:
    """Compare losses and final weights bit for bit."""
    assert losses(run) == losses(reference)
    assert_same_weights(run / "final", reference / "final")


def require_close(run: Path, reference: Path, atol: float = 0.0) -> dict[str, torch.Tensor]:
    """Compare losses (1e-5) and final weights (2e-4 of their norm, and ``atol``). Return the weights."""
    assert relative(losses(run), losses(reference)) < 1e-5
    weights, expected = trained(run), trained(reference)
    names = weights.keys() & expected.keys()
    assert len(names) >= max(len(weights), len(expected)) - 1  # a folder of shards has one name of tied weights
    for name in names:
        assert (weights[name] - expected[name]).norm() <= 2e-4 * expected[name].norm() + atol, name
    return weights


def copy_without(run: Path, target: Path, *later: str) -> None:
    """Copy a run as it was before the checkpoints ``later``."""
    shutil.copytree(run, target)
    for name in later:
        shutil.rmtree(target / name, ignore_errors=True)
