import numpy as np

from toolkit.data.sft.prepare_sft import best_fit


def test_best_fit_selects_the_fullest_row_with_room():
    assert best_fit(np.array([5, 4, 3, 3]), 8) == [[0, 2], [1, 3]]  # 5 + 3, then 4 + 3: not 5, 4 + 3, 3
    assert best_fit(np.array([8, 1, 7]), 8) == [[0], [1, 2]]
    assert best_fit(np.array([], dtype=np.int64), 8) == []


def test_every_sample_is_packed_once_and_no_row_overflows():
    rng = np.random.default_rng(0)
    for capacity in (1, 7, 64, 2048):
        lengths = np.minimum(rng.geometric(0.01, size=2000), capacity)
        rows = best_fit(lengths, capacity)
        assert sorted(sample for row in rows for sample in row) == list(range(2000))
        assert max(lengths[row].sum() for row in rows) <= capacity
        assert len(rows) <= np.ceil(11 / 9 * np.ceil(lengths.sum() / capacity)) + 1
        assert rows == best_fit(lengths, capacity) == sorted(rows)
