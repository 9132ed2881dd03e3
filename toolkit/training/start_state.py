"""Resolve start and end of a run from its options, its data and the checkpoint to resume."""

import math
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from toolkit.checkpoints.adapters import AdapterInfo
from toolkit.checkpoints.find import HYPERPARAMETERS, read_settings
from toolkit.checkpoints.fingerprint import base_fingerprint
from toolkit.config import AUTO, EvalArgs, TrainArgs
from toolkit.data.base import PreparedData, is_ragged, mean_length, row_lengths
from toolkit.errors import UserError
from toolkit.models.flops import flops_per_token
from toolkit.optim.schedule import Schedule
from toolkit.planning.auto import MICRO_BATCH_SIZE, micro_batch_sizes, resolve_changes
from toolkit.planning.frozen import frozen_flag, require_same_vocabulary
from toolkit.planning.limits import Limits, Progress, require_within_limits
from toolkit.planning.resolve import ResolvedConfig
from toolkit.planning.start_checks import require_profiled_steps
from toolkit.training.checkpoint_meta import RunFingerprint, objective_fingerprint, read_callback_states, read_meta
from toolkit.training.model_spec import ModelSpec, specify_frozen
from toolkit.training.rank_consistency import require_disjoint_samples, require_same_options, require_same_weights


@dataclass(eq=False)
class StartState:
    """Start and end of a run.

    Args:
        progress: Progress, which starts as stored in the checkpoint ``resume_from``.
        spec: The trained model.
        base: LoRA adapter information; None if all weights are trained.
        frozen: The objective's frozen model; None if it needs none.
        fingerprint: Values that must not change on resume.
        limits, schedule: Limits and LR schedule over all launches.
        mean_length: Mean input tokens per row.
        longest_ragged: Input tokens in the longest row if row lengths vary; otherwise 0.
        flops: FLOPs per token, counted before layers are packed or sharded, with the forward pass of ``frozen``; None
            for a user-provided model.
        damaged: Newer checkpoints of the run that were skipped.
        saved_callback_states: Callback states from the checkpoint, by name.
    """

    resume_from: Path | None
    progress: Progress
    spec: ModelSpec
    base: AdapterInfo | None
    fingerprint: RunFingerprint
    limits: Limits
    schedule: Schedule
    mean_length: float
    longest_ragged: int
    flops: float | None
    damaged: list[Path]
    frozen: ModelSpec | None
    saved_callback_states: dict[str, dict[str, Any]]


def prepare_start_state(
    resolved: ResolvedConfig, data: PreparedData, progress: Progress, resume_from: Path | None, damaged: list[Path]
) -> StartState:
    """Resolve start and end of the run, and check that all ranks have the same options, data and weights."""
    args, fp8, residual = resolved.args, resolved.args.train.fp8, resolved.args.train.residual_dtype
    require_disjoint_samples(args, data.train)
    config = resolved.model
    if resolved.frozen is not None and data.tokenizer is None:  # otherwise the tokenizers have been compared
        require_same_vocabulary(frozen_flag(args.objective), resolved.frozen, config)
    spec = ModelSpec(config, args.module, args.block_classes, args.lora, args.quantize)
    length, longest = mean_length(data.train), longest_ragged(data, resolved.max_seq_length)
    base, adapters = None, {}
    if args.lora is not None:
        assert args.base_dir is not None
        base = AdapterInfo(args.lora, args.base_dir, base_fingerprint(args.base_dir), quantize=args.quantize)
        adapters = args.lora.to_options() | {"quantize": args.quantize, "checkpoint_dir": base.base_hash}
    fingerprint = RunFingerprint(
        model_config=spec.fingerprint,
        data=data.content_key,
        global_batch_size=resolved.batch.global_batch_size,
        seed=args.seed,
        precision=resolved.precision
        + f" --train.fp8 {fp8}" * (fp8 != "none")
        + f" --train.residual_dtype {residual}" * (residual != AUTO),
        optimizer=resolved.optimizer | ({} if args.train.ema is None else {"ema": args.train.ema}),
        objective=objective_fingerprint(args),
        adapters=adapters,
    )
    require_same_weights(args, base, resume_from)
    require_same_options(replace(args, fsdp=resolved.fsdp), fingerprint)
    require_validation_data(args.train, args.eval, data)
    limits, schedule = resolved.limits, resolved.schedule
    assert limits is not None and schedule is not None, "the data is prepared"
    if resume_from is not None:
        fingerprint.check_matches(read_meta(resume_from)["identity"], resume_from)
        require_within_limits(args.train, progress, limits, longest or math.ceil(length), resume_from)
    elif args.profile:
        require_profiled_steps(args.profiler, limits.total_steps)
    flops = None if config is None else flops_per_token(spec.module, config, length)
    frozen = None if resolved.frozen is None else specify_frozen(resolved.frozen)
    if flops is not None and frozen is not None and frozen.config is not None:
        flops += flops_per_token(frozen.module, frozen.config, length, forward_only=True)
    callbacks = {} if resume_from is None else read_callback_states(resume_from)
    return StartState(
        resume_from, progress, spec, base, fingerprint, limits, schedule, length, longest, flops, damaged, frozen,
        callbacks,
    )  # fmt: skip


