"""Choose strategy and micro-batch size by estimated memory, if they are "auto" or ``--preset`` sets them.

Pure functions of the options, the devices and the memory estimates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from typing import TYPE_CHECKING, Any, Literal

from toolkit.config import AUTO, none_if_auto
from toolkit.distributed.mesh import Layout
from toolkit.distributed.stages import nearest_micro_batches
from toolkit.distributed.strategy import StrategyPlan, implied_strategy
from toolkit.planning.compatibility import ROWS, Row
from toolkit.planning.facts import Facts

if TYPE_CHECKING:
    from toolkit.planning.run_args import RunArgs

MAX_SHARD_GRAD_OP_FRACTION, MAX_BATCH_MEMORY_FRACTION = 0.75, 0.85
"""Maximum fractions of device memory for SHARD_GRAD_OP and for a larger micro-batch. Memory is an estimate."""
MIN_EFFICIENT_TOKENS, MAX_TOKENS = 4_096, 32_768
"""Tokens per micro-batch: the minimum that keeps a GPU busy, and the maximum above which speed does not improve."""
MIN_MICRO_BATCHES_PER_STAGE = 4
"""In a pipeline: stages wait for at most (p - 1) / (5p - 1) of a step, less than 20 %."""
MICRO_BATCH_SIZE = "train.micro_batch_size"
_SHARE = "a device's share of the global batch"
UNKNOWN = "if memory is unknown before the run"

Changes = dict[str, Any]
"""New values by option, such as ``{"train.micro_batch_size": 8}``."""
MemoryEstimate = Callable[["RunArgs"], float]
"""Returns a run's bytes per device; NaN if unknown before the run, infinity if the run would be refused."""


@dataclass(frozen=True)
class AutoChoices:
    """Run options with values chosen for "auto".

    Args:
        args: The options.
        reasons: Reason for each chosen value, by option, for display.
        preset: The changes of ``--preset``, for display.
    """

    args: RunArgs
    reasons: Mapping[str, str] = field(default_factory=dict)
    preset: str = ""


def choose_options(args: RunArgs, devices: Any, length: int | None, estimate: MemoryEstimate) -> AutoChoices:
    """Choose the strategy and the micro-batch if they are "auto", and the options that ``--preset`` sets.

    The strategy is fsdp, or ddp if the other options do not support fsdp. The preset "speed" uses SHARD_GRAD_OP if it
    fits with a margin. On CUDA and with "speed", the micro-batch is the largest that fits with a margin. The preset
    "memory" takes the combination with the least memory. Only options that have the command's default are changed.

    Args:
        devices: The devices of the run, a :class:`toolkit.planning.resolve.DeviceSpec`.
        length: Tokens of the longest row; None if unknown.
        estimate: Estimates the memory of variants of ``args``.
    """
    name, args = args.preset, replace(args, preset="balanced")
    world_size, is_speed = devices.devices * devices.num_nodes, name == "speed"
    user_size, strategies = none_if_auto(args.train.micro_batch_size), _strategies(args, world_size, is_speed)
    if name == "memory":
        return _minimize_memory(args, world_size, devices.num_nodes, estimate)
    if user_size is not None and strategies == [{}]:
        return AutoChoices(args, preset="speed: nothing to change" if is_speed else "")
    sizes = _sizes(args, world_size) if user_size is None else [user_size]
    default = max((size for size in sizes if size <= args.defaults.micro_batch_size), default=sizes[0])
    has_choice = user_size is None and length is not None and (devices.device == "cuda" or is_speed)
    busy = next((size for size in sizes if size * (length or 1) >= MIN_EFFICIENT_TOKENS), sizes[-1])

    def need(strategy: Changes, size: int) -> float:
        return estimate(with_options(args, strategy | {MICRO_BATCH_SIZE: size}))

    reasons, strategy, size = {}, strategies[-1], default
    if len(strategies) > 1:
        tried = busy if has_choice else default
        if (gathered := need(strategies[0], tried)) <= MAX_SHARD_GRAD_OP_FRACTION * devices.memory < math.inf:
            strategy = strategies[0]
            reasons["strategy"] = (
                f"it takes {_gb(gathered)}, at most {MAX_SHARD_GRAD_OP_FRACTION:.0%} of {_gb(devices.memory)}"
            )
    if strategy.get("strategy") == "fsdp" and need(strategy, default) == math.inf != need({"strategy": "ddp"}, default):
        strategy, reasons["strategy"] = {"strategy": "ddp"}, _why_not_fsdp(args)
    if has_choice and devices.memory < math.inf:
        by_size = {size: need(strategy, size) for size in sizes}
        stages = args.model_parallel.pipeline
        limit = _SHARE if stages == 1 else f"more would leave {stages} stages too few micro-batches"
        size, reasons[MICRO_BATCH_SIZE] = choose_size(by_size, default, length or 1, devices.memory, limit)
    elif user_size is None:
        where = UNKNOWN if devices.device == "cuda" else f"on {devices.device}"
        reasons[MICRO_BATCH_SIZE] = f"up to {args.defaults.micro_batch_size} {where}"
    changes = strategy | ({MICRO_BATCH_SIZE: size} if user_size is None else {})
    if name == "balanced":
        return AutoChoices(
            with_options(args, changes), {option: f"auto: {reason}" for option, reason in reasons.items()}
        )
    return AutoChoices(
        with_options(args, changes), preset=_describe(name, changes, need(strategy, size), estimate(args))
    )


