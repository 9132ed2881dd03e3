"""Compare runs: the columns of metrics.csv, and the weights or adapters of ``final``."""

import csv
import shutil
from pathlib import Path

import torch

from toolkit.checkpoints.adapters import ADAPTERS
from toolkit.checkpoints.weights import load_state, load_weights


def column(run: Path, name: str) -> list[float]:
    with open(run / "logs" / "metrics.csv", newline="") as file:
        return [float(row[name]) for row in csv.DictReader(file) if row[name]]


def losses(run: Path) -> list[float]:
    return column(run, "loss")


def relative(a: list[float], b: list[float]) -> float:
    """Return the largest relative difference of two curves."""
    assert len(a) == len(b) >= 4
    return max(abs(x - y) / abs(y) for x, y in zip(a, b, strict=True))


def trained(run: Path) -> dict[str, torch.Tensor]:
    """Return the adapters of a run, or its weights."""
    adapters = run / "final" / ADAPTERS
    return load_state(adapters) if adapters.exists() else load_weights(run / "final")


def require_same(run: Path, reference: Path) -> None:
    """Compare losses and final weights bit for bit."""
    assert losses(run) == losses(reference)
    weights, expected = trained(run), trained(reference)
    assert weights.keys() == expected.keys() and all(torch.equal(weights[name], expected[name]) for name in weights)


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
