"""Compare the first steps of a user's run on its layout and on one process (N3 layout-independent-training)."""

from collections.abc import Sequence
from typing import NamedTuple

from toolkit_doctor.gradients import StepRecord

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


def compare(record: StepRecord, reference: StepRecord) -> Difference:
    """Return the difference of two records of the same step."""
    scale = reference.grad_norm
    by_name = {
        name: _relative(record.gradients.get(name, 0.0), norm, scale) for name, norm in reference.gradients.items()
    }
    parameter = max(by_name, key=by_name.__getitem__)
    return Difference(
        loss=_relative(record.loss, reference.loss),
        grad_norm=_relative(record.grad_norm, scale),
        gradient=by_name[parameter],
        logged_norm=_relative(record.logged_norm, reference.logged_norm),
        parameter=parameter,
    )


def choose_tolerance(reference: Sequence[StepRecord], splits: Sequence[Sequence[StepRecord]]) -> Difference:
    """Return the tolerance of N3: twice the largest difference between ``reference`` and ``splits``, at least 1e-5.

    ``splits`` are the steps of ``reference`` on one process with other micro-batch sizes: none in fp32.
    """
    differences = [compare(a, b) for split in splits for a, b in zip(split, reference, strict=True)]
    loss, grad_norm, gradient = (
        max([FP32_TOLERANCE, *(2 * getattr(each, name) for each in differences)]) for name in Difference._fields[:3]
    )
    return Difference(loss, grad_norm, gradient, LOGGED_NORM_TOLERANCE)


def choose_splits(global_batch_size: int, micro_batch_size: int) -> list[int]:
    """Return two other micro-batch sizes to compare with: the next smaller sizes, or larger sizes if there are none."""
    sizes = [size for size in range(1, global_batch_size + 1) if global_batch_size % size == 0]
    others = [size for size in sizes if size != micro_batch_size]
    return sorted(others, key=lambda size: (size > micro_batch_size, abs(size - micro_batch_size)))[:2]


def _relative(value: float, reference: float, scale: float | None = None) -> float:
    if value == reference:  # also if both are infinite, as in a step that the fp16 GradScaler skips
        return 0.0
    scale = abs(reference) if scale is None else scale
    return abs(value - reference) / scale if scale else float("inf")
