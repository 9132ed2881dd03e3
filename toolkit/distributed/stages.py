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


def activations_in_flight(schedule: str, size: int, micro_batches: int) -> tuple[float, float, float]:
    """Return how many micro-batches' activations the first, second and last rank hold at most, for all their layers."""
    first, second, last = {
        "1f1b": (size, size - 1, 1),
        "gpipe": (micro_batches, micro_batches, micro_batches),
        # warm-up passes of one of two stages, and the next one
        "interleaved": ((3 * size - 1) / 2, (3 * size - 3) / 2, (size + 1) / 2),
        # the weights' gradients wait, and what they need with them; the factors fit simulated steps
        "zbv": (1.3 * size, 1.5 * size, 1.5 * size),
    }[schedule]
    return min(first, micro_batches), min(second, micro_batches), min(last, micro_batches)


def describe_stages(schedule: str, size: int, n_layer: int, micro_batches: int) -> str:
    """Return the stages and the least idle time: ``4 stages of 8 layers, 1f1b, idle for at least 27 % of a step``."""
    n_stages = size * STAGES_PER_RANK[schedule]
    text = f"{n_stages} stages of {n_layer // n_stages} layers, {schedule}"
    if schedule == "zbv":
        return text
    work = micro_batches * STAGES_PER_RANK[schedule]  # in passes of a stage, of which size - 1 are waited for
    return f"{text}, idle for at least {(size - 1) / (work + size - 1):.0%} of a step".replace("%", " %")
