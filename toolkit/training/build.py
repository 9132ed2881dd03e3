"""Build the parts of a run from its launch: the data reader, the model, the optimizer and the checkpointer."""

from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import torch

from toolkit.data.base import Report
from toolkit.data.batch import Padding, choose_padding
from toolkit.distributed import ranks
from toolkit.distributed.device import choose_attention_kernels
from toolkit.distributed.private_lightning import FabricModule
from toolkit.models.attention_dispatch import needs_masks
from toolkit.optim.classes import build_optimizer
from toolkit.optim.update import set_learning_rate
from toolkit.planning.frozen import find_frozen
from toolkit.planning.plan import require_memory
from toolkit.training import adapters
from toolkit.training.checkpoint_meta import read_meta
from toolkit.training.checkpointer import Checkpointer, seed_generators
from toolkit.training.data_reader import DataReader
from toolkit.training.describe import describe_rounding
from toolkit.training.frozen import build_frozen
from toolkit.training.launch import Launch
from toolkit.training.model import build_model, unwrapped
from toolkit.training.verify import require_intact_on_all_ranks


def build_reader(launch: Launch, stack: ExitStack) -> tuple[Padding, DataReader]:
    """Start to read the training data from the run's progress on."""
    config, state, device = launch.config, launch.state, launch.fabric.device
    context = None if state.model.config is None else config.max_seq_length
    divisor = config.args.model_parallel.length_divisor
    padding = choose_padding(device.type, state.longest_ragged > 0, context, divisor)
    reader = DataReader(config, state, launch.data.train, padding, device)
    stack.callback(reader.close)
    return padding, reader


def build_models(launch: Launch, stack: ExitStack) -> FabricModule:
    """Build the objective's frozen model, if it has one, and the trained model, wrapped for the strategy.

    ``stack`` drops the frozen model when the run ends.
    """
    config, state, fabric, report = launch.config, launch.state, launch.fabric, launch.display.message
    args, source = config.args, config.args.base_dir
    if (gpt := state.model.meta_model) is not None and args.optimizer_class is None:
        require_memory(config, gpt.config, gpt)
    if state.frozen is not None:
        folder = find_frozen(args.objective)
        assert folder is not None
        args.objective.frozen = build_frozen(config, state.frozen, fabric, folder, report, state.longest_ragged)
        stack.callback(setattr, args.objective, "frozen", None)
    choose_attention_kernels(
        fixed_shapes=not state.longest_ragged, has_masks=needs_masks(state.model.config, config.max_seq_length)
    )
    reads_source = state.resume_from is None or state.base is not None
    should_verify = ranks.broadcast_from_rank0(reads_source and args.verify_checkpoint)
    if source is not None and should_verify:
        require_intact_on_all_ranks(source, fabric.local_rank == 0, report, model_only=True)
    model = build_model(
        fabric,
        state.model,
        config,
        longest_ragged=state.longest_ragged,
        source=source if state.base is not None else state.resume_from or source,
        adapters=adapters.initial_adapters(args, state.model, state.resume_from, report),
    )
    if config.precision == "bf16-master" and config.strategy.kind == "single" and config.batch.accumulation > 1:
        for parameter in unwrapped(model).parameters():
            parameter.grad_dtype = torch.float32  # bf16 accumulation loses small contributions of micro-batches
    seed_generators(args.seed, ranks.global_rank())  # otherwise dropout would be the same on all ranks
    if (note := describe_rounding(config, state, model)) is not None:
        report(note)
    return model


def build_checkpointer(launch: Launch, model: FabricModule) -> Checkpointer:
    """Build the optimizer, and the checkpointer for model and optimizer; restore their state if the run resumes."""
    config, state, report = launch.config, launch.state, launch.display.message
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
    scaler = getattr(launch.fabric.strategy.precision, "scaler", None)
    is_first_of_another_node = launch.world.local_rank == 0 and launch.world.global_rank != 0
    report_wait = ranks.rank_print if is_first_of_another_node else report  # reported in each node's log
    checkpointer = Checkpointer(
        config, state, launch.data.tokenizer, module, optimizer, scaler, launch.fabric.device, report_wait
    )
    if state.resume_from is not None:
        restore(checkpointer, state.resume_from, report)
    return checkpointer


def restore(checkpointer: Checkpointer, folder: Path, report: Report) -> None:
    """Restore optimizer, scaler and random states from a checkpoint. The model already has its weights."""
    progress, schedule = checkpointer.state.progress, checkpointer.state.schedule
    checkpointer.restore(folder, progress.step)
    set_learning_rate(checkpointer.optimizer, schedule.learning_rate(max(progress.step - 1, 0)))
    report(f"resuming from {folder}: step {progress.step}, {progress.tokens:,} tokens")
    old, new = read_meta(folder)["schedule"], asdict(schedule)
    changes = [
        f"{name} {_format_value(old.get(name))} -> {_format_value(new[name])}"
        for name in new
        if old.get(name) != new[name]
    ]
    if changes:
        report(f"LR schedule changed on resume: {', '.join(changes)}")


def _format_value(value: object) -> object:
    return f"{value:.6g}" if isinstance(value, float) else value
