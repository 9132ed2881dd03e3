"""Choose the compiler if ``--compiler`` is "auto": pure functions of the resolved run."""

import math

from toolkit.config import AUTO
from toolkit.distributed.gpus import GPUS, GpuSpec, gpu_of_driver
from toolkit.extension import registered
from toolkit.measure.micro_step import micro_step_seconds
from toolkit.measure.sample import one_layer_of_each_kind
from toolkit.planning.resolve import ResolvedConfig, memory_inputs
from toolkit.ui.formats import format_seconds

COMPILE_S, COMPILE_LAYER_S = 5.0, 0.9
"""Seconds to compile a kind of block, and per layer. On an H100 the first step of GPT-2 (12 layers) took 16 s, and 25 s
with 1.1B parameters (22 layers)."""


def choose_compiler(config: ResolvedConfig) -> tuple[str, str]:
    """Return the compiler of a run, and the reason if ``--compiler`` is "auto".

    On CUDA it is torch if all rows have the same length and the predicted gain exceeds the time to compile. On a CPU
    nothing is compiled: the gain was 7 % at most, after hundreds of steps. The steps count the complete run, so a
    resumed run makes the same choice.
    """
    if config.args.compiler != AUTO:
        return config.args.compiler, ""
    against = next((reason for reason, holds in _uncompiled(config).items() if holds), None)
    if against is not None:
        return "none", f"auto: {against}"
    gpu = gpu_of_driver(config.devices.gpu)
    saved, model = _saved_seconds(config, gpu or GPUS["A100"]), config.model
    if model is None or saved is None:
        return "torch", f"auto: rows of one length{'' if config.limits else '; not for a short run'}"
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


def _uncompiled(config: ResolvedConfig) -> dict[str, bool]:
    """Return whether the run has each property for which auto does not compile, by description."""
    args, strategy = config.args, config.strategy
    return {
        f"on {config.device}": config.device != "cuda",
        "a user-provided model": args.module is not None,
        "an extension's model": config.model is not None and config.model.family in registered("families"),
        f"--strategy {strategy.extension}": strategy.extension is not None,
        f"--quantize {args.quantize}": args.quantize is not None,
        "--fsdp.cpu_offload true": strategy.offloads,
        f"--pipeline_parallel_size {args.pipeline_parallel_size}": args.pipeline_parallel_size > 1,
        f"--fsdp.auto_wrap {args.fsdp.auto_wrap}": strategy.kind == "fsdp" and args.fsdp.auto_wrap != "block",
        "rows differ in length": config.is_ragged,
    }
