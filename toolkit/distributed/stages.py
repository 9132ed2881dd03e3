"""Layers of each pipeline stage, and the stages of each rank. Does not import torch."""

STAGES_PER_RANK = {"1f1b": 1, "gpipe": 1, "interleaved": 2, "zbv": 2}


def stages_of(schedule: str, size: int, rank: int) -> list[int]:
    """Return the stages of a rank among the ``size`` ranks of a pipeline.

    Consecutive stages are on consecutive ranks. The stages of zbv go to the last rank and back to the first.
    """
    n_stages = size * STAGES_PER_RANK[schedule]
    return [rank, n_stages - 1 - rank] if schedule == "zbv" else list(range(rank, n_stages, size))


def layers_of(stage: int, n_stages: int, n_layer: int) -> range:
    """Return the layers of a stage. All stages have the same number of layers."""
    per_stage = n_layer // n_stages
    return range(stage * per_stage, (stage + 1) * per_stage)


def nearest_micro_batches(schedule: str, size: int, micro_batches: int) -> list[int]:
    """Return the nearest numbers of micro-batches per step that the schedule supports, at most and at least the given.

    interleaved runs rounds of equally many micro-batches, at least ``size`` each.
    """

    def works(n: int) -> bool:
        return n >= size and (schedule != "interleaved" or n % (n // size) == 0)

    below = next((n for n in range(micro_batches, 0, -1) if works(n)), None)
    above = next(n for n in range(max(micro_batches, 1), micro_batches + 2 * size + 1) if works(n))
    return sorted({n for n in (below, above) if n is not None})
