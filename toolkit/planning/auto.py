"""Resolve a run whose strategy and micro-batch size are "auto", or set by ``--preset``: choose by estimated memory."""

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, is_dataclass, replace
from functools import cached_property
from operator import attrgetter

from toolkit.config import AUTO, none_if_auto
from toolkit.distributed.stages import nearest_micro_batches
from toolkit.distributed.strategy import implied_strategy
from toolkit.errors import UserError, option_text
from toolkit.models.config import ModelConfig
from toolkit.planning.resolve import (
    DeviceSpec,
    ResolvedConfig,
    device_bytes,
    resolve,
    resolve_model,
    with_known_vocabulary,
)
from toolkit.planning.run_args import Changes, RunArgs, with_options

MAX_SHARD_GRAD_OP_FRACTION, MAX_BATCH_MEMORY_FRACTION = 0.75, 0.85
"""Maximum fractions of device memory for SHARD_GRAD_OP and for a larger micro-batch. Memory is an estimate."""
MIN_EFFICIENT_TOKENS, MAX_TOKENS = 4_096, 32_768
"""Tokens per micro-batch: the minimum that keeps a GPU busy, and the maximum above which speed does not improve."""
MIN_MICRO_BATCHES_PER_STAGE = 4
"""In a pipeline: stages wait for at most (p - 1) / (5p - 1) of a step, less than 20 %."""
MICRO_BATCH_SIZE = "train.micro_batch_size"
_SHARE = "a device's share of the global batch"
UNKNOWN = "if memory is unknown before the run"


def resolve_auto(args: RunArgs, devices: DeviceSpec) -> ResolvedConfig:
    """Resolve a run, and choose the options that are "auto" or that ``--preset`` sets.

    Each candidate is resolved with :func:`toolkit.planning.resolve.resolve`, for its memory.
    """
    args, model, length = resolve_model(args, devices)
    preset, candidates = args.preset, _Candidates(replace(args, preset="balanced"), devices, model, length)
    changes, reasons = candidates.fit_devices(is_speed=False)
    text = ""
    if preset != "balanced":
        balanced, reasons = changes, {}
        changes = candidates.fit_devices(is_speed=True)[0] if preset == "speed" else candidates.minimize_memory(changes)
        text = f"{preset}: {candidates.describe(changes, balanced)}"
    config = candidates.resolve(changes)
    reasons = {option: f"auto: {reason}" for option, reason in reasons.items()}
    strategy = replace(config.strategy, reason=reasons.get("strategy", config.strategy.reason))
    return replace(config, strategy=strategy, reasons=reasons, preset=text)


