"""Predict the time of a micro-step: a roofline over the operators that the run dispatches.

An operator takes the maximum of bytes / memory bandwidth and FLOPs / rate of its kind, and the time to start a kernel.
docs/predictions.md compares predictions with measurements and published figures.
"""

from toolkit.distributed.gpus import GpuSpec
from toolkit_plan.measure.fusion import FUSED, fuse
from toolkit_plan.measure.inputs import FP32, MemoryInputs
from toolkit_plan.measure.operators import Op
from toolkit_plan.measure.trace import LOSS, Trace, trace_micro_step

BANDWIDTH_SHARE = 0.88
"""Fraction of the data sheet's bandwidth: large copies reached 3.0 of 3.35 TB/s on an H100, 4.3 of 4.8 on an H200."""
EAGER_SHARE = 0.6
"""The same for element-wise operators and reductions that are not compiled: fits an eager step of GPT-2 on an H100."""
LOSS_READS = 2
"""Reads of the logits by the loss kernel: maximum and sum, then the gradient. A row exceeds the registers."""
FP32_SHARE = 0.75
"""Fraction of the fp32 peak that matrix products reach."""
SMALL_HEAD_SHARE = 0.65
"""Rate of attention with heads of 64 or fewer, relative to heads of 128 (cuDNN on H100: 395 of 617 TFLOP/s)."""
KERNEL_S = 3e-6
"""Seconds to start and end a kernel."""
HOST_OPERATOR, HOST_VIEW = 18e-6, 4e-6
"""Host seconds per operator (Python, autograd and launch), and per view: measured on a Xeon, with tiny tensors."""
HOST_GRAPH, HOST_COMPILED = 80e-6, 5e-6
"""Host seconds to enter a compiled block (guards, saved tensors), and per kernel of the block."""
HOST_UNIT = 1e-3
"""Host seconds for the hooks of an FSDP unit, per forward or backward pass."""


def micro_step_seconds(inputs: MemoryInputs, is_compiled: bool, gpu: GpuSpec) -> float:
    """Return the seconds of a micro-step on one device, without communication."""
    trace = traced_kernels(inputs, is_compiled)
    return max(trace.total(lambda op: seconds(op, gpu)), host_seconds(trace, inputs, is_compiled))


def traced_kernels(inputs: MemoryInputs, is_compiled: bool) -> Trace:
    """Return the operators of a micro-step that adds to the gradients of earlier ones, fused as torch.compile does."""
    has_gradients = inputs.accumulation > 1 and inputs.strategy.kind != "fsdp"
    trace = trace_micro_step(inputs, has_gradients, is_compiled)
    return trace._replace(ops=fuse(trace.ops)) if is_compiled else trace


def seconds(op: Op, gpu: GpuSpec) -> float:
    """Return the time of an operator on the GPU."""
    if op.kind == "view":
        return 0.0
    rates = gpu.generation
    if op.itemsize >= FP32:
        rate = FP32_SHARE * gpu.fp32
    elif op.kind == "attention":
        rate = gpu.peak * (rates.backward if op.is_backward else rates.forward)
    else:
        peak = gpu.peak if op.itemsize > 1 else gpu.fp8 or 2 * gpu.peak  # another GPU may stand for an unknown one
        rate = peak * (rates.products if op.is_aligned else rates.unaligned)
    if op.kind == "attention":
        rate *= SMALL_HEAD_SHARE if op.head_size <= 64 else 1.0
        rate *= rates.masked if "efficient" in op.name else 1.0
        rate *= rates.flash if op.name.startswith("flash_attention") else 1.0
    is_eager = op.kind == "fusable" and op.name != FUSED
    bandwidth = gpu.bandwidth * (EAGER_SHARE if is_eager else BANDWIDTH_SHARE)
    again = (LOSS_READS - 1) * sum(access.bytes for access in op.reads) if op.layer == LOSS else 0
    return max((op.bytes + again) / bandwidth, op.flops / rate) + KERNEL_S


def host_seconds(trace: Trace, inputs: MemoryInputs, is_compiled: bool) -> float:
    """Return the host seconds to launch a micro-step."""

    def launch(op: Op) -> float:
        in_graph = is_compiled and op.layer is not None
        return HOST_VIEW if op.kind == "view" else HOST_COMPILED if in_graph else HOST_OPERATOR

    per_pass = HOST_GRAPH * is_compiled + HOST_UNIT * (inputs.strategy.kind == "fsdp")
    return trace.total(launch) + 2 * per_pass * sum(trace.counts)
