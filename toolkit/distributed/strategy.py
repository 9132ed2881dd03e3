"""Choose the distributed strategy from the options and the world size."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from toolkit.config import AUTO, STRATEGIES, DDPArgs, FSDPArgs, Precision
from toolkit.distributed.mesh import UNSHARDED, Layout, data_devices
from toolkit.extension import load_registered

OFFLOADING = ("cuda",)
"""Accelerators that can offload to CPU memory."""


@dataclass(frozen=True)
class StrategyPlan:
    """The strategy of a run.

    Args:
        sharding: Name of torch's sharding strategy if ``kind`` is "fsdp".
        layout: Sizes of the mesh dimensions.
        reason: Why this strategy was chosen, for display.
        units: FSDP's units, for display.
        offloads: Whether FSDP keeps its shards in CPU memory instead of device memory.
        extension: Name of an extension's strategy. ``kind`` is then the built-in strategy with similar memory use.
    """

    kind: Literal["single", "ddp", "fsdp"]
    sharding: str | None
    layout: Layout
    reason: str
    units: str = "one unit per block"
    offloads: bool = False
    extension: str | None = None
    engine: Literal["fsdp1", "fsdp2"] = "fsdp1"

    @property
    def shards(self) -> int:
        """Ranks per model replica."""
        return self.layout.shard

    def __str__(self) -> str:
        if self.extension is not None:
            return f"{self.extension}, {self.layout.world_size} devices ({self.reason})"
        if self.kind == "single":
            return f"one device ({self.reason})"
        if self.kind == "ddp":
            return f"ddp, {self.layout.replicate} replicas ({self.reason})"
        shards = f"{self.shards} shard{'s' if self.shards > 1 else ''}"
        replicas = f", {self.layout.replicate} replicas" if self.layout.replicate > 1 else ""
        name = "fsdp2" if self.engine == "fsdp2" else "fsdp"
        return f"{name} {self.sharding}, {self.units}, {shards}{replicas} ({self.reason})"


class StrategyExtension(Protocol):
    """Interface of a distributed strategy that an extension provides.

    ``groups`` maps each option group to its options.
    """

    def plan(
        self, groups: Mapping[str, Any], *, devices: int, num_nodes: int, accelerator: str, precision: Precision
    ) -> StrategyPlan:
        """Return the plan with its layout. ``kind`` is "fsdp" if weights are sharded, otherwise "ddp".

        Raises:
            UserError: These devices do not support the strategy.
        """

    def build(
        self, plan: StrategyPlan, groups: Mapping[str, Any], *, precision: Precision, block_classes: set[type]
    ) -> tuple[type, dict[str, Any]]:
        """Return a subclass of Fabric's ``ParallelStrategy`` and its keyword arguments."""


