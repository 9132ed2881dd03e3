"""Predict the time of a training step on a GPU: its micro-steps, update and communication.

If the host takes longer to launch a micro-step than the GPU to run it, the difference is added.
"""

from dataclasses import dataclass

from toolkit.distributed.gpus import GpuSpec
from toolkit.errors import UserError, first_line, require_option
from toolkit.models.attention_dispatch import needs_masks
from toolkit.models.flops import flops_per_token
from toolkit.optim.hybrid import Muon
from toolkit.planning.meta_model import model_of
from toolkit_plan.measure.inputs import FP32, MemoryInputs, memory_inputs
from toolkit_plan.measure.links import Communication, communication
from toolkit_plan.measure.micro_step import BANDWIDTH_SHARE, host_seconds, seconds, traced_kernels
from toolkit_plan.measure.optimizer import is_fused, orthogonalization_flops
from toolkit_plan.measure.parameters import stored_parameters
from toolkit_plan.plan import RunPlan

HOST_STEP = 1e-3
"""Seconds per step in which the GPU waits: the host reads loss and norm before it launches the next forward pass."""


@dataclass(frozen=True)
class Prediction:
    """The predicted optimizer step.

    Args:
        parts: Seconds by part, which add up to the step: GPU time of all micro-steps by kind of kernel (products,
            attention, memory_bound); launch, while the GPU waits for the host; optimizer (gradient norm, clipping and
            update); and communication that does not overlap with computation.
        links: All communication, including overlapped.
        tokens: Tokens of a step, over all devices.
        mfu: See :func:`toolkit.models.flops.flops_per_token`; None for 32-true, as in a run.
        kernels: Number of kernels of a micro-step on one device.
        bytes: Bytes that the kernels read and write.
        notes: Effects that the prediction ignores.
    """

    parts: dict[str, float]
    links: Communication
    tokens: int
    mfu: float | None
    kernels: float
    bytes: float
    notes: tuple[str, ...]

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def tokens_per_sec(self) -> float:
        return self.tokens / self.seconds


def predict(plan: RunPlan, gpu: GpuSpec) -> Prediction:
    """Predict a step of ``plan`` on GPUs of this kind."""
    size = plan.args.pipeline_parallel_size
    require_option(size == 1, "pipeline_parallel_size", size, "--speed does not support pipelines; remove --speed")
    try:
        return _predict(plan, gpu)
    except (NotImplementedError, RuntimeError, TypeError) as error:
        raise UserError(
            f"--speed: the speed of {plan.model.name} with {plan.config.optimizer['name']} cannot be predicted: its "
            f"operators cannot be counted without a GPU ({first_line(error)}); remove --speed"
        ) from error


def _predict(plan: RunPlan, gpu: GpuSpec) -> Prediction:
    config, accumulation = plan.config, plan.config.batch.accumulation
    inputs = memory_inputs(config, plan.model)
    require_option(
        inputs.fp8 == "none" or gpu.fp8 > 0, "train.fp8", inputs.fp8, "the GPU of --speed has no fp8; use none"
    )
    if config.args.is_finetune or needs_masks(plan.model, plan.seq_length):
        # cuDNN, which would plan for each length of rows, is off; as with masks: see distributed/device.py
        rates = gpu.generation
        forward, backward = rates.forward * rates.flash, rates.backward * rates.flash
        gpu = gpu._replace(generation=rates._replace(forward=forward, backward=backward, flash=1.0))
    model = model_of(plan.model, inputs.lora, inputs.tensor)
    stored = stored_parameters(inputs, model)
    trained = sum(p.numel for p in stored if p.is_trained)
    is_compiled = plan.compiler[0] == "torch"
    trace = traced_kernels(inputs, is_compiled)

    def gpu_seconds(*kinds: str) -> float:
        return trace.total(lambda op: seconds(op, gpu) if op.kind in kinds else 0.0)

    products, attention = gpu_seconds("product"), gpu_seconds("attention")
    memory_bound = gpu_seconds("fusable", "other") + _sharding_seconds(inputs, trained, gpu)
    # the first micro-batch has nothing to add to
    memory_bound += gpu_seconds("accumulate") * (accumulation - 1) / accumulation
    forward = trace.total(lambda op: 0.0 if op.is_backward else seconds(op, gpu))
    busy, host = products + attention + memory_bound, host_seconds(trace, inputs, is_compiled)
    devices, nodes = config.devices.devices, config.devices.num_nodes
    links = communication(inputs, model, gpu, devices, nodes, max(forward, host / 2), max(busy - forward, host / 2))
    parts = {
        "products": accumulation * products,
        "attention": accumulation * attention,
        "memory_bound": accumulation * memory_bound,
        "launch": accumulation * max(0.0, host - busy) + HOST_STEP,
        "optimizer": _update_seconds(plan, inputs, trained, gpu)
        + orthogonalization_flops(inputs, stored) / (gpu.peak * gpu.generation.products),
        "communication": links.exposed,
    }
    mfu = None
    if config.precision != "32-true":
        flops = flops_per_token(model_of(plan.model, inputs.lora), plan.model, plan.seq_length) * plan.tokens_per_step
        mfu = flops / sum(parts.values()) / (gpu.peak * inputs.strategy.layout.world_size)
    return Prediction(
        parts,
        links,
        plan.tokens_per_step,
        mfu,
        kernels=trace.total(lambda op: op.kind != "view"),
        bytes=trace.total(lambda op: op.bytes),
        notes=_notes(plan, inputs, host / busy),
    )


