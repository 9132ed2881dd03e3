"""Simulate a rank of a layout of any size in one process, to check the memory plan: no device, no other rank.

The model, the optimizer and the FSDP strategy are the run's. Tensors are fake: they have a shape, a dtype and a
storage size, but no data. The process group is fake as well: collectives return at once. Memory is the sum of the live
storages; the CUDA context, fragmentation and NCCL's buffers are not included. Blocks are not compiled.
"""

import multiprocessing
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from toolkit.distributed import ranks
from toolkit.distributed.fsdp import FullyShardedStrategy, fsdp_strategy
from toolkit.distributed.pipeline import Pipeline, pipeline_of
from toolkit.distributed.shards import shard_of
from toolkit.errors import UserError, one_line
from toolkit.measure.cuda_on_meta import rms_norm_on_cuda
from toolkit.measure.inputs import MemoryInputs
from toolkit.measure.recorder import ACTIVATIONS, WEIGHTS, Recorder, Storage, tensors_in
from toolkit.measure.sample import micro_batch, sample_model
from toolkit.models import aligned, loss, mixed_mm
from toolkit.models.activation_checkpointing import checkpoint_blocks
from toolkit.models.block import Block
from toolkit.models.context_parallel import OPAQUE, ContextGroup
from toolkit.optim.classes import build_optimizer
from toolkit.optim.groups import block_params, no_decay_params
from toolkit.planning.plan import RunPlan
from toolkit.planning.resolve import memory_inputs
from toolkit.private_torch import (
    FakeTensorMode,
    collective_of,
    local_shard,
    skip_stage_negotiation,
    start_fake_group,
)

GATHERED, GRADIENTS, OPTIMIZER, BUFFERS = "gathered weights", "gradients", "optimizer", "buffers"
GB = 1e9
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


def simulate(setup: MemoryInputs) -> Simulation:
    """Simulate two steps in a new process, where a fake process group affects nothing else, and return the second.

    The rank is the first, or with a pipeline the one of the first, second and last stage that needs most memory.
    """
    _require_support(setup)
    layout = setup.strategy.layout
    per_stage = layout.world_size // layout.pipeline
    found = []
    for stage in sorted({0, min(1, layout.pipeline - 1), layout.pipeline - 1}):
        print(f"simulating rank {stage * per_stage} of {layout.world_size} ...", file=sys.stderr, flush=True)
        try:
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
                found.append(process.submit(_simulate, setup, stage * per_stage).result())
        except (OSError, BrokenProcessPool) as error:
            raise UserError(f"--simulate: no process ({one_line(error)}); raise the limits: ulimit -a") from error
    return max(found, key=lambda simulation: simulation.peak)


def compare_with_plan(plan: RunPlan) -> dict[str, Any]:
    """Simulate a planned run. Return its memory in GB by kind, with the plan's, and its collectives.

    The plan estimates every kind only for the end of the forward pass; at another peak, what stays and the total. Both
    totals are without the CUDA context and fragmentation.
    """
    memory, simulation = plan.memory, simulate(memory_inputs(plan.config, plan.model))
    planned = {WEIGHTS: memory.weights + memory.adapters, OPTIMIZER: memory.optimizer}
    if simulation.phase == "forward":
        planned |= {
            GATHERED: memory.unsharded_unit,
            GRADIENTS: memory.gradients if memory.has_gradients_in_forward else 0.0,
            ACTIVATIONS: memory.activations + memory.cast_weights + memory.logits,
        }
    planned["total"] = memory.total - memory.context - memory.checkpoint_copy
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


def _require_support(setup: MemoryInputs) -> None:
    strategy, layout = setup.strategy, setup.strategy.layout
    if strategy.kind != "fsdp" or strategy.extension is not None:
        fix = "--devices 8" if layout.world_size == 1 else "--strategy fsdp"
        raise UserError(f"--simulate: simulates FSDP, but the strategy is {strategy}; use {fix}")
    options = {
        "--tensor_parallel_size": layout.tensor > 1,
        "--quantize": setup.quantize is not None,
        "--fsdp.cpu_offload": strategy.offloads,
        "a frozen model": setup.frozen is not None,
    }
    for option, is_set in options.items():
        if is_set:
            raise UserError(f"--simulate: {option} is not supported with it; remove one of them")


# ---- in the process of the simulation


