"""Simulate a rank of a layout of any size in one process, to check the memory plan: no device, no other rank.

The model, the optimizer and the FSDP strategy are the run's. Tensors are fake: they have a shape, a dtype and a
storage size, but no data. The process group is fake as well: collectives return at once. Memory is the sum of the live
storages; the CUDA context, fragmentation and NCCL's buffers are not included. Blocks are not compiled.
"""

import multiprocessing
import os
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, cycle
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from threading import Thread
from typing import Any
from unittest import mock

import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.nn import functional as F

from toolkit.data.loader import exit_with_parent
from toolkit.distributed import ranks
from toolkit.distributed.fabric import block_dtype, build_fabric
from toolkit.distributed.pipeline import Pipeline
from toolkit.distributed.shards import shard_of
from toolkit.distributed.signals import hold_signals
from toolkit.distributed.world import WorldInfo
from toolkit.errors import UserError, notice, one_line
from toolkit.models import aligned, attention_dispatch, loss, mixed_mm
from toolkit.models.activation_checkpointing import checkpoint_blocks
from toolkit.models.block import Block
from toolkit.models.context_parallel import OPAQUE, ContextGroup
from toolkit.models.fp8 import gather_in_fp8
from toolkit.models.gpt import GPT
from toolkit.models.labels import TOKENS
from toolkit.models.quantize import Quantize, reserve_quantized
from toolkit.objectives.inputs import original_module
from toolkit.optim.classes import build_optimizer
from toolkit.optim.evaluation_weights import EvaluationWeights
from toolkit.optim.groups import block_params, no_decay_params
from toolkit.optim.update import Update, choose_update
from toolkit.private_torch import FakeTensorMode, collective_of, local_shard, skip_stage_negotiation, start_fake_group
from toolkit.training.step import train_step
from toolkit.training.time_breakdown import BACKWARD, FORWARD
from toolkit_plan.measure.cuda_on_meta import rms_norm_on_cuda
from toolkit_plan.measure.inputs import MemoryInputs, memory_inputs
from toolkit_plan.measure.recorder import ACTIVATIONS, WEIGHTS, Recorder, Storage, tensors_in
from toolkit_plan.measure.sample import micro_batch, objective_of, sample_model
from toolkit_plan.plan import RunPlan

GATHERED, GRADIENTS, OPTIMIZER, BUFFERS = "gathered weights", "gradients", "optimizer", "buffers"
HOST, GB = "in CPU memory", 1e9
KINDS = (WEIGHTS, GATHERED, GRADIENTS, OPTIMIZER, ACTIVATIONS, BUFFERS)
_GATHERS = ("c10d::_allgather_base_", "fsdp::split_with_sizes_copy")
_REDUCTIONS = ("c10d::_reduce_scatter_base_", "fsdp::chunk_cat")


@dataclass(frozen=True)
class Simulation:
    """A training step of a rank.

    Args:
        rank: The rank.
        memory: Bytes at the peak, by kind. ``activations`` includes logits, the head's gradient and temporary tensors.
        phase: When the peak occurs: forward, backward, update, or the passes of a pipeline.
        collectives: Operation, mesh dimensions of its group, calls and bytes of the largest tensors.
        seconds: Time that it took.
    """

    rank: int
    memory: dict[str, float]
    phase: str
    collectives: list[tuple[str, str, int, int]]
    seconds: float

    @property
    def peak(self) -> float:
        return sum(self.memory.values())


def simulate(inputs: MemoryInputs) -> Simulation:
    """Simulate two steps in a new process, where a fake process group affects nothing else, and return the second.

    The rank is the first, or with a pipeline the one of the first, second and last stage that needs most memory.
    """
    strategy = inputs.strategy
    if strategy.extension is not None:
        raise UserError(f"--simulate: does not support --strategy {strategy.extension}; use --strategy fsdp or ddp")
    if strategy.kind == "ddp" and inputs.has_masters:
        raise UserError("--simulate: does not support --precision bf16-master with ddp; use --precision bf16-mixed")
    layout, per_stage = strategy.layout, strategy.layout.world_size // strategy.layout.pipeline
    stages = sorted({0, min(1, layout.pipeline - 1), layout.pipeline - 1})
    simulations = (_simulate_in_child(inputs, stage * per_stage) for stage in stages)
    return max(simulations, key=lambda simulation: simulation.peak)


