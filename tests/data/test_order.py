import numpy as np
import pytest

from toolkit.data.order import shuffled_index


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 16, 17, 100, 257, 4096, 4097])
def test_every_epoch_is_a_permutation(n):
    rows = shuffled_index(np.arange(3 * n), n, seed=7).reshape(3, n)
    for epoch in rows:
        assert sorted(epoch) == list(range(n))


def test_order_differs_by_epoch_and_by_seed():
    n = 1000
    first, second = shuffled_index(np.arange(2 * n), n, seed=0).reshape(2, n)
    other_seed = shuffled_index(np.arange(n), n, seed=1)
    for other in (second, other_seed, np.arange(n)):
        assert (first == other).sum() < 10  # about one match is expected by chance


def test_shuffled_index_is_pure_and_vectorized():
    positions = np.array([[0, 999, 1000], [12345, 5, 0]])
    together = shuffled_index(positions, 1000, seed=3)
    assert together.shape == positions.shape and together.dtype == np.int64
    assert together.tolist() == [[shuffled_index(int(p), 1000, seed=3) for p in row] for row in positions]


def test_order_is_stable_across_versions():
    """A resume with a newer version must read the same rows: these numbers must never change."""
    assert shuffled_index(np.arange(12), 10, seed=42).tolist() == [2, 7, 3, 4, 5, 0, 8, 6, 9, 1, 1, 2]


def test_any_seed_and_large_positions():
    n = 10**12
    far = shuffled_index(np.array([n * 5 + 3, n - 1]), n, seed=-5)
    assert ((far >= 0) & (far < n)).all()
    assert shuffled_index(0, n, seed=2**70) != shuffled_index(0, n, seed=2**70 + 1)


def test_shuffle_has_no_pattern():
    n = 10_000
    rows = shuffled_index(np.arange(n), n, seed=11)
    assert abs(np.corrcoef(np.arange(n), rows)[0, 1]) < 0.05
    assert abs(np.corrcoef(rows[:-1], rows[1:])[0, 1]) < 0.05
    zero_positions = [shuffled_index(np.arange(8), 8, seed=s).tolist().index(0) for s in range(800)]
    assert np.bincount(zero_positions, minlength=8).min() > 60  # 100 each on average


def test_no_rows_is_an_error():
    with pytest.raises(ValueError, match="0 rows"):
        shuffled_index(0, 0, seed=0)
