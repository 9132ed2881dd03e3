"""Report what a run would do, for ``--dry_run``: sample rows, plan, and the files that it would write."""

import math
from collections.abc import Iterator

from toolkit.data.inspection import inspect_rows
from toolkit.distributed.device import count_devices, device_memory
from toolkit.planning.limits import build_intervals
from toolkit.training.data_reader import DataReader
from toolkit.training.launch import Launch
from toolkit.ui.tokens import print_inspection
from toolkit_plan.advice import advice_for
from toolkit_plan.plan import plan_resolved
from toolkit_plan.summary import format_plan, plan_summary

_SAMPLES = 3


def report_dry_run(run: Launch, reader: DataReader) -> None:
    """Read the first batch, and print the report.

    Raises:
        UserError: The batch could not be read.
    """
    reader.read()
    if reader.error is not None:
        reader.raise_error(None)
    run.display.close()
    tokenizer = run.data.tokenizer
    print("" if tokenizer is None else f"Tokenizer: {tokenizer.name}, {tokenizer.vocab_size:,} tokens\n")
    print_inspection(inspect_rows(run.data, _SAMPLES))
    config = run.config
    if run.spec.meta_model is not None and run.args.optimizer_class is None:
        plan = plan_resolved(run.args, config, run.data)
        memory, host_memory = round(config.devices.memory / 1e9, 1), device_memory("cpu") / 1e9
        known = memory if math.isfinite(memory) else None
        advice = [] if known is None else advice_for(plan, known, host_memory)
        print(f"\n{format_plan(plan_summary(plan, known, host_memory, advice))}")
    if run.world.world_size < (size := config.strategy.layout.world_size):
        assumed = "" if count_devices(config.device) != 0 else "; GPUs are assumed, --accelerator cpu plans without"
        print(f"\nRank 0 of {size} read its rows here; no other process was started{assumed}.")
    print("\n".join(["", *_describe_output(run), "", "Dry run: nothing was trained, and out_dir is unchanged."]))


def _describe_output(run: Launch) -> Iterator[str]:
    args, train, limits = run.args, run.args.train, run.limits
    intervals = build_intervals(train, args.eval, limits)
    due = [f"every {intervals.save_steps:,} steps"] if intervals.save_steps else []
    due += [f"every {intervals.save_seconds / 60:.3g} minutes"] if intervals.save_seconds else []
    kept = f"; the newest {train.keep_last} are kept" if train.keep_last else ""
    last_step = "" if limits.total_steps is None else f" after step {limits.total_steps:,}"
    outputs = {
        "logs/metrics.csv": f"one row per {train.log_interval:,} step(s), plotted in loss.png",
        "step-*/": "" if not due else " and ".join(due) + kept,
        "best/": "the checkpoint with the lowest validation loss" if train.keep_best else "",
        "final/": f"the model{last_step}",
        "profile/": "a trace of every rank" if args.profile else "",
        "loggers": "" if args.logger_name == "csv" else args.logger_name,
    }
    start = "a new run" if run.resume_from is None else f"resumed from {run.resume_from}"
    yield f"Would write to {args.out_dir} ({start}):"
    yield from (f"  {name:18}{text}" for name, text in outputs.items() if text)
