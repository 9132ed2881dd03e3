"""Choose the compiler if ``--compiler`` is "auto": pure functions of the resolved run."""

from toolkit.config import AUTO, TrainArgs
from toolkit.data.base import DataModule
from toolkit.data.mixture import Mixture
from toolkit.extension import registered
from toolkit.planning.resolve import ResolvedConfig

MIN_STEPS, MIN_MINUTES = 100, 10
"""Minimum run length that repays about a minute of compilation. Estimates, not measured on CUDA."""


def choose_compiler(config: ResolvedConfig, *, is_ragged: bool, steps: int | None) -> tuple[str, str]:
    """Return the compiler of a run, and the reason if ``--compiler`` is "auto".

    On CUDA it is torch if all rows have the same length and the run is long. On a CPU nothing is compiled: the gain was
    7 % at most, after hundreds of steps. ``steps`` counts the complete run, so a resumed run makes the same choice.
    """
    if config.args.compiler != AUTO:
        return config.args.compiler, ""
    minutes = config.args.train.max_time
    reasons = {
        f"on {config.device}": config.device != "cuda",
        **_uncompiled(config),
        "rows differ in length": is_ragged,
        f"{steps} steps are too few to repay compilation": steps is not None and steps <= MIN_STEPS,
        f"--train.max_time {minutes} is too short to repay compilation": minutes is not None and minutes < MIN_MINUTES,
    }
    against = next((reason for reason, holds in reasons.items() if holds), None)
    if against is not None:
        return "none", f"auto: {against}"
    return "torch", "auto: rows of one length" + ("" if steps is None else f", {steps:,} steps")


def _uncompiled(config: ResolvedConfig) -> dict[str, bool]:
    """Return whether the run uses each feature that auto does not compile, by description."""
    args, strategy = config.args, config.strategy
    family = "" if config.model is None else config.model.family
    return {
        "a user-provided model": args.module is not None,
        "an extension's model": family in registered("families"),
        f"--strategy {strategy.extension}": strategy.extension is not None,
        "--strategy fsdp1": strategy.engine == "fsdp1",
        f"--quantize {args.quantize}": args.quantize is not None,
        "--fsdp.cpu_offload true": strategy.offloads,
        f"--pipeline_parallel_size {args.pipeline_parallel_size}": args.pipeline_parallel_size > 1,
        f"--fsdp.auto_wrap {args.fsdp.auto_wrap}": strategy.kind == "fsdp" and args.fsdp.auto_wrap != "block",
    }


def planned_steps(train: TrainArgs, seq_length: int) -> int | None:
    """Return the optimizer steps set by max_steps and max_tokens; None without either. Does not read the data."""
    by_tokens = None if train.max_tokens is None else -(-train.max_tokens // (train.global_batch_size * seq_length))
    return min((steps for steps in (train.max_steps, by_tokens) if steps is not None), default=None)


def has_ragged_rows(data: DataModule) -> bool:
    """Whether a data module has rows of different lengths, as instruction data does. Does not read the data."""
    modules = data.modules.values() if isinstance(data, Mixture) else [data]
    return any(hasattr(module, "packing") for module in modules)
