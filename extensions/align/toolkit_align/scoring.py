"""Metrics of the predictions of a validation, as scikit-learn and SciPy define them."""

import numpy as np


def prediction_metrics(scores: np.ndarray, targets: np.ndarray, problem_type: str) -> dict[str, float]:
    """Return accuracy (of several labels: all are right) and the macro mean of F1, or Spearman's rank correlation, the
    mean over numbers.

    Args:
        scores: (n, labels).
        targets: The label's index, (n, 1); for several labels 0 or 1 for each, or numbers, (n, labels).
    """
    if problem_type == "regression":
        return {"spearman": float(np.mean(list(map(spearman, scores.T, targets.T))))}
    if problem_type == "multi_label_classification":
        predicted, actual = scores > 0, targets > 0
        is_used = np.full(len(predicted[0]), True)
    else:
        labels = np.arange(scores.shape[1])
        predicted, actual = scores.argmax(1)[:, None] == labels, targets == labels
        is_used = (predicted | actual).any(0)
    accuracy = float((predicted == actual).all(1).mean())
    return {"accuracy": accuracy, "f1": macro_f1(predicted[:, is_used], actual[:, is_used])}


def macro_f1(predicted: np.ndarray, actual: np.ndarray) -> float:
    """Return the mean over labels of F1 = 2 tp / (2 tp + fp + fn); 0 for a label that nothing has.

    Args:
        predicted, actual: (n, labels) bool.
    """
    both, either = (predicted & actual).sum(0), predicted.sum(0) + actual.sum(0)
    return float((2 * both / np.maximum(either, 1)).mean())


def spearman(a: np.ndarray, b: np.ndarray) -> float:
    """Return Spearman's rank correlation of two vectors: nan if one is constant."""
    (variance_a, covariance), (_, variance_b) = np.cov(_ranks(a), _ranks(b), ddof=0)
    with np.errstate(invalid="ignore"):  # 0 / 0
        return float(covariance / np.sqrt(variance_a * variance_b))


def _ranks(values: np.ndarray) -> np.ndarray:
    """Return ranks from 1; equal values have their mean."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[inverse]
