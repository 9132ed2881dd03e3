"""Predict the time of a training step on a GPU: its micro-steps, update and communication.

If the host takes longer to launch a micro-step than the GPU to run it, the difference is added.
"""

from dataclasses import dataclass, replace

from toolkit.errors import UserError, require_option
from toolkit.measure.flops import flops_per_token
from toolkit.measure.gpus import GpuSpec
from toolkit.measure.inputs import FP32, MemoryInputs
from toolkit.measure.links import Communication, communication
from toolkit.measure.micro_step import BANDWIDTH_SHARE, gpu_times, host_seconds, seconds, traced_kernels
from toolkit.measure.optimizer import is_fused, orthogonalization_flops
from toolkit.measure.sample import model_of
from toolkit.models.attention_dispatch import needs_masks
from toolkit.models.gpt import GPT
from toolkit.planning.plan import RunPlan
from toolkit.planning.resolve import memory_inputs

HOST_STEP = 1e-3
"""Seconds per step in which the GPU waits: the host reads loss and norm before it launches the next forward pass."""


@dataclass(frozen=True)
class Prediction:
    """Predicted seconds of an optimizer step, by part.

    Args:
        products, attention, memory_bound: GPU time of all micro-steps by kind of kernel.
        launch: Seconds that the GPU waits for the host.
        optimizer: Gradient norm, clipping and update.
        communication: Communication that does not overlap with computation.
        links: All communication, including overlapped.
        tokens: Tokens of a step, over all devices.
        mfu: See :func:`toolkit.measure.flops.flops_per_token`; None for 32-true, as in a run.
        kernels: Number of kernels of a micro-step on one device.
        bytes: Bytes that the kernels read and write.
        notes: Effects that the prediction ignores.
    """

    products: float
    attention: float
    memory_bound: float
    launch: float
    optimizer: float
    communication: float
    links: Communication
    tokens: int
    mfu: float | None
    kernels: int
    bytes: float
    notes: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        return sum(self.parts().values())

    @property
    def tokens_per_sec(self) -> float:
        return self.tokens / self.seconds

    def parts(self) -> dict[str, float]:
        names = ("products", "attention", "memory_bound", "launch", "optimizer", "communication")
        return {name: getattr(self, name) for name in names}