def _simulate_in_child(inputs: MemoryInputs, rank: int) -> Simulation:
    """Call :func:`_simulate` in a new process, which ends with this one or when it is interrupted."""
    notice(f"simulating rank {rank} of {inputs.strategy.layout.world_size} ...")
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send_simulation, args=(sender, inputs, rank), daemon=True)
    try:
        resource_tracker.ensure_running()  # it unblocks signals when it starts
        hold_signals(True)  # the child inherits this: Ctrl-C reaches all processes of a terminal
        try:
            process.start()
        finally:
            hold_signals(False)
        sender.close()
        result = receiver.recv()
    except (OSError, EOFError) as error:
        cause = "it was killed" if isinstance(error, EOFError) else one_line(error)
        raise UserError(f"--simulate: no process ({cause}); raise the limits: ulimit -a") from error
    finally:
        if process.pid is not None:
            process.kill()
            process.join()
    if isinstance(result, Exception):
        raise result
    return result


def compare_with_plan(plan: RunPlan) -> dict[str, Any]:
    """Simulate a planned run. Return its memory in GB by kind, with the plan's, and its collectives.

    The plan estimates every kind only for the end of the forward pass; at another peak, what stays and the total. Both
    totals are without the CUDA context and fragmentation.
    """
    memory, simulation = plan.memory, simulate(memory_inputs(plan.config, plan.model))
    weights = memory.weights + memory.adapters + memory.quantized_base + memory.frozen_model
    planned = {WEIGHTS: weights, OPTIMIZER: memory.optimizer}
    if simulation.phase == "forward":
        planned |= {
            GATHERED: memory.unsharded_unit,
            GRADIENTS: memory.gradients if memory.has_gradients_in_forward else 0.0,
            ACTIVATIONS: memory.activations + memory.cast_weights + memory.logits,
        }
    # the simulated step generates nothing
    planned["total"] = replace(memory, rollout=0.0).total - memory.context - memory.checkpoint_copy
    sizes = simulation.memory | {"total": simulation.peak}
    return {
        "rank": simulation.rank,
        "ranks": plan.config.strategy.layout.world_size,
        "seconds": round(simulation.seconds, 1),
        "phase": simulation.phase,
        "memory_gb": {
            name: (round(size / GB, 3), round(planned[name] / GB, 3) if name in planned else None)
            for name, size in sizes.items()
        },
        "collectives": [(*where, calls, round(size / GB, 3)) for *where, calls, size in simulation.collectives],
    }


# ---- in the process of the simulation


def _send_simulation(sender: Connection, inputs: MemoryInputs, rank: int) -> None:
    Thread(target=exit_with_parent, daemon=True).start()
    try:
        sender.send(_simulate(inputs, rank))
    except Exception as error:
        sender.send(error)


def _simulate(inputs: MemoryInputs, rank: int) -> Simulation:
    started = time.monotonic()
    start_fake_group(inputs.strategy.layout.world_size, rank)
    _choose_as_on(torch.device(inputs.device))
    fabric = _launched_fabric(inputs, rank)
    recorder, mode = StepRecorder(inputs), FakeTensorMode(allow_non_fake_inputs=True)
    if inputs.strategy.offloads:
        _offload(recorder)
    frozen = None  # before the trained model, as build_models does
    if (frozen_inputs := inputs.of_frozen()) is not None:
        frozen = _wrapped_model(fabric, frozen_inputs, mode, recorder, is_trained=False).eval()
    model = _wrapped_model(fabric, inputs, mode, recorder)
    with mode, recorder, recorder.resizes():
        module = original_module(model)
        no_decay, blocks = no_decay_params(module), block_params(module, (Block,))
        optimizer = build_optimizer(
            module, inputs.optimizer, 1e-4, inputs.precision, no_decay, inputs.optimizer_class, blocks
        )
        update = choose_update(fabric, model, fabric.setup_optimizers(optimizer), 1.0, in_backward=inputs.in_backward)
        recorder.follow(update)
        batches = [micro_batch(inputs, "cpu")] * inputs.accumulation
        step = partial(train_step, objective_of(frozen, inputs.config), update, batches, {TOKENS: inputs.tokens})
        averages = EvaluationWeights(optimizer, inputs.ema)
        step()  # creates the optimizer state, and receive buffers
        averages.update()
        with averages.active():  # they are in the optimizer's state
            recorder.start(nn.ModuleList(filter(None, [module, frozen])), optimizer)
        step()
        averages.update()
    memory, phase = recorder.peak()
    return Simulation(rank, memory, phase, recorder.collectives(), time.monotonic() - started)


