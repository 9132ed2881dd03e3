"""Build the parts of a run: the data reader, the model, the optimizer, the checkpointer and the update."""

from contextlib import ExitStack
from copy import copy
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import torch

from toolkit.checkpoints.adapters import load_adapters
from toolkit.checkpoints.importers import import_adapters
from toolkit.checkpoints.weights import Tensors
from toolkit.distributed import ranks
from toolkit.distributed.device import choose_attention_kernels
from toolkit.distributed.private_lightning import FabricModule
from toolkit.models.attention_dispatch import needs_masks
from toolkit.objectives.base import Objective
from toolkit.optim.classes import build_optimizer
from toolkit.optim.update import Update, choose_update, set_learning_rate
from toolkit.planning.frozen import find_frozen
from toolkit.planning.planner import require_memory
from toolkit.training.callbacks.spikes import SkipSpikes
from toolkit.training.checkpoint_meta import read_meta
from toolkit.training.checkpointer import Checkpointer, seed_generators
from toolkit.training.data_reader import DataReader
from toolkit.training.describe import describe_rounding
from toolkit.training.launch import Launch
from toolkit.training.model_spec import ModelSpec, build_model, unwrapped
from toolkit.training.resume_checkpoint import require_intact_on_all_ranks
from toolkit.training.run import Run, overrides


def build_reader(launch: Launch, stack: ExitStack) -> DataReader:
    """Start to read the training data from the run's progress on."""
    reader = DataReader(launch)
    stack.callback(reader.prefetcher.close)
    return reader


def build_models(launch: Launch) -> tuple[Objective, FabricModule]:
    """Return the objective with its frozen model, if it has one, and the trained model, wrapped for the strategy."""
    config, fabric, report = launch.config, launch.fabric, launch.display.message
    args, source, objective = config.args, config.args.base_dir, config.args.objective
    if (gpt := launch.spec.meta_model) is not None and args.optimizer_class is None:
        require_memory(config, gpt)
    if launch.frozen is not None:
        folder = find_frozen(objective)
        assert folder is not None
        objective = copy(objective)
        objective.frozen = build_frozen(launch, launch.frozen, folder)
    choose_attention_kernels(
        fixed_shapes=not launch.longest_ragged, has_masks=needs_masks(launch.spec.config, config.max_seq_length)
    )
    reads_source = launch.resume_from is None or launch.base is not None
    should_verify = ranks.broadcast_from_rank0(reads_source and args.verify_checkpoint)
    if source is not None and should_verify:
        require_intact_on_all_ranks(source, fabric.local_rank == 0, report, model_only=True)
    model = build_model(
        fabric,
        launch.spec,
        config,
        longest_ragged=launch.longest_ragged,
        source=source if launch.base is not None else launch.resume_from or source,
        adapters=initial_adapters(launch),
    )
    if config.precision == "bf16-master" and config.strategy.kind == "single" and config.batch.accumulation > 1:
        for parameter in unwrapped(model).parameters():
            parameter.grad_dtype = torch.float32  # bf16 accumulation loses small contributions of micro-batches
    seed_generators(args.seed, ranks.global_rank())  # otherwise dropout would be the same on all ranks
    if (note := describe_rounding(launch, model)) is not None:
        report(note)
    return objective, model


def build_frozen(launch: Launch, spec: ModelSpec, folder: Path, is_exact: bool = False) -> FabricModule:
    """Load the model of ``folder`` for inference, with the run's strategy. Collective.

    Call this before the trained model is built, because the strategy keeps properties of the last model. With
    bf16-mixed, the weights are stored in bf16.

    Args:
        spec: The model, see :func:`toolkit.training.model_spec.specify_frozen`.
        is_exact: Store the weights in the trained model's dtype.
    """
    config, args, fabric = launch.config, launch.args, launch.fabric
    if args.verify_checkpoint:
        require_intact_on_all_ranks(folder, fabric.local_rank == 0, launch.display.message, model_only=True)
    compiler = args.compiler if args.compiler == "torch" else "none"
    train = replace(args.train, activation_checkpointing="none")
    config = replace(config, args=replace(args, compiler=compiler, train=train))
    if config.precision == "bf16-mixed" and not is_exact:
        config = replace(config, precision="bf16-true")
    return build_model(fabric, spec, config, launch.longest_ragged, folder).eval()


def initial_adapters(launch: Launch) -> Tensors | None:
    """Load the initial adapters from the checkpoint to resume, else from the peft folder. None: new or no adapters."""
    args, spec, resume_from = launch.args, launch.spec, launch.resume_from
    if args.lora is None:
        return None
    if resume_from is not None:
        return load_adapters(resume_from, spec.module)
    if args.from_peft is None:
        return None
    assert args.base_dir is not None and spec.config is not None
    adapters = import_adapters(Path(args.from_peft), args.base_dir, spec.config)
    for line in adapters.notes:
        launch.display.message(line)
    return adapters.tensors


def build_checkpointer(launch: Launch, model: FabricModule) -> Checkpointer:
    """Build the optimizer, and the checkpointer for model and optimizer; restore their state if the run resumes."""
    config, module, spec = launch.config, unwrapped(model), launch.spec
    optimizer = build_optimizer(
        module,
        config.optimizer,
        launch.schedule.peak,
        config.precision,
        spec.no_decay_params,
        config.args.optimizer_class,
        spec.block_params,
    )
    checkpointer = Checkpointer(launch, module, optimizer)
    if launch.resume_from is not None:
        restore(checkpointer, launch.resume_from)
    return checkpointer


def restore(checkpointer: Checkpointer, folder: Path) -> None:
    """Restore optimizer, scaler and random states from a checkpoint. The model already has its weights."""
    launch = checkpointer.launch
    progress, schedule, report = launch.progress, launch.schedule, launch.display.message
    checkpointer.restore(folder, progress.step)
    set_learning_rate(checkpointer.optimizer, schedule.learning_rate(max(progress.step - 1, 0), progress.seconds))
    report(f"resuming from {folder}: step {progress.step}, {progress.tokens:,} tokens")
    meta = read_meta(folder)
    if launch.args.lora is not None and launch.args.lora.dropout and "keyed_dropout" not in meta:
        report("note: an older version wrote this checkpoint: --lora_dropout continues with other random numbers")
    old, new = meta["schedule"], asdict(schedule)
    changes = [
        f"{name} {_format_value(old.get(name))} -> {_format_value(new[name])}"
        for name in new
        if old.get(name) != new[name]
    ]
    if changes:
        report(f"LR schedule changed on resume: {', '.join(changes)}")


def _format_value(value: object) -> object:
    return f"{value:.6g}" if isinstance(value, float) else value


def build_update(run: Run) -> Update:
    """Choose the update of the weights, the same on all ranks.

    If any rank has a gradient callback, all ranks take the unfused path; otherwise replicas would round differently
    (N4).
    """
    spikes = next((callback for callback in run.callbacks if isinstance(callback, SkipSpikes)), None)
    has_gradient_callbacks = any(overrides(callback, "on_before_optimizer_step") for callback in run.callbacks)
    return choose_update(
        run.fabric,
        run.model,
        run.optimizer,
        run.args.train.max_norm,
        before_update=(
            partial(run.notify, "on_before_optimizer_step")
            if any(ranks.all_gather_object(has_gradient_callbacks))
            else None
        ),
        is_spike=None if spikes is None else spikes.is_spike,
        in_backward=run.args.optimizer.in_backward,
    )