def predict(plan: RunPlan, gpu: GpuSpec) -> Prediction:
    """Predict a step of ``plan`` on GPUs of this kind."""
    size = plan.args.pipeline_parallel_size
    require_option(size == 1, "pipeline_parallel_size", size, "--speed does not support pipelines; remove --speed")
    try:
        return _predict(plan, gpu)
    except (NotImplementedError, RuntimeError, TypeError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise UserError(
            f"--speed: the speed of {plan.model.name} with {plan.config.optimizer['name']} cannot be predicted: its "
            f"operators cannot be counted without a GPU ({reason}); remove --speed"
        ) from error


def _predict(plan: RunPlan, gpu: GpuSpec) -> Prediction:
    config, batch = plan.config, plan.config.batch
    setup = memory_inputs(config, plan.model)
    require_option(
        setup.fp8 == "none" or gpu.fp8 > 0, "train.fp8", setup.fp8, "the GPU of --speed has no fp8; use none"
    )
    if config.args.is_finetune or needs_masks(plan.model, plan.seq_length):
        # cuDNN, which would plan for each length of rows, is off; as with masks: see distributed/device.py
        kernels = gpu.generation
        forward, backward = kernels.forward * kernels.flash, kernels.backward * kernels.flash
        gpu = gpu._replace(generation=kernels._replace(forward=forward, backward=backward, flash=1.0))
    model = model_of(plan.model, setup.lora, setup.tensor)
    is_compiled = plan.compiler[0] == "torch"
    trace = traced_kernels(setup, is_compiled)
    times = gpu_times(trace, trace.ops, gpu)
    once = sum(trace.times(op) * seconds(op, gpu) for op in trace.ops if op.kind == "accumulate")
    times["memory_bound"] -= once / batch.accumulation  # the first micro-batch has nothing to add to
    times["memory_bound"] += _sharding_seconds(setup, model, gpu)
    forward = sum(gpu_times(trace, (op for op in trace.ops if not op.is_backward), gpu).values())
    busy, host = sum(times.values()), host_seconds(trace, setup, is_compiled)
    devices, nodes = config.devices.devices, config.devices.num_nodes
    links = communication(setup, model, gpu, devices, nodes, max(forward, host / 2), max(busy - forward, host / 2))
    optimizer, estimated = _update_seconds(setup, model, plan, gpu)
    result = Prediction(
        **{name: batch.accumulation * time for name, time in times.items()},
        launch=batch.accumulation * max(0.0, host - busy) + HOST_STEP,
        optimizer=optimizer,
        communication=links.exposed,
        links=links,
        tokens=plan.tokens_per_step,
        mfu=None,
        kernels=sum(trace.times(op) * op.launches for op in trace.ops),
        bytes=sum(trace.times(op) * op.bytes for op in trace.ops),
        notes=(*_notes(plan), *([estimated] if estimated else [])),
    )
    if config.precision == "32-true":
        return result
    flops = flops_per_token(model_of(plan.model, setup.lora), plan.model, plan.seq_length)
    return replace(result, mfu=flops * result.tokens_per_sec / (gpu.peak * setup.strategy.layout.world_size))


def _sharding_seconds(setup: MemoryInputs, model: GPT, gpu: GpuSpec) -> float:
    """Return the seconds per micro-batch that fsdp and ddp take to copy and cast gradients."""
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    moved = 0.0
    if setup.strategy.kind == "fsdp" and setup.lora is None:
        # to fp32; between micro-batches they are added to those so far
        moved = trained * (setup.compute_bytes + FP32 + (12 if setup.accumulates_unsharded else 0))
    elif setup.strategy.kind == "ddp":
        moved = trained * 2 * setup.weight_bytes / setup.accumulation  # copied to the buckets
    return moved / (gpu.bandwidth * BANDWIDTH_SHARE)


def _update_seconds(setup: MemoryInputs, model: GPT, plan: RunPlan, gpu: GpuSpec) -> tuple[float, str | None]:
    """Return the seconds of norm, clipping and update on a device's shard, and a note if the update may take longer.

    The update reads weights, gradients and state, and writes weights and state. A fused one does so once.
    """
    shards = setup.strategy.shards if setup.strategy.kind == "fsdp" else 1
    itemsize, name = setup.dtype.itemsize if setup.lora is None else FP32, setup.optimizer["name"]
    weights = itemsize * sum(p.numel() for p in model.parameters() if p.requires_grad) / shards
    # gradients are read for the norm, and read and written to clip; fused Adam clips them in its update
    passes = 3 + (2 if name in ("Adam", "AdamW") else 3)
    products = orthogonalization_flops(setup, model) / (gpu.peak * gpu.generation.products)
    total = (passes * weights + 2 * plan.memory.optimizer) / (gpu.bandwidth * BANDWIDTH_SHARE) + products
    if is_fused(setup) and not setup.has_masters and "state_dtype" not in setup.optimizer:
        return total, None
    counted = "reading and writing weights and state once" + (", and its matrix products" if products else "")
    return total, f"{name} counts as {counted}; it may take longer"


def _notes(plan: RunPlan) -> tuple[str, ...]:
    args, setup = plan.config.args, memory_inputs(plan.config, plan.model)
    caveats = {
        "each packed row counts as one document; shorter documents need less attention": setup.packed,
        "each row counts with the maximum length; shorter rows are padded, or take less time": args.is_finetune
        and not setup.packed,
        "--fsdp.cpu_offload: copies between CPU and GPU are not predicted": plan.config.strategy.offloads,
        "the forward pass of the objective's frozen model is not predicted": setup.frozen is not None,
        "--train.fp8: MFU is relative to the bf16 peak": setup.fp8 != "none",
        "experts are assumed to have equal load": bool(plan.model.n_moe_layer),
        "--deterministic true: its kernels, which may be slower, are not predicted": args.deterministic,
        f"--compiler {plan.compiler[0]}: predicted as without a compiler": plan.compiler[0] not in ("none", "torch"),
    }
    return tuple(text for text, applies in caveats.items() if applies)