def _choose_as_on(device: torch.device) -> None:
    """Let the models of this process choose as on a device, although their fake tensors are on the CPU."""
    chunk_rows, needs_alignment = loss.chunk_rows, aligned.needs_alignment
    patch = mock.patch.object
    patch(loss, "chunk_rows", lambda vocab_size, _: chunk_rows(vocab_size, device)).start()
    patch(aligned, "needs_alignment", lambda _, dtype: needs_alignment(device, dtype)).start()
    if device.type == "cuda":
        patch(F, "rms_norm", rms_norm_on_cuda).start()  # a CPU's saves more
        patch(attention_dispatch, "DEVICES", ("cpu",)).start()  # instead of masks
        patch(mixed_mm, "_has_fp32_results", lambda _: True).start()  # a CPU adds 16-bit copies


def _launched_fabric(inputs: MemoryInputs, rank: int) -> Fabric:
    layout, strategy = inputs.strategy.layout, inputs.strategy
    nodes = layout.pipeline * layout.replicate
    devices = layout.world_size // nodes
    if strategy.kind == "ddp":  # its buckets are filled in C++, which needs data: see _add_buckets
        strategy, nodes = replace(strategy, kind="single"), 1
    world = WorldInfo(devices, nodes, *divmod(rank, devices), "manual", starts_processes=False)
    os.environ["LOCAL_RANK"] = str(world.local_rank)
    fabric = build_fabric(
        strategy, world, accelerator="cpu", precision=inputs.precision, fsdp=inputs.fsdp, ddp=inputs.ddp,
        block_classes={Block},
    )  # fmt: skip
    fabric.launch()
    return fabric


def _wrapped_model(
    fabric: Fabric, inputs: MemoryInputs, mode: FakeTensorMode, recorder: "StepRecorder", is_trained: bool = True
) -> Any:
    """Do what :func:`toolkit.training.model_spec.build_model` does, without data."""
    layout, unsharded = inputs.strategy.layout, replace(inputs.strategy, kind="single")
    with mode:
        model = sample_model(replace(inputs, strategy=unsharded), "cpu", ranks.group("tensor"))
    if not is_trained:
        model.requires_grad_(False)
    elif inputs.quantize is not None:
        _quantize(fabric, model, inputs.quantize, recorder, mode)
    if layout.pipeline > 1:
        skip_stage_negotiation()
        Pipeline(model, inputs.schedule, fabric.device, fabric.autocast)
    if layout.context > 1:
        model.execute_with(context=ContextGroup.of(ranks.group("context")))
    if (inputs.strategy.kind, inputs.sums_in_fp32) == ("single", True):  # as build_models
        for parameter in model.parameters():
            parameter.grad_dtype = torch.float32
    checkpoint_blocks(model, (Block,), inputs.activation_checkpointing)
    with nullcontext() if inputs.strategy.kind == "fsdp" else mode:  # where a mesh cannot be built
        wrapped = fabric.setup(model, move_to_device=False)
        if inputs.strategy.kind == "ddp" and is_trained:
            _add_buckets(inputs, wrapped, recorder)
    if inputs.gathers_fp8:
        gather_in_fp8(wrapped, "cpu")
    return wrapped


def _quantize(fabric: Fabric, model: GPT, kind: Quantize, recorder: "StepRecorder", mode: FakeTensorMode) -> None:
    """Quantize the weights. bitsandbytes' own parameter of one device cannot be fake, so FSDP's kind replaces it."""
    weights = dict(model.named_parameters())
    storage = block_dtype(fabric, weights["lm_head.weight"].dtype) or torch.uint8
    reserved = reserve_quantized(model, kind, storage, weights.__getitem__, fabric.device)
    with mode, recorder:  # the scales are not parameters
        for name, pack in reserved.items():
            model.get_submodule(name.removesuffix(".weight")).weight = nn.Parameter(pack(), False)
        for record, _, _ in recorder.changes:
            record.kind = WEIGHTS


def _offload(recorder: "StepRecorder") -> None:
    """Copy between devices, although both are this CPU: what leaves a shard is on the device, and gradients are not."""
    to = Tensor.to

    def copy(tensor: Tensor, *args: Any, **options: Any) -> Tensor:
        if not (args and isinstance(args[0], torch.device) and tensor.is_floating_point()):
            return to(tensor, *args, **options)
        copied = tensor.clone()
        if recorder.track(tensor).kind != HOST:
            recorder.track(copied, HOST)
        return copied

    mock.patch.multiple(Tensor, to=copy, pin_memory=lambda tensor: tensor).start()


