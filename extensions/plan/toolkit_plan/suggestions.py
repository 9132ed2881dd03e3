"""Suggest settings that make a run faster on a GPU, ranked by the predicted gain."""

import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from operator import attrgetter
from typing import NamedTuple, get_args

from toolkit.config import AUTO, ActivationCheckpointing
from toolkit.distributed.gpus import GpuSpec
from toolkit.errors import UserError
from toolkit.planning.auto import MICRO_BATCH_SIZE, micro_batch_sizes
from toolkit.planning.run_args import Changes, with_options
from toolkit_plan.advice import Step, apply_steps
from toolkit_plan.by_memory import MAX_BATCH_MEMORY_FRACTION
from toolkit_plan.plan import RunPlan, plan_run
from toolkit_plan.predict import Prediction, predict


class Suggestion(NamedTuple):
    """A change of flags, and its predicted relative gain in speed (0.1: 10 % faster)."""

    change: str
    gain: float
    prediction: Prediction


def suggestions(plan: RunPlan, gpu: GpuSpec, prediction: Prediction) -> list[Suggestion]:
    """Return helpful changes, best first; if several are compatible, the last entry combines them.

    Changes must fit in GPU memory with the margin of "auto", or need no more memory than now, and may change the result
    only by rounding.
    """
    plan = replace(plan, args=plan.config.args)  # what was chosen for "auto" stays

    def cost(changed: RunPlan) -> float:
        return 1 / predict(changed, gpu).tokens_per_sec if changed.memory.total <= _room(plan) else math.inf

    alone = [applied for step in _STEPS for applied in apply_steps([step], plan, cost)]
    alone.sort(key=lambda applied: cost(applied.plan))
    together = apply_steps([applied.step for applied in alone], plan, cost)
    changes = [(applied.text, applied.plan) for applied in alone]
    if len(together) > 1:
        changes.append((" ".join(applied.text for applied in together), together[-1].plan))
    predictions = [(text, predict(changed, gpu)) for text, changed in changes]
    return [Suggestion(text, new.tokens_per_sec / prediction.tokens_per_sec - 1, new) for text, new in predictions]


def _room(plan: RunPlan) -> float:
    """Return the bytes that a changed run may take: as many as "auto", or as this run if it takes more and fits."""
    limit = plan.config.devices.memory
    return min(limit, max(MAX_BATCH_MEMORY_FRACTION * limit, plan.memory.total))


def _as_auto(option: str, value_of: Callable[[RunPlan], str], slow: str) -> Step:
    """Return a step that sets an option to what auto would choose, in place of a ``slow`` value."""

    def step(plan: RunPlan) -> Iterator[Changes]:
        if value_of(plan) == slow:
            value = value_of(plan_run(with_options(plan.args, {option: AUTO}), plan.config.devices, plan.rows))
            if value != slow:
                yield {option: value}

    return step


def _micro_batch(plan: RunPlan) -> list[Changes]:
    """Return the largest two sizes that fit."""
    devices, fitting = plan.config.devices, []
    for size in micro_batch_sizes(plan.args, devices.world_size):
        changes = {MICRO_BATCH_SIZE: size}
        if size > plan.config.batch.micro_batch_size:
            with suppress(UserError):  # the run would raise this
                if plan_run(with_options(plan.args, changes), devices, plan.rows).memory.total > _room(plan):
                    break
                fitting.append(changes)
    return fitting[-2:]


def _less_recomputation(plan: RunPlan) -> Iterator[Changes]:
    """Return the modes that recompute less; the others would only take time to trace."""
    modes = get_args(ActivationCheckpointing)
    for mode in modes[: modes.index(plan.args.train.activation_checkpointing)]:
        yield {"train.activation_checkpointing": mode}


def _strategy(plan: RunPlan) -> list[Changes]:
    """Switch between ddp and fsdp, if the options support both."""
    strategy = plan.config.strategy
    if strategy.extension is not None or strategy.offloads:
        return []
    return [{"strategy": "ddp"}, {"fsdp.sharding_strategy": "SHARD_GRAD_OP"}, {"strategy": "fsdp"}]


_STEPS: tuple[Step, ...] = (
    _as_auto("precision", attrgetter("config.precision"), "32-true"),
    _as_auto("compiler", lambda plan: plan.compiler[0], "none"),
    _micro_batch,
    _less_recomputation,
    _strategy,
)
