"""Choose the strategy and the micro-batch of a run by estimated memory: if they are "auto", or for ``--preset``."""

import math
from collections.abc import Callable
from dataclasses import dataclass, is_dataclass, replace
from functools import cached_property
from operator import attrgetter
from typing import Literal

from toolkit.config import AUTO, none_if_auto
from toolkit.errors import UserError, option_text
from toolkit.models.config import ModelConfig
from toolkit.planning.auto import (
    MICRO_BATCH_SIZE,
    choose_by_rules,
    known_model,
    micro_batch_sizes,
    resolve_changes,
    user_strategy,
    with_reasons,
)
from toolkit.planning.resolve import DeviceSpec, ResolvedConfig, resolve_model
from toolkit.planning.run_args import Changes, RunArgs
from toolkit_plan.measure.inputs import memory_inputs
from toolkit_plan.measure.memory import plan_memory

MAX_SHARD_GRAD_OP_FRACTION, MAX_BATCH_MEMORY_FRACTION = 0.75, 0.85
"""Maximum fractions of device memory for SHARD_GRAD_OP and for a larger micro-batch. Memory is an estimate."""
MIN_EFFICIENT_TOKENS, MAX_TOKENS = 4_096, 65_536
"""Tokens per micro-batch: the minimum that keeps a GPU busy, and the maximum above which speed hardly improves."""
_SHARE = "a device's share of the global batch"
UNKNOWN = "if memory is unknown before the run"


def resolve_by_memory(args: RunArgs, devices: DeviceSpec) -> ResolvedConfig:
    """Resolve a run, and choose the options that are "auto" or that ``--preset`` sets."""
    args, model, length = resolve_model(args, devices)
    preset, candidates = args.preset, _Candidates(replace(args, preset="balanced"), devices, model, length)
    changes, reasons = candidates.fit_devices(is_speed=False)
    text = ""
    if preset != "balanced":
        balanced, reasons = changes, {}
        changes = candidates.fit_devices(is_speed=True)[0] if preset == "speed" else candidates.minimize_memory(changes)
        text = f"{preset}: {candidates.describe(changes, balanced)}"
    return replace(with_reasons(candidates.resolve(changes), reasons), preset=text)


def choose_accumulate(config: ResolvedConfig) -> Literal["unsharded", "sharded"]:
    """Return FSDP's gradient accumulation mode: sharded if unsharded gradients do not fit."""
    return "sharded" if device_bytes(config, config.model) > config.devices.memory else "unsharded"


def device_bytes(config: ResolvedConfig, model: ModelConfig | None) -> float:
    """Estimate the bytes per device; NaN for a user-provided module or optimizer, or an unknown vocabulary."""
    if model is None or config.args.module is not None or config.args.optimizer_class is not None:
        return math.nan
    return plan_memory(memory_inputs(config, model)).total


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
        return known_model(self.model, self.args)

    def resolve(self, changes: Changes) -> ResolvedConfig:
        return resolve_changes(self.args, self.devices, changes, self.complete_model)

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

        ``is_speed`` uses SHARD_GRAD_OP if it fits with a margin. On CUDA and with ``is_speed``, the micro-batch is the
        largest that fits with a margin. The others follow :func:`toolkit.planning.auto.choose_by_rules`.
        """
        args, devices, sizes, length = self.args, self.devices, self.micro_batch_sizes, self.length or 1
        changes, reasons = choose_by_rules(args, devices)
        size, strategy = changes.pop(MICRO_BATCH_SIZE, None), user_strategy(args)
        can_gather = devices.world_size > 1 and strategy in (None, "fsdp")
        if is_speed and can_gather and args.fsdp.sharding_strategy == args.fsdp.shard_size == AUTO:
            busy = next((size for size in sizes if size * length >= MIN_EFFICIENT_TOKENS), sizes[-1])
            fsdp: Changes = {} if strategy else {"strategy": "fsdp"}
            gathered = fsdp | {"fsdp.sharding_strategy": "SHARD_GRAD_OP"}
            room = MAX_SHARD_GRAD_OP_FRACTION * devices.memory
            if self.memory(gathered | {MICRO_BATCH_SIZE: busy}) <= room < math.inf:
                changes = gathered
        if size is None:
            return changes, reasons
        if devices.memory < math.inf and (devices.device == "cuda" or is_speed):
            stages = args.model_parallel.pipeline
            limit = _SHARE if stages == 1 else f"more would leave {stages} stages too few micro-batches"
            size, reasons[MICRO_BATCH_SIZE] = choose_size(
                lambda n: self.memory(changes | {MICRO_BATCH_SIZE: n}), sizes, size, length, devices.memory, limit
            )
        return changes | {MICRO_BATCH_SIZE: size}, reasons

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


def flags_of(changes: Changes, separator: str = " ") -> str:
    """Return changes as on the command line. What resets an option to "auto" or its default object has no flag."""
    named = {option: value for option, value in changes.items() if value != AUTO and not is_dataclass(value)}
    return separator.join(f"--{option} {option_text(value)}" for option, value in named.items())


def _gb(size: float) -> str:
    return f"{size / 1e9:,.1f} GB" if size >= 1e9 else f"{size / 1e9:.2g} GB"
