"""Resolve a run with values of "auto": by fixed rules, and by the planner's estimates where memory decides."""

import math
from contextlib import suppress
from dataclasses import replace
from typing import Literal

from toolkit.config import AUTO, none_if_auto
from toolkit.distributed.stages import nearest_micro_batches
from toolkit.distributed.strategy import implied_strategy
from toolkit.errors import UserError
from toolkit.extension import load_single, require_single
from toolkit.models.config import ModelConfig
from toolkit.planning.meta_model import model_of
from toolkit.planning.planner import is_small
from toolkit.planning.resolve import DeviceSpec, ResolvedConfig, resolve, resolve_model, with_known_vocabulary
from toolkit.planning.run_args import Changes, RunArgs, with_options

MICRO_BATCH_SIZE = "train.micro_batch_size"
MIN_MICRO_BATCHES_PER_STAGE = 4
"""In a pipeline: stages wait for at most (p - 1) / (5p - 1) of a step, less than 20 %."""


def resolve_auto(args: RunArgs, devices: DeviceSpec) -> ResolvedConfig:
    """Resolve a run, and choose the options that are "auto" or that ``--preset`` sets.

    The planner chooses those that depend on memory, see :class:`toolkit.planning.planner.Planner`.
    """
    if args.preset != "balanced":
        return require_single("planner", f"--preset {args.preset}").resolve_by_memory(args, devices)
    has_choice = args.train.micro_batch_size == AUTO and devices.device == "cuda" and devices.memory < math.inf
    if has_choice and (planner := load_single("planner")) is not None:
        return planner.resolve_by_memory(args, devices)
    args = resolve_model(args, devices)[0]
    changes, reasons = choose_by_rules(args, devices)
    return with_reasons(resolve_changes(args, devices, changes), reasons)


def choose_by_rules(args: RunArgs, devices: DeviceSpec) -> tuple[Changes, dict[str, str]]:
    """Choose the strategy and the micro-batch if they are "auto"; return the changes, and the reasons by option.

    The strategy is fsdp, or ddp if the other options do not support fsdp. The micro-batch has the command's size, or
    the next smaller one that divides a device's share of the global batch.
    """
    size = none_if_auto(args.train.micro_batch_size)
    sizes = micro_batch_sizes(args, devices.world_size) if size is None else [size]
    limit = args.defaults.micro_batch_size
    micro_batch: Changes = {MICRO_BATCH_SIZE: max((size for size in sizes if size <= limit), default=sizes[0])}
    strategy: Changes = {}
    reasons = {}
    if devices.world_size > 1 and user_strategy(args) is None:
        strategy = {"strategy": "fsdp"}
        refusal, ddp = _refusal(args, devices, micro_batch | strategy), {"strategy": "ddp"}
        if refusal and not _refusal(args, devices, micro_batch | ddp):
            strategy, reasons["strategy"] = ddp, refusal
    if size is not None:
        return strategy, reasons
    where = "without a planner" if devices.memory < math.inf else "if memory is unknown before the run"
    reasons[MICRO_BATCH_SIZE] = f"up to {limit} {where if devices.device == 'cuda' else f'on {devices.device}'}"
    return strategy | micro_batch, reasons


def user_strategy(args: RunArgs) -> str | None:
    """Return the strategy that the user's options set or imply; None if they do neither."""
    return implied_strategy(args.fsdp, args.ddp) if args.strategy == AUTO else args.strategy


def _refusal(args: RunArgs, devices: DeviceSpec, changes: Changes) -> str:
    """Return why the run would be refused with these changes; "" if it would not."""
    try:
        resolve(with_options(args, changes), devices)
    except UserError as error:
        return str(error).partition(";")[0]
    return ""


def resolve_changes(
    args: RunArgs, devices: DeviceSpec, changes: Changes, model: ModelConfig | None = None
) -> ResolvedConfig:
    """Resolve a run with these changes. ``model`` is the architecture with its vocabulary size, if that is known."""
    config = resolve(with_options(args, changes), devices)
    return replace(config, accumulate=choose_accumulate(config, model))


def with_reasons(config: ResolvedConfig, reasons: dict[str, str]) -> ResolvedConfig:
    reasons = {option: f"auto: {reason}" for option, reason in reasons.items()}
    strategy = replace(config.strategy, reason=reasons.get("strategy", config.strategy.reason))
    return replace(config, strategy=strategy, reasons=reasons)


def choose_accumulate(config: ResolvedConfig, model: ModelConfig | None) -> Literal["unsharded", "sharded"]:
    """Return FSDP's gradient accumulation mode: as requested, or by the planner.

    Unsharded if memory cannot be estimated: unknown device memory or vocabulary, a user-provided module or optimizer.
    Also if the gradients are smaller than the estimate is precise.
    """
    args, memory = config.args, config.devices.memory
    if args.fsdp.accumulate != AUTO:
        return args.fsdp.accumulate
    strategy = config.strategy
    # the schedule of a pipeline reduces gradients once per step
    accumulates = strategy.kind == "fsdp" and config.batch.accumulation > 1 and strategy.layout.pipeline == 1
    if not accumulates or args.lora is not None or strategy.offloads or memory == math.inf:
        return "unsharded"
    model = model or known_model(config.model, args)
    planner = None if model is None or is_small(model_of(model, None), config.devices) else load_single("planner")
    return "unsharded" if planner is None else planner.choose_accumulate(replace(config, model=model))


def known_model(model: ModelConfig | None, args: RunArgs) -> ModelConfig | None:
    """Return the architecture with the vocabulary size; None if that is unknown, and for a user-provided module."""
    with suppress(UserError):
        return None if model is None else with_known_vocabulary(model, args)
    return None


def micro_batch_sizes(args: RunArgs, world_size: int) -> list[int]:
    """Return the micro-batch sizes that divide a device's share of the global batch; 1 if the share is uneven.

    With a pipeline only those that leave several micro-batches per stage, if possible.
    """
    per_device, rest = divmod(args.train.global_batch_size, world_size // args.model_parallel.world_size)
    sizes = [1] if rest else [size for size in range(1, per_device + 1) if per_device % size == 0]
    stages, schedule = args.model_parallel.pipeline, args.pipeline.schedule
    if stages == 1 or rest:
        return sizes
    valid = [n for n in sizes if nearest_micro_batches(schedule, stages, per_device // n) == [per_device // n]]
    many = [n for n in valid if per_device // n >= MIN_MICRO_BATCHES_PER_STAGE * stages]
    return many or valid[:1] or sizes[:1]
