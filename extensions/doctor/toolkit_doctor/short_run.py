"""Arguments of short runs, whose first steps are compared with another run (``Launch.is_short``)."""

from dataclasses import replace

from toolkit.config import AUTO, DDPArgs, EvalArgs, FSDPArgs, LogArgs, ProfilerArgs
from toolkit.planning.run_args import RunArgs


def short_run_args(args: RunArgs, steps: int, out_dir: str) -> RunArgs:
    """Return the arguments of the first ``steps`` optimizer steps of a run.

    Model, data, batch, precision, strategy and optimizer do not change. The learning rate is at its peak from the first
    step, so the weights change. There are no validations, checkpoints, loggers, samples or profiles. ``out_dir`` is an
    empty folder for callbacks that write there.
    """
    train = replace(
        args.train, max_steps=steps, max_tokens=None, epochs=None, max_time=None, lr_schedule="constant", min_lr=AUTO,
        lr_warmup_steps=0, lr_warmup_fraction=None, save_interval=0, save_every_minutes=None, keep_best=False,
        patience=None, log_interval=1, async_save=False,
    )  # fmt: skip
    return replace(
        args, train=train, eval=EvalArgs(interval=0, final_validation=False), out_dir=out_dir, staging_dir=None,
        resume=False, logger_name="csv", log=LogArgs(), fsdp=replace(args.fsdp, state_dict_type="full"),
        profile=False, profiler=ProfilerArgs(),
    )  # fmt: skip


def single_process_args(args: RunArgs, micro_batch_size: int | None = None) -> RunArgs:
    """Return the arguments of the run on one device, optionally with another micro-batch size."""
    train = args.train if micro_batch_size is None else replace(args.train, micro_batch_size=micro_batch_size)
    return replace(
        args, train=train, devices=1, num_nodes=1, strategy="auto", fsdp=FSDPArgs(), ddp=DDPArgs(), timeout=AUTO,
        tensor_parallel_size=1, context_parallel_size=1, pipeline_parallel_size=1,
    )  # fmt: skip
