"""Choose the compiler if ``--compiler`` is "auto": pure functions of the resolved run."""

from toolkit.config import AUTO
from toolkit.extension import load_single, registered
from toolkit.planning.resolve import ResolvedConfig


def choose_compiler(config: ResolvedConfig) -> tuple[str, str]:
    """Return the compiler of a run, and the reason if ``--compiler`` is "auto".

    On CUDA it is torch if all rows have the same length, and if the planner predicts that the gain exceeds the time to
    compile. On a CPU nothing is compiled: the gain was 7 % at most, after hundreds of steps.
    """
    if config.args.compiler != AUTO:
        return config.args.compiler, ""
    against = next((reason for reason, holds in _uncompiled(config).items() if holds), None)
    if against is not None:
        return "none", f"auto: {against}"
    planner = load_single("planner")
    choice = None if planner is None else planner.choose_compiler(config)
    return choice or ("torch", f"auto: rows of one length{'' if config.limits else '; not for a short run'}")


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