def _sharding_seconds(inputs: MemoryInputs, trained: int, gpu: GpuSpec) -> float:
    """Return the seconds per micro-batch that fsdp and ddp take to copy and cast the gradients of trained weights."""
    moved = 0.0
    if inputs.strategy.kind == "fsdp" and inputs.lora is None:
        # to fp32; between micro-batches they are added to those so far
        moved = inputs.compute_bytes + FP32 + (12 if inputs.accumulates_unsharded else 0)
    elif inputs.strategy.kind == "ddp":
        moved = 2 * inputs.weight_bytes / inputs.accumulation  # copied to the buckets
    return trained * moved / (gpu.bandwidth * BANDWIDTH_SHARE)


def _update_seconds(plan: RunPlan, inputs: MemoryInputs, trained: int, gpu: GpuSpec) -> float:
    """Return the seconds of norm, clipping and update on a device's shard.

    The update reads weights, gradients and state, and writes weights and state. A fused one does so once.
    """
    weights = trained * (inputs.dtype.itemsize if inputs.lora is None else FP32) / inputs.strategy.shards
    # gradients are read for the norm, and read and written to clip; fused Adam clips them in its update
    passes = 3 + (2 if inputs.optimizer["name"] in ("Adam", "AdamW") else 3)
    return (passes * weights + 2 * plan.memory.optimizer) / (gpu.bandwidth * BANDWIDTH_SHARE)


def _notes(plan: RunPlan, inputs: MemoryInputs, host_share: float) -> tuple[str, ...]:
    args, name = plan.config.args, inputs.optimizer["name"]
    is_exact = is_fused(inputs) and not inputs.has_masters and "state_dtype" not in inputs.optimizer
    products = ", and its matrix products" if name == Muon.__name__ else ""
    caveats = {
        f"the host launches for {host_share:.0%} of the GPU's time; with a slower host, steps take longer": host_share
        > 0.5,
        "each packed row counts as one document; shorter documents need less attention": inputs.packed,
        "each row counts with the maximum length; shorter rows are padded, or take less time": args.is_finetune
        and not inputs.packed,
        "--fsdp.cpu_offload: copies between CPU and GPU are not predicted": plan.config.strategy.offloads,
        "the forward pass of the objective's frozen model is not predicted": inputs.frozen is not None,
        "the objective's answers before each step are not predicted": args.objective.makes_batches,
        "--train.fp8: MFU is relative to the bf16 peak": inputs.fp8 != "none",
        "experts are assumed to have equal load": bool(plan.model.n_moe_layer),
        "--deterministic true: its kernels, which may be slower, are not predicted": args.deterministic,
        f"--compiler {plan.compiler[0]}: predicted as without a compiler": plan.compiler[0] not in ("none", "torch"),
        f"{name} counts as reading and writing weights and state once{products}; it may take longer": not is_exact,
    }
    return tuple(text for text, applies in caveats.items() if applies)
