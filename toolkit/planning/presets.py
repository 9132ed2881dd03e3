"""``--preset``: the options that trade memory for speed, chosen in one word from the memory of the run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Any

from toolkit.errors import UserError
from toolkit.models.lora import adapted_on_meta
from toolkit.planning.memory import plan_memory
from toolkit.planning.setup import with_known_vocabulary

if TYPE_CHECKING:
    from toolkit.planning.run_args import RunArgs
    from toolkit.planning.setup import TrainingSetup

ROOM = 0.8
"""Share of a device's memory that the preset "speed" fills: the formulas are estimates."""


def apply_preset(
    args: RunArgs,
    devices: Any,
    resolve: Callable[..., Any],
    setup_of: Callable[..., TrainingSetup],
) -> tuple[RunArgs, str]:
    """Return the options with those that the preset sets, and what it has set, for the log.

    "memory" takes the combination that needs the least; "speed" the one with ddp, else with SHARD_GRAD_OP, and with the
    largest micro-batch that fits. Only options that are as the command has them by default are set: a value that the
    user gave counts as not given where it is the default.

    Args:
        args: Of the run.
        devices: Of the run, a :class:`toolkit.planning.resolve.DeviceSpec`.
        resolve, setup_of: Of :mod:`toolkit.planning.resolve`.
    """
    name, args = args.preset, replace(args, preset="balanced")
    found = []
    for changes in _combinations(name, args, devices):
        try:
            found.append((changes, resolve(_changed(args, changes), devices)))
        except UserError:  # the run would be refused
            continue
    needs = _memory_of([config for _, config in found], setup_of)
    candidates = [(changes, c.batch.micro_batch_size, need) for (changes, c), need in zip(found, needs, strict=True)]
    if not candidates:
        return args, ""  # resolving says why
    default = next((total for changes, _, total in candidates if not changes), None)
    if name == "memory":  # where nothing is known of it, every change
        chosen = min(candidates, key=lambda c: (-len(c[0]), c[1]) if c[2] is None else (c[2], len(c[0])))
    else:
        fits = [c for c in candidates if c[2] is not None and c[2] <= ROOM * devices.memory < float("inf")]
        chosen = max(fits, key=_speed, default=({}, 0, default))
    changes, _, total = chosen
    return _changed(args, changes), _describe(name, changes, total, default)


def _speed(candidate: tuple[dict[str, Any], int, float | None]) -> tuple[bool, bool, int]:
    changes, micro_batch_size, _ = candidate
    return "strategy" in changes, "fsdp.sharding_strategy" in changes, micro_batch_size


def _combinations(name: str, args: RunArgs, devices: Any) -> list[dict[str, Any]]:
    """Return the changes to try, by option."""
    world_size, default = devices.devices * devices.num_nodes, args.defaults.micro_batch_size
    per_device = args.train.global_batch_size // world_size
    sizes = [size for size in range(1, per_device + 1) if per_device % size == 0]
    choices: dict[str, list[Any]]
    if name == "memory":
        choices = {
            "train.micro_batch_size": [default, *(size for size in sizes if size < default)],
            "train.activation_checkpointing": ["none", "full"],
            "fsdp.sharding_strategy": ["HYBRID_SHARD", "FULL_SHARD"] if devices.num_nodes > 1 else [],
            "fsdp.accumulate": ["auto", "sharded"],
        }
    else:
        choices = {
            "train.micro_batch_size": [default, *(size for size in sizes if size > default)],
            "strategy": ["auto", "ddp"] if world_size > 1 else [],
            "fsdp.sharding_strategy": ["HYBRID_SHARD", "SHARD_GRAD_OP"] if world_size > 1 else [],
        }
    free = {option: values for option, values in choices.items() if values and _get(args, option) == values[0]}
    combinations = (dict(zip(free, values, strict=True)) for values in product(*free.values()))
    return [{o: value for o, value in each.items() if value != free[o][0]} for each in combinations]


def _get(args: RunArgs, option: str) -> Any:
    group, _, name = option.rpartition(".")
    return getattr(getattr(args, group) if group else args, name)


def _changed(args: RunArgs, changes: dict[str, Any]) -> RunArgs:
    for option, value in changes.items():
        group, _, name = option.rpartition(".")
        args = replace(args, **({group: replace(getattr(args, group), **{name: value})} if group else {name: value}))
    return args


def _memory_of(configs: list[Any], setup_of: Callable[..., TrainingSetup]) -> list[float | None]:
    """Return the bytes that each needs on a device; None for models and vocabularies that are not known yet."""
    args = configs[0].args if configs else None
    if args is None or configs[0].model is None or args.optimizer_class is not None:
        return [None] * len(configs)
    try:
        model = with_known_vocabulary(configs[0].model, args)
    except UserError:
        return [None] * len(configs)
    built = adapted_on_meta(model, args.lora)
    return [plan_memory(setup_of(config, model), built).total for config in configs]


def _describe(name: str, changes: dict[str, Any], total: float | None, default: float | None) -> str:
    chosen = ", ".join(f"--{option} {value}" for option, value in changes.items()) or "nothing to change"
    if total is None:
        return f"{name}: {chosen} (the memory of this model is not known)"
    before = f", {default / 1e9:.3g} GB by default" if default is not None and changes else ""
    return f"{name}: {chosen} (about {total / 1e9:.3g} GB per device{before})"
