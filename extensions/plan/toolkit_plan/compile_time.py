"""Choose the compiler of a run on a GPU by the seconds that it saves."""

import math

from toolkit.distributed.gpus import GPUS, GpuSpec, gpu_of_driver
from toolkit.planning.resolve import ResolvedConfig
from toolkit.ui.formats import format_seconds
from toolkit_plan.measure.inputs import memory_inputs
from toolkit_plan.measure.micro_step import micro_step_seconds
from toolkit_plan.measure.sample import one_layer_of_each_kind

COMPILE_S, COMPILE_LAYER_S = 5.0, 0.9
"""Seconds to compile a kind of block, and per layer. On an H100 the first step of GPT-2 (12 layers) took 16 s, and 25 s
with 1.1B parameters (22 layers)."""


def choose_compiler(config: ResolvedConfig) -> tuple[str, str] | None:
    """Return torch if the predicted gain exceeds the time to compile, and the reason; None if it cannot be predicted.

    The steps count the complete run, so a resumed run makes the same choice.
    """
    gpu = gpu_of_driver(config.devices.gpu)
    saved, model = _saved_seconds(config, gpu or GPUS["A100"]), config.model
    if model is None or saved is None:
        return None
    _, kinds = one_layer_of_each_kind(model, n_first=0, n_last=0)
    needed = COMPILE_S * len(kinds) + COMPILE_LAYER_S * model.n_layer
    reason = f"compilation takes about {format_seconds(needed)} and saves about {format_seconds(saved)}"
    return ("torch" if saved > needed else "none"), f"auto: {reason}{'' if gpu else ' on an A100'}"


def _saved_seconds(config: ResolvedConfig, gpu: GpuSpec) -> float | None:
    """Return the seconds that compilation saves in a run; None if they cannot be predicted."""
    model, steps, minutes = config.model, config.steps, config.args.train.max_time
    if model is None or (steps is None and minutes is None):
        return None
    inputs = memory_inputs(config, model)
    try:
        eager, compiled = (micro_step_seconds(inputs, is_compiled, gpu) for is_compiled in (False, True))
    except Exception:  # operators that cannot be counted without a GPU; a prediction must not end the run
        return None
    run = math.inf if steps is None else steps * config.batch.accumulation * eager
    return min(run, math.inf if minutes is None else 60 * minutes) * (1 - compiled / eager)
