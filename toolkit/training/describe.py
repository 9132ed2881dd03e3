"""Describe a run in the log before the first step."""

from collections.abc import Iterator

import torch
from torch import nn

from toolkit.distributed.units import describe_units, plan_units
from toolkit.models.families import export_error
from toolkit.models.fp8 import describe_fp8
from toolkit.optim.schedule import describe_scaling
from toolkit.planning.data import describe_stand_in
from toolkit.private_torch import local_shard
from toolkit.training.data_reader import DataReader
from toolkit.training.launch import Launch
from toolkit.training.model_spec import describe_model

_SAMPLED = 1 << 20  # elements


def describe_run(launch: Launch, reader: DataReader) -> Iterator[str]:
    """Yield log lines on model, batch, learning rate, data, strategy and memory options, and notes."""
    config, spec, args = launch.config, launch.spec, launch.args
    moments = f" with {dtype} moments" if (dtype := config.optimizer.get("state_dtype")) else ""
    yield (
        f"{describe_model(spec, launch.mean_length)}; {config.device}, {config.precision}, "
        f"{config.optimizer['name']}{moments}; {config.batch}; {launch.schedule}"
    )
    if launch.frozen is not None:
        yield f"Frozen: {describe_model(launch.frozen, launch.mean_length, forward_only=True)}"
    if (scaled := describe_scaling(args.train, launch.schedule, args.defaults)) is not None:
        yield scaled
    if args.requested is not None and args.train.lr_schedule != args.requested.train.lr_schedule:
        yield f"LR schedule: {args.train.lr_schedule} after the warm-up, as {config.optimizer['name']} needs it"
    if config.optimizer["name"] == "SOAP":
        limit = config.optimizer.get("max_precondition_dim", 10_000)
        size = max((n for p in spec.module.parameters() for n in p.shape if n <= limit), default=0)
        less = "--optimizer.options '{max_precondition_dim: 512}' leaves out larger ones"
        yield f"SOAP: the first step computes eigenvectors of matrices of up to {size:,} x {size:,}; {less}"
    yield from filter(None, [describe_stand_in(config, launch.data)])
    yield from reader.describe()
    if (reason := config.reasons.get("train.micro_batch_size")) is not None:
        yield f"Micro-batch: {config.batch.micro_batch_size} ({reason})"
    if args.train.epochs is not None and launch.limits.total_samples is None:
        yield "note: epochs are not counted: the number of rows of this data is unknown; another limit ends the run"
    if config.preset:
        yield f"Preset {config.preset}"
    yield f"Strategy: {config.strategy}"
    if config.strategy.kind == "fsdp" and config.strategy.extension is None:
        units = plan_units(spec.module, config.fsdp, spec.blocks)
        yield f"FSDP units: {describe_units(units, config.fsdp)}"
    if config.fsdp.cpu_offload and config.device == "cpu":
        yield "note: --fsdp.cpu_offload true has no effect on a CPU, because weights are already in CPU memory"
    if (reason := config.reasons.get("compiler")) is not None or args.compiler != "none":
        yield f"Compiler: {args.compiler}{f' ({reason})' if reason else ''}"
    if (mode := args.train.activation_checkpointing) != "none":
        yield f"Activation checkpointing: {mode}"
    if args.train.residual_dtype != "auto":
        yield f"Residual stream: {args.train.residual_dtype}"
    if args.train.fp8 != "none" and (model := spec.meta_model) is not None:
        yield describe_fp8(model, args.train.fp8, config.device)
    if config.accumulate == "sharded":
        yield f"Gradients are reduced after each of {config.batch.accumulation} micro-batches and kept sharded"
    if spec.config is not None and (reason := export_error(spec.config)) is not None:
        yield f"note: {reason}"
    for note in (getattr(part, "note", "") for part in (spec.module, reader.order)):
        if note:
            yield f"note: {note}"


def describe_rounding(launch: Launch, module: nn.Module) -> str | None:
    """Return a note on the share of bf16 weights that an update is too small to change; None if not applicable.

    A step of Adam changes a weight by about the learning rate. bf16 has 8 significant bits.
    """
    config, schedule = launch.config, launch.schedule
    if config.precision != "bf16-true" or launch.spec.lora is not None:
        return None
    peak, end = schedule.peak, schedule.minimum
    instead = "bf16-master" if config.strategy.kind in ("single", "ddp") else "bf16-mixed"
    return (
        f"note: --precision bf16-true: updates as large as the learning rate round away in "
        f"{_rounded_away(module, peak):.0%} of the weights at the peak ({peak:.3g}) and in "
        f"{_rounded_away(module, end):.0%} at the end ({end:.3g}); --precision {instead} keeps fp32 weights"
    )


def _rounded_away(module: nn.Module, step: float) -> float:
    """Estimate the share of bf16 weights that ``step`` does not change, from a sample."""
    weights = [local_shard(p).detach().flatten() for p in module.parameters() if p.requires_grad]
    stride = 1 + sum(map(len, weights)) // _SAMPLED
    sample = torch.cat([weight[::stride] for weight in weights])
    return float(((sample.float() - step).to(sample.dtype) == sample).float().mean())
