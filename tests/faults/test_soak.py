"""What the soak sees: growing memory, threads or files."""

import pytest

from tests.faults.soak import Sample, require_flat, trial


def samples(**growth: float) -> list[Sample]:
    """Thirty minutes with a warm-up, and a thread and two files that come and go."""
    flat = {"mib": 800.0, "threads": 7.0, "files": 50.0}
    return [
        Sample(t, *(v + growth.get(k, 0) * t + t % 3 + 20 * (t < 5) for k, v in flat.items())) for t in range(1, 31)
    ]


@pytest.mark.parametrize(("name", "per_minute"), [("mib", 1.2), ("threads", 0.5), ("files", 0.5)])
def test_growth_is_seen(name, per_minute):
    require_flat(samples(), 1.0)
    with pytest.raises(AssertionError, match="memory grows by" if name == "mib" else f"{name} grow from"):
        require_flat(samples(**{name: per_minute}), 1.0)


@pytest.mark.slow
def test_a_callback_that_keeps_tensors_is_seen(tmp_path):
    with pytest.raises(AssertionError, match="memory grows by"):
        trial("streamed", 0, tmp_path, "--callbacks", "helpers.faulty_callbacks.Leak")