def plan_strategy(
    strategy: str,
    fsdp: FSDPArgs,
    ddp: DDPArgs,
    *,
    devices: int,
    num_nodes: int,
    accelerator: str,
    precision: Precision,
    model_parallel: Layout = UNSHARDED,
    groups: Mapping[str, Any] | None = None,
) -> StrategyPlan:
    """Choose the strategy and its layout. ``groups``: see :class:`StrategyExtension`.

    ``model_parallel`` has the sizes of the pipeline, context and tensor dimensions; the others follow.

    fsdp with shard groups of one rank becomes ddp, because torch would not synchronize the replicas (N4). A single
    device uses FSDP only to offload.

    Raises:
        UserError: these devices do not support the strategy, or one of its options has no effect.
    """
    ranks = devices * num_nodes
    if strategy not in STRATEGIES:
        planned: StrategyPlan = load_registered("strategies", strategy)().plan(
            groups or {}, devices=devices, num_nodes=num_nodes, accelerator=accelerator, precision=precision
        )
        return replace(planned, extension=strategy)
    requested = strategy
    engine: Literal["fsdp1", "fsdp2"] = "fsdp2" if strategy == "fsdp2" else "fsdp1"
    strategy = "fsdp" if engine == "fsdp2" else strategy
    if strategy == AUTO and ranks > 1:
        strategy = implied_strategy(fsdp, ddp) or AUTO
    plan = _plan(strategy, sharding_of(fsdp), *data_devices(model_parallel, devices, num_nodes))
    if model_parallel != UNSHARDED:
        plan = _add_model_parallel(plan, model_parallel)
        engine = "fsdp2"
    if engine == "fsdp2" and plan.kind == "ddp":
        plan = replace(plan, kind="fsdp", sharding="NO_SHARD")
    if (requested, strategy) == (AUTO, "ddp"):
        plan = replace(plan, reason="options of --ddp are given")
    offloads = fsdp.cpu_offload and accelerator in OFFLOADING
    if offloads and ranks == 1 and strategy in ("auto", "fsdp"):
        plan = StrategyPlan("fsdp", "FULL_SHARD", Layout(), "--fsdp.cpu_offload on one device")
    if offloads and plan.kind == "fsdp":
        plan = replace(plan, offloads=True)
    if fsdp.auto_wrap != "block":
        plan = replace(plan, units=f"units by {fsdp.auto_wrap}")
    return replace(plan, engine=engine)


def _add_model_parallel(plan: StrategyPlan, sizes: Layout) -> StrategyPlan:
    """Add the dimensions of model parallelism to a plan. The weights are those of fsdp, whatever their sharding."""
    layout = replace(plan.layout, pipeline=sizes.pipeline, context=sizes.context, tensor=sizes.tensor)
    sharding = plan.sharding or ("NO_SHARD" if layout.shard * layout.context == 1 else "FULL_SHARD")
    return replace(plan, kind="fsdp", sharding=sharding, layout=layout, reason=f"{layout}")


def implied_strategy(fsdp: FSDPArgs, ddp: DDPArgs) -> Literal["ddp", "fsdp"] | None:
    """Return the strategy whose options are given; fsdp if both have options, None if neither has."""
    if fsdp != FSDPArgs():
        return "fsdp"
    return "ddp" if ddp != DDPArgs() else None


def sharding_of(fsdp: FSDPArgs) -> str:
    """Return FSDP's sharding strategy; auto is HYBRID_SHARD."""
    return "HYBRID_SHARD" if fsdp.sharding_strategy == AUTO else fsdp.sharding_strategy


def _plan(strategy: str, sharding: str, devices: int, num_nodes: int) -> StrategyPlan:
    ranks = devices * num_nodes
    if ranks == 1:
        reason = "only one available" if strategy in ("auto", "single") else f"{strategy} on one device is equivalent"
        if sharding not in ("HYBRID_SHARD", "NO_SHARD"):
            reason += f", nothing for --fsdp.sharding_strategy {sharding} to shard over"
        return StrategyPlan("single", None, Layout(), reason)
    if strategy == "ddp":
        return StrategyPlan("ddp", None, Layout(replicate=ranks), "--strategy ddp")
    flag = f"--fsdp.sharding_strategy {sharding}"
    if sharding == "NO_SHARD":
        return StrategyPlan("ddp", None, Layout(replicate=ranks), f"{flag}: replicas")
    if sharding == "HYBRID_SHARD":
        if devices == 1:
            return StrategyPlan("ddp", None, Layout(replicate=ranks), f"{flag} with one device per node has no shards")
        if num_nodes == 1:
            reason = f"{flag} on one node is full sharding"
            return StrategyPlan("fsdp", "FULL_SHARD", Layout(shard=devices), reason)
        reason = f"{flag}: sharded within each of {num_nodes} nodes, replicated between them"
        return StrategyPlan("fsdp", "HYBRID_SHARD", Layout(replicate=num_nodes, shard=devices), reason)
    return StrategyPlan("fsdp", sharding, Layout(shard=ranks), flag)
