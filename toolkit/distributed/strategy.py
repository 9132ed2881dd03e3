"""Choose the distributed strategy from the options and the world size."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from toolkit.config import AUTO, STRATEGIES, DDPArgs, FSDPArgs, Precision, none_if_auto
from toolkit.distributed.mesh import UNSHARDED, Layout, sharded_layout
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

    @property
    def shards(self) -> int:
        """Ranks over which the weights are sharded."""
        return self.layout.shard * self.layout.context

    def __str__(self) -> str:
        if self.extension is not None:
            return f"{self.extension}, {self.layout.world_size} devices ({self.reason})"
        if self.kind == "single":
            return f"one device ({self.reason})"
        if self.kind == "ddp":
            return f"ddp, {self.layout.replicate} replicas ({self.reason})"
        shards = f"{self.shards} shard{'s' if self.shards > 1 else ''}"
        replicas = f", {self.layout.replicate} replicas" if self.layout.replicate > 1 else ""
        return f"fsdp {self.sharding}, {self.units}, {shards}{replicas} ({self.reason})"


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

    ``model_parallel`` has the sizes of the pipeline, context and tensor dimensions; the others follow. A single device
    uses FSDP only to offload.

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
    if strategy == AUTO and ranks > 1:
        strategy = implied_strategy(fsdp, ddp) or AUTO
    plan = _plan(strategy, fsdp, model_parallel, devices, num_nodes)
    if (requested, strategy) == (AUTO, "ddp"):
        plan = replace(plan, reason="options of --ddp are given")
    offloads = fsdp.cpu_offload and accelerator in OFFLOADING
    if offloads and ranks == 1 and strategy in (AUTO, "fsdp", "fsdp2"):
        plan = StrategyPlan("fsdp", "FULL_SHARD", Layout(), "--fsdp.cpu_offload on one device")
    if offloads and plan.kind == "fsdp":
        plan = replace(plan, offloads=True)
    return plan if fsdp.auto_wrap == "block" else replace(plan, units=f"units by {fsdp.auto_wrap}")


def implied_strategy(fsdp: FSDPArgs, ddp: DDPArgs) -> Literal["ddp", "fsdp"] | None:
    """Return the strategy whose options are given; fsdp if both have options, None if neither has."""
    if fsdp != FSDPArgs():
        return "fsdp"
    return "ddp" if ddp != DDPArgs() else None


def sharding_strategy_of(fsdp: FSDPArgs) -> str:
    """Return FSDP's sharding strategy; auto is HYBRID_SHARD."""
    return "HYBRID_SHARD" if fsdp.sharding_strategy == AUTO else fsdp.sharding_strategy


def _plan(strategy: str, fsdp: FSDPArgs, model_parallel: Layout, devices: int, num_nodes: int) -> StrategyPlan:
    ranks, sharding = devices * num_nodes, sharding_strategy_of(fsdp)
    if ranks == 1 and model_parallel == UNSHARDED:
        reason = "only one available" if strategy in ("auto", "single") else f"{strategy} on one device is equivalent"
        if sharding not in ("HYBRID_SHARD", "NO_SHARD"):
            reason += f", nothing for --fsdp.sharding_strategy {sharding} to shard over"
        return StrategyPlan("single", None, Layout(), reason)
    if strategy == "ddp" and model_parallel == UNSHARDED:
        return StrategyPlan("ddp", None, Layout(replicate=ranks), "--strategy ddp")
    layout = sharded_layout(sharding, none_if_auto(fsdp.shard_size), model_parallel, devices, num_nodes)
    shards = layout.shard * layout.context
    reason = f"--fsdp.sharding_strategy {sharding}"
    if model_parallel != UNSHARDED:
        reason = f"{layout}"
    elif fsdp.shard_size != AUTO and sharding == "HYBRID_SHARD":
        reason = f"--fsdp.shard_size {shards}"
    elif sharding == "NO_SHARD":
        reason += ": replicas"
    elif shards == 1:
        reason += " with one device per node has no shards"
    elif sharding == "HYBRID_SHARD":
        where = f": sharded within each of {num_nodes} nodes, replicated between them"
        reason += " on one node is full sharding" if shards == ranks else where
    if shards == 1:
        sharding = "NO_SHARD"
    elif sharding == "HYBRID_SHARD" and layout.replicate == 1:
        sharding = "FULL_SHARD"
    return StrategyPlan("fsdp", sharding, layout, reason)