def choose_size(
    memory_by_size: Mapping[int, float], default: int, length: int, memory: float, limit: str = _SHARE
) -> tuple[int, str]:
    """Return the largest micro-batch size that fits with a margin, up to :data:`MAX_TOKENS`, and the reason.

    If none fits, return the smallest size. If the memory is unknown, return ``default``.

    Args:
        memory_by_size: Bytes by micro-batch size, smallest size first, see :data:`MemoryEstimate`.
        default: The command's default size.
        length: Tokens per sequence.
        memory: Bytes of a device.
        limit: Why there is no larger size.
    """
    possible = {size: total for size, total in memory_by_size.items() if total < math.inf}
    if not possible:
        return default, f"up to {default} {UNKNOWN}"  # or the run is refused
    room = MAX_BATCH_MEMORY_FRACTION * memory
    short = [size for size in possible if size * length <= MAX_TOKENS] or [min(possible)]
    size = max((size for size in short if possible[size] <= room), default=min(possible))
    larger = next((other for other in possible if other > size), None)
    takes = f"takes {_gb(possible[size])}"
    if possible[size] > room:
        return size, f"{takes}; no size takes at most {MAX_BATCH_MEMORY_FRACTION:.0%} of {_gb(memory)}"
    if larger is None:
        return size, f"{limit}; {takes} of {_gb(memory)}"
    if larger not in short:
        return size, f"{size * length:,} tokens; {takes} of {_gb(memory)}"
    return size, f"{takes}; {larger} would take more than {MAX_BATCH_MEMORY_FRACTION:.0%} of {_gb(memory)}"


def _why_not_fsdp(args: RunArgs) -> str:
    with_ddp = _violated_rows(args, "ddp")
    reasons = (message for row, message in _violated_rows(args, "fsdp").items() if row not in with_ddp)
    return next(reasons, "fsdp does not support the other options").partition(";")[0]


def _violated_rows(args: RunArgs, kind: Literal["fsdp", "ddp"]) -> dict[Row, str]:
    """Return the rows of the table that the options violate under a strategy, with their messages."""
    plan = StrategyPlan(kind, None, Layout(shard=2), "")
    needs_unsharded = getattr(args.optimizer_class, "needs_unsharded", False)
    facts = Facts(args, none_if_auto(args.precision) or "", strategy=plan, needs_unsharded=needs_unsharded)
    return {row: row.message(facts) for row in ROWS if row.applies(facts)}


def _strategies(args: RunArgs, world_size: int, is_speed: bool) -> list[Changes]:
    """Return the strategy changes to try, fastest first. An empty change keeps the current strategy."""
    user_strategy = implied_strategy(args.fsdp, args.ddp) if args.strategy == AUTO else args.strategy
    gathers = is_speed and world_size > 1 and args.fsdp.sharding_strategy == args.fsdp.shard_size == AUTO
    if user_strategy is not None or world_size == 1:
        return [{"fsdp.sharding_strategy": "SHARD_GRAD_OP"}, {}] if gathers and user_strategy == "fsdp" else [{}]
    gathered = [{"strategy": "fsdp", "fsdp.sharding_strategy": "SHARD_GRAD_OP"}] if gathers else []
    return [*gathered, {"strategy": "fsdp"}]


def _sizes(args: RunArgs, world_size: int) -> list[int]:
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


# ---- preset memory


def _minimize_memory(args: RunArgs, world_size: int, num_nodes: int, estimate: MemoryEstimate) -> AutoChoices:
    """Return the combination with the least memory. If memory is unknown, return the one with the most changes."""
    sizes, default = _sizes(args, world_size), args.defaults.micro_batch_size
    choices: dict[str, list[Any]] = {
        MICRO_BATCH_SIZE: [size for size in sizes if size <= default],
        "train.activation_checkpointing": ["none", "full"],
        "strategy": ["fsdp", "ddp"] if _strategies(args, world_size, False) != [{}] else [],
        "fsdp.sharding_strategy": [AUTO, "FULL_SHARD"] if num_nodes > 1 else [],
        "fsdp.accumulate": [AUTO, "sharded"],
    }
    usual = {MICRO_BATCH_SIZE: AUTO, "train.activation_checkpointing": "none"}
    free = {option: values for option, values in choices.items() if _get(args, option) == usual.get(option, AUTO)}
    free = {option: values for option, values in free.items() if values}
    variants: list[tuple[float, int, Changes]] = []
    for values in product(*free.values()):
        changes = {o: v for o, v in zip(free, values, strict=True) if v != _get(args, o)}
        total = estimate(with_options(args, changes))
        if total < math.inf:
            variants.append((total, len(changes), changes))
        elif math.isnan(total):  # prefer the variant that runs with the most changes
            variants.append((math.inf, -len(changes), changes))
    if not variants:
        return AutoChoices(args)  # resolving raises the error
    total, _, changes = min(variants, key=lambda each: (each[0], each[1], each[2].get(MICRO_BATCH_SIZE, 0)))
    return AutoChoices(with_options(args, changes), preset=_describe("memory", changes, total, estimate(args)))


def _get(args: RunArgs, option: str) -> Any:
    group, _, name = option.rpartition(".")
    return getattr(getattr(args, group) if group else args, name)


def with_options(args: RunArgs, changes: Changes) -> RunArgs:
    """Return a copy of ``args`` with the changes applied."""
    for option, value in changes.items():
        group, _, name = option.rpartition(".")
        args = replace(args, **({group: replace(getattr(args, group), **{name: value})} if group else {name: value}))
    return args


def _describe(name: str, changes: Changes, total: float, default: float) -> str:
    flags = ", ".join(f"--{option} {value}" for option, value in changes.items()) or "nothing to change"
    if not total < math.inf:
        return f"{name}: {flags} (memory unknown for this model)"
    return f"{name}: {flags} (about {_gb(total)} per device, {_gb(default)} by default)"


def _gb(size: float) -> str:
    return f"{size / 1e9:,.1f} GB" if size >= 1e9 else f"{size / 1e9:.2g} GB"
