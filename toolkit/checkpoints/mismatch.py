"""Compare the names and shapes of tensors."""

from collections.abc import Mapping

from torch import Tensor

Shapes = Mapping[str, tuple[int, ...]]
"""Shapes by name."""


def find_mismatches(actual: Shapes, expected: Shapes) -> list[str]:
    """Describe each tensor that is missing, unknown or of another shape."""
    missing = [f"missing {name} {_shape(expected[name])}" for name in expected.keys() - actual.keys()]
    extra = [f"unknown {name} {_shape(actual[name])}" for name in actual.keys() - expected.keys()]
    mismatched = [
        f"{name} is {_shape(actual[name])}, not {_shape(expected[name])}"
        for name in expected.keys() & actual.keys()
        if actual[name] != expected[name]
    ]
    return sorted(missing) + sorted(extra) + sorted(mismatched)


def shapes_of(tensors: Mapping[str, Tensor]) -> Shapes:
    return {name: tensor.shape for name, tensor in tensors.items()}


def _shape(shape: tuple[int, ...]) -> str:
    return f"({', '.join(map(str, shape))})"
