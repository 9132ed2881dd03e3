"""Which strategy a run gets, and why: a pure function of what was asked for and where it runs."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from toolkit.args import DDPArgs, FSDPArgs, Precision, Strategy
from toolkit.errors import UserError


@dataclass(frozen=True)
class StrategyPlan:
    """The strategy of a run.

    Args:
        kind: What is built.
        sharding: torch's name of the sharding strategy, where ``kind`` is "fsdp".
        mesh: (shards,) or (replicas, shards); their product is the number of ranks. (ranks, 1) for whole copies.
        reason: For people.
    """

    kind: Literal["single", "ddp", "fsdp"]
    sharding: str | None
    mesh: tuple[int, ...]
    reason: str

    @property
    def shards(self) -> int:
        """Ranks that share one copy of the model."""
        return self.mesh[-1]

    def __str__(self) -> str:
        if self.kind == "single":
            return f"one device ({self.reason})"
        if self.kind == "ddp":
            return f"ddp, {self.mesh[0]} whole copies ({self.reason})"
        copies = f", {self.mesh[0]} copies" if len(self.mesh) == 2 else ""
        return f"fsdp {self.sharding}, one unit per block, {self.shards} shards{copies} ({self.reason})"


def plan_strategy(
    strategy: Strategy,
    fsdp: FSDPArgs,
    ddp: DDPArgs,
    *,
    devices: int,
    num_nodes: int,
    accelerator: str,
    precision: Precision,
) -> StrategyPlan:
    """Decide the strategy, with its mesh written out.

    A shard group of one rank becomes ddp: torch would train copies that never meet (N4).

    Raises:
        UserError: the strategy cannot be had on these devices, or an option of it would have no effect.
    """
    ranks = devices * num_nodes
    plan = _plan(strategy, fsdp.sharding_strategy, devices, num_nodes)
    if ranks > 1 and strategy == "single":
        raise UserError(f"--strategy single: is for one device, and there are {ranks}; use auto, fsdp or ddp")
    if ranks > 1 and accelerator == "mps":
        raise UserError(f"--devices {ranks}: mps has one device; use --devices 1 or --accelerator cpu")
    if plan.kind != "fsdp":
        _require_defaults("fsdp", fsdp, ("sharding_strategy", "state_dict_type"), f"nothing is sharded: {plan}")
        if strategy == "ddp" and fsdp.sharding_strategy not in ("HYBRID_SHARD", "NO_SHARD"):
            raise UserError(
                f"--fsdp.sharding_strategy {fsdp.sharding_strategy}: contradicts --strategy ddp; leave one out"
            )
    if plan.kind != "ddp":
        _require_defaults("ddp", ddp, (), f"the strategy is {plan}")
    _require_dtypes(fsdp, precision)
    return plan


def _require_defaults(group: str, args: FSDPArgs | DDPArgs, but: tuple[str, ...], why: str) -> None:
    for field in fields(args):
        value = getattr(args, field.name)
        if field.name not in but and value != field.default:
            raise UserError(f"--{group}.{field.name} {value}: would have no effect, {why}")


def _require_dtypes(fsdp: FSDPArgs, precision: Precision) -> None:
    """Refuse dtypes that the precision cannot compute with."""
    fits = {"32-true": ("fp32",), "bf16-true": ("bf16",), "bf16-mixed": ("bf16", "fp32"), "16-mixed": ("fp16", "fp32")}
    if fsdp.param_dtype is not None and fsdp.param_dtype not in fits[precision]:
        hint = {"bf16": "bf16-mixed", "fp16": "16-mixed", "fp32": "32-true"}[fsdp.param_dtype]
        raise UserError(
            f"--fsdp.param_dtype {fsdp.param_dtype}: does not go with --precision {precision}; use --precision {hint}"
        )
    if fsdp.reduce_dtype == "fp16" and precision != "16-mixed":
        raise UserError("--fsdp.reduce_dtype fp16: needs the gradient scaler of --precision 16-mixed; use bf16 or fp32")


def _plan(strategy: Strategy, sharding: str, devices: int, num_nodes: int) -> StrategyPlan:
    ranks = devices * num_nodes
    if ranks == 1:
        reason = "there is only one" if strategy in ("auto", "single") else f"{strategy} on one device is the same"
        if sharding not in ("HYBRID_SHARD", "NO_SHARD"):
            reason += f", nothing for --fsdp.sharding_strategy {sharding} to shard over"
        return StrategyPlan("single", None, (1, 1), reason)
    whole = StrategyPlan("ddp", None, (ranks, 1), "")
    if strategy == "ddp":
        return _because(whole, "--strategy ddp")
    asked = f"--fsdp.sharding_strategy {sharding}"
    if sharding == "NO_SHARD":
        return _because(whole, f"{asked}: whole copies")
    if sharding == "HYBRID_SHARD":
        if devices == 1:
            return _because(whole, f"{asked} with one device per node leaves nothing to shard over")
        if num_nodes == 1:
            reason = f"{asked} on one node is full sharding over it"
            return StrategyPlan("fsdp", "FULL_SHARD", (devices,), reason)
        reason = f"{asked}: sharded within each of {num_nodes} nodes, copied between them"
        return StrategyPlan("fsdp", "HYBRID_SHARD", (num_nodes, devices), reason)
    return StrategyPlan("fsdp", sharding, (ranks,), asked)


def _because(plan: StrategyPlan, reason: str) -> StrategyPlan:
    return StrategyPlan(plan.kind, plan.sharding, plan.mesh, reason)