def _add_buckets(inputs: MemoryInputs, model: nn.Module, recorder: "StepRecorder") -> None:
    """Keep DDP's buckets. In the last micro-batch, gradients are copied to them and may become views of them."""

    def reduce(bucket: Tensor, is_last: Iterator[bool], parameter: nn.Parameter) -> None:
        if next(is_last) and inputs.ddp.gradient_as_bucket_view:
            parameter.grad = bucket

    for parameter in model.parameters():
        if parameter.requires_grad:
            is_last = cycle(i + 1 == inputs.accumulation for i in range(inputs.accumulation))
            bucket = torch.empty_like(parameter)
            recorder.track(bucket).kind = GRADIENTS
            parameter.register_post_accumulate_grad_hook(partial(reduce, bucket, is_last))


class StepRecorder(Recorder):
    """Records allocations, frees and collectives. For its phases, see :class:`Simulation`."""

    def __init__(self, inputs: MemoryInputs) -> None:
        super().__init__("passes" if inputs.strategy.layout.pipeline > 1 else "forward")
        self._offloads, self._first, self._start = inputs.strategy.offloads, self.phase, 0
        self._earlier, self._model = -1, nn.Module()
        self._collectives: dict[tuple[str, str], tuple[int, int]] = {}  # calls and bytes, by name and mesh

    def follow(self, update: Update) -> None:
        """Record the phase and the gradients of an update."""
        complete, self._model = update.norm, update.model

        def norm() -> Tensor:
            self.phase, total = "update", complete()
            self._track_gradients()
            return total

        update.norm = norm  # type: ignore[method-assign]

    def _track_gradients(self) -> None:
        for parameter in self._model.parameters():
            if parameter.grad is not None:
                self.track(local_shard(parameter.grad), self._place(parameter, GRADIENTS))

    def start(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Measure from now on, with the kinds of what exists between steps."""
        self.phase, self._start = self._first, len(self.changes)
        self._collectives.clear()
        for parameter in model.parameters():
            shard = shard_of(parameter)
            self.track(local_shard(shard), self._place(parameter, WEIGHTS))
            self.track_all(tensors_in(optimizer.state.get(shard, {})), self._place(parameter, OPTIMIZER))
        self.track_all(model.buffers(), BUFFERS)

    def _place(self, parameter: Tensor, kind: str) -> str:
        return HOST if self._offloads and hasattr(parameter, "to_local") else kind

    def track(self, tensor: Tensor, kind: str = "") -> Storage:
        """Record a tensor's storage, and its kind if known."""
        record = super().track(tensor)
        # the head's gradient, computed with the loss, counts as the plan counts it: with the logits of its micro-batch
        if kind and not (kind == GRADIENTS and record.made_in == "forward" and record.number > self._earlier):
            record.kind = kind
        return record

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (operator := OPAQUE.get(_name(func))) is None:
            return super().__torch_dispatch__(func, types, args, kwargs)
        with self:
            return operator(*args, **(kwargs or {}))

    def record(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        name = _name(func)
        if name == "profiler::_record_function_enter_new" and args[0] in (FORWARD, BACKWARD):
            self.phase = args[0].removeprefix("toolkit::")
            if args[0] == FORWARD:
                self._earlier = Storage(None).number  # what exists now is from earlier micro-batches
                self._track_gradients()
        for kind, names in ((GATHERED, _GATHERS), (GRADIENTS, _REDUCTIONS)):
            for tensor in tensors_in((args, kwargs)) if name in names else ():
                record = self.find(tensor.untyped_storage())
                if record is None or record.kind != WEIGHTS:
                    self.track(tensor, kind)
        if (collective := collective_of(func, out, args, kwargs)) is not None:
            members, size = collective
            key = name.removeprefix("c10d::").strip("_"), _dimensions(members)
            calls, total = self._collectives.get(key, (0, 0))
            self._collectives[key] = calls + 1, total + size

    def peak(self) -> tuple[dict[str, float], str]:
        """Return the bytes by kind at the peak, and its phase."""
        totals = list(accumulate(change * (record.kind != HOST) for record, change, _ in self.changes))
        end = max(range(self._start, len(totals)), key=totals.__getitem__)
        sizes: dict[str, float] = dict.fromkeys(KINDS, 0.0)
        for record, change, _ in self.changes[: end + 1]:
            if record.kind != HOST:
                sizes[record.kind] += change
        return sizes, self.changes[end][2]

    def collectives(self) -> list[tuple[str, str, int, int]]:
        return [(*key, calls, total) for key, (calls, total) in sorted(self._collectives.items())]


def _name(func: Any) -> str:
    return str(func.name().split(".")[0])


def _dimensions(members: list[int]) -> str:
    """Return the mesh dimensions in which the ranks of a group differ."""
    layout = ranks.layout()
    places = [layout.coordinates(rank) for rank in members]
    return " x ".join(name for name in places[0] if len({place[name] for place in places}) > 1) or "this rank"
