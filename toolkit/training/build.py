"""The parts of a run, built from what it was resolved to: model, checkpointer, callbacks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

import torch
from lightning.fabric import Fabric

from toolkit.checkpoints.lock import exclusive_lock
from toolkit.checkpoints.remote.run import RemoteRun
from toolkit.checkpoints.remote.uploader import Uploader
from toolkit.checkpoints.run.resume import resolve_resume
from toolkit.checkpoints.store import rename_damaged
from toolkit.data.interleave import MixtureOrder
from toolkit.data.tokenizer import Tokenizer
from toolkit.distributed import ranks
from toolkit.distributed.device import choose_attention_kernels
from toolkit.distributed.private_lightning import FabricModule
from toolkit.errors import UserError
from toolkit.io.tempfiles import sweep
from toolkit.models.attention_dispatch import needs_masks
from toolkit.objectives.base import LOSS
from toolkit.objectives.inputs import original_module
from toolkit.optim.classes import build_optimizer
from toolkit.optim.update import Update, choose_update
from toolkit.planning.resolve import ResolvedConfig
from toolkit.planning.speed.cards import peak_flops
from toolkit.training import adapters
from toolkit.training.callbacks import (
    Callback,
    Console,
    EarlyStopping,
    ExternalLoggers,
    KeepBest,
    MetricsFile,
    MixtureShares,
    Profile,
    ReplicaCheck,
    Sampler,
    ThroughputMonitor,
    Upload,
    notify,
    overrides,
)
from toolkit.training.checkpointer import Checkpointer, seed_generators
from toolkit.training.model import build_model, unwrapped
from toolkit.training.start_state import StartState
from toolkit.training.throughput import Throughput
from toolkit.training.verify import require_intact_together
from toolkit.ui.loggers import MetricsCSV, make_loggers

if TYPE_CHECKING:
    from toolkit.training.trainer import Trainer


def prepare_model(
    config: ResolvedConfig, state: StartState, fabric: Fabric, report: Callable[[str], None]
) -> FabricModule:
    """Give the model its weights, verified first, and wrap it as the strategy has it."""
    args, source = config.args, config.args.base_dir
    choose_attention_kernels(
        fixed_shapes=not state.longest_ragged, has_masks=needs_masks(state.model.config, config.max_seq_length)
    )
    reads_source = state.resume_from is None or state.base is not None
    should_verify = ranks.broadcast_from_rank0(reads_source and args.verify_checkpoint)
    if source is not None and should_verify:
        require_intact_together(source, fabric.local_rank == 0, report, model_only=True)
    model = build_model(
        fabric,
        state.model,
        seed=args.seed,
        precision=config.precision,
        activation_checkpointing=args.train.activation_checkpointing,
        compiler=args.compiler,
        groups=args.groups,
        longest_ragged=state.longest_ragged,
        source=source if state.base is not None else state.resume_from or source,
        adapters=adapters.initial_adapters(args, state.model, state.resume_from, report),
    )
    if config.precision == "bf16-master" and config.strategy.kind == "single" and config.batch.accumulation > 1:
        for parameter in unwrapped(model).parameters():
            parameter.grad_dtype = torch.float32  # bf16 sums lose what micro-batches add
    seed_generators(args.seed, ranks.global_rank())  # else dropout would draw the same on all ranks
    return model


def build_checkpointer(
    config: ResolvedConfig,
    state: StartState,
    fabric: Fabric,
    model: FabricModule,
    tokenizer: Tokenizer | None,
    report: Callable[[str], None],
) -> Checkpointer:
    """Build the optimizer, and the checkpointer that saves it with the model."""
    module, spec = unwrapped(model), state.model
    optimizer = build_optimizer(
        module,
        config.optimizer,
        state.schedule.peak,
        config.precision,
        spec.no_decay_params,
        config.args.optimizer_class,
        spec.block_params,
    )
    scaler = getattr(fabric.strategy.precision, "scaler", None)
    return Checkpointer(config, state, tokenizer, module, optimizer, scaler, fabric.device, report)


def build_update(trainer: Trainer) -> Update:
    """Choose how gradients change the weights, the same on all ranks.

    If any rank has a gradient callback, all ranks take the unfused path; otherwise replicas would round differently
    (N4).
    """
    has_gradient_callbacks = any(overrides(callback, "on_before_optimizer_step") for callback in trainer.callbacks)
    return choose_update(
        trainer.fabric,
        trainer.model,
        trainer.optimizer,
        trainer.args.train.max_norm,
        before_update=(
            partial(notify, trainer.callbacks, "on_before_optimizer_step", trainer)
            if any(ranks.all_gather_object(has_gradient_callbacks))
            else None
        ),
        in_backward=trainer.args.optimizer.in_backward,
    )


def build_callbacks(
    trainer: Trainer, sampler: Sampler | None, user_callbacks: Sequence[Callback], stack: ExitStack
) -> list[Callback]:
    """Return all callbacks of a run: checks and throughput, the user's, the outputs, what validations decide.

    Args:
        trainer: With its model.
        sampler: Prints samples, with ``--eval.max_new_tokens``.
        user_callbacks: In the user's order.
        stack: Keeps rank 0's lock of the folder until the run ends.
    """
    train, state = trainer.args.train, trainer.state
    peak = peak_flops(trainer.fabric.device, trainer.config.precision)
    throughput = Throughput(state.flops, None if peak is None else peak * ranks.world_size())
    callbacks: list[Callback] = [
        ReplicaCheck(state.model, trainer.config.strategy.shards),
        ThroughputMonitor(throughput),
    ]
    if trainer.args.profile:
        callbacks.append(Profile(trainer.args.profiler))
    if isinstance(trainer.reader.order, MixtureOrder):
        callbacks.append(MixtureShares(trainer.reader.order))
    callbacks += user_callbacks
    columns = [f"val_loss_{name}" for name in trainer.data.val_sources]
    columns += [name for callback in callbacks for name in callback.columns]
    parts = [part.name for part in trainer.objective.parts(original_module(trainer.model)) if part.name != LOSS]
    columns += [f"{prefix}{name}" for prefix in ("", "val_") for name in parts]
    callbacks += ranks.run_on_rank0(lambda: open_outputs(trainer, columns, stack)) or []
    if trainer.remote is not None:
        callbacks.append(open_uploads(trainer.remote, trainer, stack))
    if ranks.global_rank() == 0:
        callbacks.append(Console())  # after the uploads: it reports the end
    if sampler is not None:
        callbacks.append(sampler)
    if train.patience is not None:
        callbacks.append(EarlyStopping(train.patience))
    if train.keep_best:
        callbacks.append(KeepBest())
    return callbacks


def open_outputs(trainer: Trainer, columns: list[str], stack: ExitStack) -> list[Callback]:
    """Lock the folder for this run, rename damaged checkpoints, and open metrics.csv and the loggers. On rank 0."""
    args, state, out_dir = trainer.args, trainer.state, trainer.out_dir
    stack.enter_context(exclusive_lock(out_dir))
    sweep(out_dir)
    if resolve_resume(args.resume, out_dir) != next(iter(state.damaged), state.resume_from):
        raise UserError(f"--out_dir {out_dir}: another process has just run there; start again")
    for folder in state.damaged:  # else it would count as the run's newest, and for --train.keep_last
        trainer.display.message(f"renamed {folder} to {rename_damaged(folder).name}; delete it when you do not need it")
    resume_step = None if state.resume_from is None else state.progress.step
    csv = MetricsCSV(out_dir / "logs" / "metrics.csv", resume_step, columns)
    expected = state.progress.logged_rows if state.resume_from and state.resume_from.parent == out_dir else 0
    if csv.n_resumed < expected:
        trainer.display.message(
            f"{csv.path}: {expected - csv.n_resumed} of the {expected} rows to step {resume_step} are lost or damaged"
        )
    loggers = make_loggers(args.logger_name, out_dir, args.log, trainer.config.hyperparameters(), resume_step)
    return [MetricsFile(csv), ExternalLoggers(loggers)]


def open_uploads(remote: RemoteRun, trainer: Trainer, stack: ExitStack) -> Upload:
    """Take the run's folder on remote storage and start to upload there. On rank 0 the staging folder is locked."""

    def start() -> Uploader:
        uploader = remote.start_uploads(trainer.args.train.keep_last, trainer.display.message)
        stack.callback(uploader.close)
        return uploader

    return Upload(ranks.run_on_rank0(start))


def upload_missing(remote: RemoteRun, trainer: Trainer, stack: ExitStack) -> None:
    """Upload what an earlier launch of a finished run could not; every rank calls this.

    Raises:
        GuardError: the upload fails again.
    """
    ranks.run_on_rank0(lambda: stack.enter_context(exclusive_lock(remote.out_dir)))
    open_uploads(remote, trainer, stack).on_train_end(trainer)