def _simulate(setup: MemoryInputs, rank: int) -> Simulation:
    started = time.monotonic()
    layout = setup.strategy.layout
    start_fake_group(layout.world_size, rank)
    ranks.set_layout(layout)
    device, chunk_rows, needs_alignment = torch.device(setup.device), loss.chunk_rows, aligned.needs_alignment
    setattr(loss, "chunk_rows", lambda vocab_size, _: chunk_rows(vocab_size, device))  # noqa: B010
    setattr(aligned, "needs_alignment", lambda _, dtype: needs_alignment(device, dtype))  # noqa: B010
    if device.type == "cuda":
        setattr(F, "rms_norm", rms_norm_on_cuda)  # noqa: B010  # a CPU's saves more
        setattr(mixed_mm, "_has_fp32_results", lambda _: True)  # noqa: B010  # a CPU adds 16-bit copies
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        model = sample_model(replace(setup, strategy=replace(setup.strategy, kind="single")), "cpu")
        batch = micro_batch(setup, "cpu")
    strategy = fsdp_strategy(setup.strategy, setup.fsdp, setup.precision, "cpu", {Block})
    strategy.num_nodes = layout.pipeline * layout.replicate
    strategy.parallel_devices = [torch.device("cpu")] * (layout.world_size // strategy.num_nodes)
    if layout.pipeline > 1:
        skip_stage_negotiation()
        Pipeline(model, setup.schedule, torch.device("cpu"), strategy.precision.forward_context)
    if layout.context > 1:
        model.execute_with(context=ContextGroup.of(ranks.group("context")))
    checkpoint_blocks(model, (Block,), setup.activation_checkpointing)
    strategy.setup_module(model)  # not in the mode, where a mesh cannot be built
    with mode:
        no_decay, blocks = no_decay_params(model), block_params(model, (Block,))
        optimizer = build_optimizer(
            model, setup.optimizer, 1e-4, setup.precision, no_decay, setup.optimizer_class, blocks
        )
        recorder = StepRecorder()
        step = partial(_step, strategy, model, optimizer, batch, setup.accumulation, recorder)
        with recorder, recorder.resizes():
            step()  # creates the optimizer state, and receive buffers
            recorder.start(model, optimizer)
            step()
    memory, phase = recorder.peak()
    return Simulation(rank, memory, phase, recorder.collectives(), time.monotonic() - started)


def _step(
    strategy: FullyShardedStrategy,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: dict[str, Any],
    accumulation: int,
    recorder: "StepRecorder",
) -> None:
    """Do what :func:`toolkit.training.step.train_step` does, without reading values."""
    sync: Any = strategy._backward_sync_control
    if (pipeline := pipeline_of(model)) is not None:
        recorder.phase = "passes"
        pipeline.accumulate([batch] * accumulation, 1.0)
    for i in range(0 if pipeline else accumulation):
        with sync.no_backward_sync(model, i < accumulation - 1):
            recorder.phase = "forward"
            with strategy.precision.forward_context():
                loss_sum, _ = model(**batch)
            recorder.phase = "backward"
            loss_sum.backward()
            del loss_sum
    recorder.phase = "update"
    strategy.gradient_norm(model)
    for parameter in model.parameters():
        if parameter.grad is not None:
            recorder.track(local_shard(parameter.grad), GRADIENTS)
    strategy.optimizer_step(optimizer)
    optimizer.zero_grad()


class StepRecorder(Recorder):
    """Records allocations, frees and collectives. For its phases, see :class:`Simulation`."""

    def __init__(self) -> None:
        super().__init__("forward")
        self._start = 0
        self._calls, self._bytes = Counter[tuple[str, str]](), Counter[tuple[str, str]]()  # by collective and place

    def start(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Measure from now on, with the kinds of what exists between steps."""
        self._start = len(self.changes)
        self._calls.clear()
        self._bytes.clear()
        self.track_all((local_shard(shard_of(parameter)) for parameter in model.parameters()), WEIGHTS)
        self.track_all(model.buffers(), BUFFERS)
        self.track_all(tensors_in(list(optimizer.state.values())), OPTIMIZER)

    def track(self, tensor: Tensor, kind: str = "") -> Storage:
        """Record a tensor's storage, and its kind if known."""
        record = super().track(tensor)
        # the head's gradient, computed with the loss, counts as the plan counts it: with the logits
        if kind and not (kind == GRADIENTS and record.made_in == "forward"):
            record.kind = kind
        return record

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (operator := OPAQUE.get(_name(func))) is None:
            return super().__torch_dispatch__(func, types, args, kwargs)
        with self:
            return operator(*args, **(kwargs or {}))

    def record(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        name = _name(func)
        for kind, names in ((GATHERED, _GATHERS), (GRADIENTS, _REDUCTIONS)):
            for tensor in tensors_in((args, kwargs)) if name in names else ():
                record = self.live.get(tensor.untyped_storage()._cdata)
                if record is None or record.kind != WEIGHTS:
                    self.track(tensor, kind)
        if (collective := collective_of(func, out, args, kwargs)) is not None:
            members, size = collective
            key = name.removeprefix("c10d::").strip("_"), _dimensions(members)
            self._calls[key] += 1
            self._bytes[key] += size

    def peak(self) -> tuple[dict[str, float], str]:
        """Return the bytes by kind at the peak, and its phase."""
        totals = list(accumulate(change for _, change, _ in self.changes))
        end = max(range(self._start, len(totals)), key=totals.__getitem__)
        sizes: dict[str, float] = dict.fromkeys(KINDS, 0.0)
        for record, change, _ in self.changes[: end + 1]:
            sizes[record.kind] += change
        return sizes, self.changes[end][2]

    def collectives(self) -> list[tuple[str, str, int, int]]:
        return [(*key, calls, self._bytes[key]) for key, calls in sorted(self._calls.items())]


def _name(func: Any) -> str:
    return str(func.name().split(".")[0])


def _dimensions(members: list[int]) -> str:
    """Return the mesh dimensions in which the ranks of a group differ."""
    layout = ranks.layout()
    places = [layout.coordinates(rank) for rank in members]
    return " x ".join(name for name in places[0] if len({place[name] for place in places}) > 1) or "this rank"