@dataclass(frozen=True)
class _Candidates:
    """Values for the options that a run leaves open, chosen by the memory of the run that has them.

    Args:
        args: The options; those with the command's default may change.
        model: The architecture, which may lack the vocabulary size; None for a user-provided module.
        length: Tokens of the longest row; None if unknown.
    """

    args: RunArgs
    devices: DeviceSpec
    model: ModelConfig | None
    length: int | None

    @cached_property
    def complete_model(self) -> ModelConfig | None:
        with suppress(UserError):
            return None if self.model is None else with_known_vocabulary(self.model, self.args)
        return None

    def resolve(self, changes: Changes) -> ResolvedConfig:
        return resolve(with_options(self.args, changes), self.devices, lambda: self.complete_model)

    def refusal(self, changes: Changes) -> str:
        """Return why the run would be refused with these changes; "" if it would not."""
        try:
            self.resolve(changes)
        except UserError as error:
            return str(error).partition(";")[0]
        return ""

    def memory(self, changes: Changes) -> float:
        """Return the bytes per device with these changes; infinity if the run would be refused.

        NaN for user-provided modules and optimizers, and if the data defines the vocabulary.
        """
        try:
            return device_bytes(self.resolve(changes), self.complete_model)
        except UserError:
            return math.inf

    @cached_property
    def micro_batch_sizes(self) -> list[int]:
        size = none_if_auto(self.args.train.micro_batch_size)
        return micro_batch_sizes(self.args, self.devices.world_size) if size is None else [size]

    def fit_devices(self, *, is_speed: bool) -> tuple[Changes, dict[str, str]]:
        """Choose the strategy and the micro-batch if they are "auto"; return the changes, and the reasons by option.

        The strategy is fsdp, or ddp if the other options do not support fsdp. ``is_speed`` uses SHARD_GRAD_OP if it
        fits with a margin. On CUDA and with ``is_speed``, the micro-batch is the largest that fits with a margin.
        """
        args, devices, sizes, length = self.args, self.devices, self.micro_batch_sizes, self.length or 1
        is_auto = args.train.micro_batch_size == AUTO
        has_choice = is_auto and devices.memory < math.inf and (devices.device == "cuda" or is_speed)
        default = max((size for size in sizes if size <= args.defaults.micro_batch_size), default=sizes[0])
        user_strategy = implied_strategy(args.fsdp, args.ddp) if args.strategy == AUTO else args.strategy
        is_distributed, reasons = devices.world_size > 1, {}
        strategy: Changes = {"strategy": "fsdp"} if is_distributed and user_strategy is None else {}
        can_gather = is_distributed and user_strategy in (None, "fsdp")
        if is_speed and can_gather and args.fsdp.sharding_strategy == args.fsdp.shard_size == AUTO:
            busy = next((size for size in sizes if size * length >= MIN_EFFICIENT_TOKENS), sizes[-1])
            gathered = strategy | {"fsdp.sharding_strategy": "SHARD_GRAD_OP"}
            room = MAX_SHARD_GRAD_OP_FRACTION * devices.memory
            if self.memory(gathered | {MICRO_BATCH_SIZE: busy}) <= room < math.inf:
                strategy = gathered
        size = {MICRO_BATCH_SIZE: default}
        ddp = {"strategy": "ddp"}
        refusal = self.refusal(size | strategy) if strategy == {"strategy": "fsdp"} else ""
        if refusal and not self.refusal(size | ddp):
            strategy, reasons["strategy"] = ddp, refusal
        if has_choice:
            stages = args.model_parallel.pipeline
            limit = _SHARE if stages == 1 else f"more would leave {stages} stages too few micro-batches"
            size[MICRO_BATCH_SIZE], reasons[MICRO_BATCH_SIZE] = choose_size(
                lambda n: self.memory(strategy | {MICRO_BATCH_SIZE: n}), sizes, default, length, devices.memory, limit
            )
        elif is_auto:
            where = UNKNOWN if devices.device == "cuda" else f"on {devices.device}"
            reasons[MICRO_BATCH_SIZE] = f"up to {args.defaults.micro_batch_size} {where}"
        return strategy | (size if is_auto else {}), reasons

    def minimize_memory(self, changes: Changes) -> Changes:
        """Return ``changes`` with those added, one after the other, that lower the memory.

        If the memory is unknown, add all with which the run would not be refused.
        """
        sizes = [
            {MICRO_BATCH_SIZE: n} for n in self.micro_batch_sizes[::-1] if n <= self.args.defaults.micro_batch_size
        ]
        sharded = {"fsdp.accumulate": "sharded"}
        alternatives: list[list[Changes]] = [
            [{"train.activation_checkpointing": "full"}],
            [{"strategy": "ddp"}] if "strategy" in changes else [],
            [{"fsdp.sharding_strategy": "FULL_SHARD"}] if self.devices.num_nodes > 1 else [],
            [*sizes, sharded, *(size | sharded for size in sizes)],
        ]
        least = self.memory(changes)
        for variants in alternatives:
            start = changes
            for variant in variants:
                if all(attrgetter(option)(self.args) in (AUTO, "none") for option in variant):
                    total = self.memory(start | variant)
                    if total < least or math.isnan(total):
                        changes, least = start | variant, total
        return changes

    def describe(self, changes: Changes, balanced: Changes) -> str:
        """Describe the changes of a preset, and the memory with them and with the preset "balanced"."""
        if not changes:
            return "nothing to change"
        memory, total = "memory unknown for this model", self.memory(changes)
        if total < math.inf:
            memory = f"about {_gb(total)} per device, {_gb(self.memory(balanced))} by default"
        return f"{flags_of(changes, ', ')} ({memory})"


def choose_size(
    memory_of: Callable[[int], float], sizes: list[int], default: int, length: int, memory: float, limit: str = _SHARE
) -> tuple[int, str]:
    """Return the largest micro-batch size that fits with a margin, up to :data:`MAX_TOKENS`, and the reason.

    If none fits, return the smallest size. If the memory is unknown, return ``default``.

    Args:
        memory_of: Returns the bytes that a size takes, see :meth:`_Candidates.memory`.
        sizes: The sizes, smallest first.
        default: The command's default size.
        length: Tokens per sequence.
        memory: Bytes of a device.
        limit: Why there is no larger size.
    """
    room = MAX_BATCH_MEMORY_FRACTION * memory
    possible: dict[int, float] = {}
    for size in sizes:
        if possible and size * length > MAX_TOKENS:
            break
        # after one that is too large only the last, which accumulates nothing
        is_tried = size == sizes[-1] or max(possible.values(), default=0) <= room
        if is_tried and (total := memory_of(size)) < math.inf:
            possible[size] = total
    if not possible:
        return default, f"up to {default} {UNKNOWN}"  # or the run is refused
    size = max((size for size in possible if possible[size] <= room), default=min(possible))
    larger = next((other for other in possible if other > size), None)
    takes = f"takes {_gb(possible[size])}"
    if possible[size] > room:
        return size, f"{takes}; no size takes at most {MAX_BATCH_MEMORY_FRACTION:.0%} of {_gb(memory)}"
    if larger is not None:
        return size, f"{takes}; {larger} would take more than {MAX_BATCH_MEMORY_FRACTION:.0%} of {_gb(memory)}"
    if size < sizes[-1] and sizes[-1] * length > MAX_TOKENS:
        limit = f"{size * length:,} tokens"
    return size, f"{limit}; {takes} of {_gb(memory)}"


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


def flags_of(changes: Changes, separator: str = " ") -> str:
    """Return changes as on the command line. What resets an option to "auto" or its default object has no flag."""
    named = {option: value for option, value in changes.items() if value != AUTO and not is_dataclass(value)}
    return separator.join(f"--{option} {option_text(value)}" for option, value in named.items())


def _gb(size: float) -> str:
    return f"{size / 1e9:,.1f} GB" if size >= 1e9 else f"{size / 1e9:.2g} GB"
