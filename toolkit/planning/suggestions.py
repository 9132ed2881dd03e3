"""Suggest settings that make a run faster on a GPU, ranked by the predicted gain."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple, get_args

from toolkit.config import AUTO, ActivationCheckpointing
from toolkit.errors import UserError
from toolkit.measure.gpus import GpuSpec
from toolkit.planning.auto import MAX_BATCH_MEMORY_FRACTION, MICRO_BATCH_SIZE, Changes, flags_of, with_options
from toolkit.planning.plan import RunPlan, plan_run
from toolkit.planning.predict import Prediction, predict
from toolkit.planning.resolve import choose_precision
from toolkit.planning.run_args import RunArgs

MIN_GAIN = 0.02
"""Predicted gains below this are noise."""


Change = tuple[str, RunArgs]
"""Flags, and the run's options with them."""


class Suggestion(NamedTuple):
    """A change of flags, and its predicted relative gain in speed (0.1: 10 % faster)."""

    change: str
    gain: float
    prediction: Prediction


def suggestions(plan: RunPlan, gpu: GpuSpec, prediction: Prediction) -> list[Suggestion]:
    """Return helpful changes, best first; if several are compatible, the last entry combines them.

    Changes must fit in GPU memory with a margin, and may change the result only by rounding.
    """
    helpful = []
    for change in _CHANGES:
        best = _best(change, plan, gpu, prediction)
        if best is not None:
            helpful.append((change, best[0]))
    helpful.sort(key=lambda item: -item[1].gain)
    together, texts = plan, []
    for change, _ in helpful:
        best = _best(change, together, gpu, prediction if together is plan else predict(together, gpu))
        if best is not None:
            texts.append(best[0].change)
            together = best[1]
    result = [suggestion for _, suggestion in helpful]
    if len(texts) > 1:
        last = predict(together, gpu)
        result.append(Suggestion(" ".join(texts), _gain(last, prediction), last))
    return result


def _best(
    change: Callable[[RunPlan], Iterator[Change]], plan: RunPlan, gpu: GpuSpec, prediction: Prediction
) -> tuple[Suggestion, RunPlan] | None:
    """Return the fastest variant of a change that fits; None if no variant fits and is faster by ``MIN_GAIN``."""
    best = None
    for text, args in change(plan):
        try:
            changed = plan_run(args, plan.config.devices)
            if not _fits(changed, plan):
                continue
            predicted = predict(changed, gpu)
        except UserError:  # the run would raise this, or the speed cannot be predicted
            continue
        suggestion = Suggestion(text, _gain(predicted, prediction), predicted)
        if suggestion.gain > (best[0].gain if best else MIN_GAIN):
            best = suggestion, changed
    return best


def _fits(changed: RunPlan, plan: RunPlan) -> bool:
    """Whether a changed run fits with the margin of "auto", or fits and needs no more memory than the current run."""
    limit = plan.config.devices.memory
    return changed.memory.total <= min(limit, max(MAX_BATCH_MEMORY_FRACTION * limit, plan.memory.total))


def _gain(new: Prediction, old: Prediction) -> float:
    return new.tokens_per_sec / old.tokens_per_sec - 1


def _set(plan: RunPlan, changes: Changes) -> Change:
    return flags_of(changes), with_options(plan.config.args, changes)


def _compiler(plan: RunPlan) -> Iterator[Change]:
    """Suggest ``--compiler torch``. No gain if auto skips compilation (short run or rows of different lengths)."""
    if plan.config.args.compiler == "none":
        yield "--compiler torch", replace(plan.config.args, compiler=AUTO)


def _precision(plan: RunPlan) -> Iterator[Change]:
    """Replace fp32 by the precision that auto chooses."""
    precision = choose_precision(replace(plan.config.args, precision=AUTO), plan.config.devices)
    if plan.config.precision == "32-true" != precision:
        yield _set(plan, {"precision": precision})


def _micro_batch(plan: RunPlan) -> Iterator[Change]:
    """Yield the largest two sizes that fit."""
    batch = plan.config.batch
    per_rank = batch.global_batch_size // batch.data_parallel
    fitting: list[Change] = []
    for size in sorted({2**i for i in range(11)} | {per_rank}):
        if batch.micro_batch_size < size <= per_rank and per_rank % size == 0:
            change = _set(plan, {MICRO_BATCH_SIZE: size})
            with suppress(UserError):  # the run would raise this
                if not _fits(plan_run(change[1], plan.config.devices), plan):
                    break
                fitting.append(change)
    yield from fitting[-2:]


def _less_recomputation(plan: RunPlan) -> Iterator[Change]:
    modes = get_args(ActivationCheckpointing)
    for mode in modes[: modes.index(plan.config.args.train.activation_checkpointing)]:
        yield _set(plan, {"train.activation_checkpointing": mode})


def _strategy(plan: RunPlan) -> Iterator[Change]:
    """Switch between ddp and fsdp, if the options support both."""
    strategy = plan.config.strategy
    if strategy.kind == "fsdp" and strategy.extension is None and not strategy.offloads:
        yield _set(plan, {"strategy": "ddp"})
        yield _set(plan, {"fsdp.sharding_strategy": "SHARD_GRAD_OP"})
    elif strategy.kind == "ddp":
        yield _set(plan, {"strategy": "fsdp"})


_CHANGES = (_precision, _compiler, _micro_batch, _less_recomputation, _strategy)