def read_progress(folder: Path | None) -> Progress:
    """Return the progress that a checkpoint stores; none without one."""
    meta = {} if folder is None else read_meta(folder)
    return Progress(**{field.name: meta[field.name] for field in fields(Progress) if field.name in meta})


def keep_micro_batch(config: ResolvedConfig, resume_from: Path | None) -> ResolvedConfig:
    """Keep the checkpoint's micro-batch if it is smaller than the one that "auto" chose on as many devices.

    Losses and gradients are then summed in the same order as before.
    """
    if resume_from is None or MICRO_BATCH_SIZE not in config.reasons:
        return config
    devices = config.batch.data_parallel
    if read_meta(resume_from).get("data_parallel", devices) != devices:
        return config
    size = read_settings(resume_from, HYPERPARAMETERS).get("train", {}).get("micro_batch_size")
    sizes = micro_batch_sizes(config.args, config.devices.world_size)
    if size not in sizes or size >= config.batch.micro_batch_size:
        return config
    with suppress(UserError):  # an option that is new since then may need the larger one
        resumed = resolve_changes(config.args, config.devices, {MICRO_BATCH_SIZE: size}, config.model)
        if resumed.accumulate == config.accumulate:  # the strategy has been built
            reasons = {**config.reasons, MICRO_BATCH_SIZE: "auto: as in the checkpoint"}
            return replace(config, args=resumed.args, batch=resumed.batch, reasons=reasons)
    return config


def keep_fused_qkv(config: ResolvedConfig, resume_from: Path | None) -> ResolvedConfig:
    """Keep q, k and v fused in Muon if the checkpoint was trained that way, unless the user set ``split_qkv``."""
    is_default = "split_qkv" in config.optimizer and "split_qkv" not in config.args.optimizer.options
    if resume_from is None or not is_default or "split_qkv" in read_meta(resume_from)["identity"]["optimizer"]:
        return config
    return replace(config, optimizer={k: v for k, v in config.optimizer.items() if k != "split_qkv"})


def longest_ragged(data: PreparedData, limit: int | None) -> int:
    """Return the tokens in the longest row, or ``limit`` if unknown; 0 if all rows have the same length."""
    row_lengths_by_split = [row_lengths(rows) for rows in (data.train, data.val) if is_ragged(rows)]
    longest = [(limit or 1) if lengths is None else int(lengths.max()) for lengths in row_lengths_by_split]
    return min([max(longest, default=0), *filter(None, [limit])])  # the lengths of groups are sums


def require_validation_data(train: TrainArgs, evaluation: EvalArgs, data: PreparedData) -> None:
    """Check that there is validation data if ``--train.keep_best`` or ``--train.patience`` needs it."""
    flags = {"keep_best true": train.keep_best, f"patience {train.patience}": train.patience is not None}
    for flag in (flag for flag, is_given in flags.items() if is_given):
        if evaluation.best_by == AUTO and (data.val is None or not len(data.val)):
            raise UserError(
                f"--train.{flag}: this data has no validation split; hold one out "
                "(such as --data.val_split_fraction 0.05, for text --data.val_fraction), or remove the option"
            )
