"""Compare the first steps of a user's run on its layout and on one process (N3 layout-independent-training)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from toolkit.config import Precision
from toolkit.diagnostics.gradients import StepRecord

FP32_TOLERANCE = 1e-5
"""Relative tolerance of N3."""

LOGGED_NORM_TOLERANCE = 0.05
"""Loose, because the logged norm is summed in fp32. The norm of a single rank's gradient would differ by more."""


class Difference(NamedTuple):
    """Relative differences between two records of one step; the second record is the reference.

    Args:
        loss: Difference of the losses.
        grad_norm: Difference of the gradient norms.
        gradient: Largest difference of a parameter's gradient norm, relative to the global gradient norm, because a
            gradient near zero consists of rounding errors.
        logged_norm: Difference of the gradient norms that the runs log and use for clipping.
        parameter: The parameter with the largest difference.
    """

    loss: float
    grad_norm: float
    gradient: float
    logged_norm: float = 0.0
    parameter: str = ""

    def exceeding_values(self, tolerance: Difference) -> list[str]:
        """Return the names of the values that exceed the tolerance."""
        return [
            name for name in VALUES if not getattr(self, name) <= getattr(tolerance, name)
        ]  # NaN counts as exceeding


VALUES = ("loss", "grad_norm", "gradient", "logged_norm")


def compare(record: StepRecord, reference: StepRecord) -> Difference:
    """Return the difference of two records of the same step."""
    by_name = {
        name: _relative(record.gradients.get(name, 0.0), norm, reference.grad_norm)
        for name, norm in reference.gradients.items()
    }
    parameter = max(by_name, key=by_name.__getitem__)
    return Difference(
        loss=_relative(record.loss, reference.loss, abs(reference.loss)),
        grad_norm=_relative(record.grad_norm, reference.grad_norm, reference.grad_norm),
        gradient=by_name[parameter],
        logged_norm=_relative(record.logged_norm, reference.logged_norm, reference.logged_norm),
        parameter=parameter,
    )


def choose_tolerance(
    precision: Precision, reference: Sequence[StepRecord], splits: Sequence[Sequence[StepRecord]]
) -> Difference:
    """Return the tolerance of N3: 1e-5 in fp32. In 16 bits, return twice the largest difference between ``reference``
    and ``splits``, at least 1e-5.

    ``splits`` are the steps of ``reference`` on one process with other micro-batch sizes.
    """
    if precision == "32-true":
        return Difference(FP32_TOLERANCE, FP32_TOLERANCE, FP32_TOLERANCE, LOGGED_NORM_TOLERANCE)
    differences = [compare(a, b) for split in splits for a, b in zip(split, reference, strict=True)]

    def twice_the_largest(name: str) -> float:
        return max([FP32_TOLERANCE, *(2 * getattr(each, name) for each in differences)])

    loss, grad_norm, gradient = map(twice_the_largest, ("loss", "grad_norm", "gradient"))
    return Difference(loss, grad_norm, gradient, LOGGED_NORM_TOLERANCE)


def choose_splits(global_batch_size: int, micro_batch_size: int) -> list[int]:
    """Return two other micro-batch sizes to compare with: the next smaller sizes, or larger sizes if there are none."""
    sizes = [size for size in range(1, global_batch_size + 1) if global_batch_size % size == 0]
    smaller = [size for size in reversed(sizes) if size < micro_batch_size]
    larger = [size for size in sizes if size > micro_batch_size]
    return (smaller + larger)[:2]


def _relative(value: float, reference: float, scale: float) -> float:
    if value == reference:  # also if both are infinite, as in a step that the fp16 GradScaler skips
        return 0.0
    return abs(value - reference) / scale if scale else float("inf")
