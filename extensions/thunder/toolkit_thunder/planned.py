"""``--strategy thunder_fsdp`` and ``thunder_ddp``: see :class:`toolkit.distributed.strategy.StrategyExtension`."""

from collections.abc import Mapping
from typing import Any

from toolkit.config import Precision
from toolkit.distributed.mesh import Layout
from toolkit.distributed.strategy import StrategyPlan
from toolkit.errors import UserError
from toolkit_thunder.options import ThunderArgs


class PlannedFSDP:
    """Plans and builds thunder_fsdp."""

    def plan(
        self, groups: Mapping[str, Any], *, devices: int, num_nodes: int, accelerator: str, precision: Precision
    ) -> StrategyPlan:
        """Return the strategy's plan.

        Raises:
            UserError: there is only one device, or the precision is not supported.
        """
        size, options = _ranks("thunder_fsdp", devices, num_nodes, accelerator), _options(groups)
        if precision == "16-mixed":
            raise UserError("--precision 16-mixed is not supported with --strategy thunder_fsdp; use bf16-mixed")
        if not options.jit:
            return StrategyPlan(
                "fsdp", "SHARD_GRAD_OP", Layout(shard=size), "not compiled, keeps gathered weights like ZERO2"
            )
        sharding = {"ZERO2": "SHARD_GRAD_OP", "ZERO3": "FULL_SHARD"}[options.sharding_strategy]
        reason = f"{options.sharding_strategy}, buckets {options.bucketing_strategy}"
        return StrategyPlan("fsdp", sharding, Layout(shard=size), reason)

    def build(
        self, plan: StrategyPlan, groups: Mapping[str, Any], *, precision: Precision, block_classes: set[type]
    ) -> tuple[type, dict[str, Any]]:
        """Return the strategy and its arguments."""
        from toolkit_thunder.strategies import ThunderFSDPStrategy  # slow to import

        options = _options(groups)
        return ThunderFSDPStrategy, {
            "sharding_strategy": options.sharding_strategy,
            "bucketing_strategy": options.bucketing_strategy,
            **_common(options, block_classes),
        }


class PlannedDDP:
    """Plans and builds thunder_ddp."""

    def plan(
        self, groups: Mapping[str, Any], *, devices: int, num_nodes: int, accelerator: str, precision: Precision
    ) -> StrategyPlan:
        """Return the strategy's plan.

        Raises:
            UserError: there is only one device.
        """
        size = _ranks("thunder_ddp", devices, num_nodes, accelerator)
        return StrategyPlan(
            "ddp", None, Layout(replicate=size), "replicas" if _options(groups).jit else "replicas, not compiled"
        )

    def build(
        self, plan: StrategyPlan, groups: Mapping[str, Any], *, precision: Precision, block_classes: set[type]
    ) -> tuple[type, dict[str, Any]]:
        """Return the strategy and its arguments."""
        from toolkit_thunder.strategies import ThunderDDPStrategy  # slow to import

        return ThunderDDPStrategy, _common(_options(groups), block_classes)


def _options(groups: Mapping[str, Any]) -> ThunderArgs:
    return groups.get("thunder", ThunderArgs())


def _common(options: ThunderArgs, block_classes: set[type]) -> dict[str, Any]:
    blocks = sorted(block_classes, key=lambda cls: cls.__qualname__)
    return {"jit": options.jit, "executors": options.executor_names, "blocks": blocks}


def _ranks(strategy: str, devices: int, num_nodes: int, accelerator: str) -> int:
    size = devices * num_nodes
    if size == 1:
        raise UserError(f"--strategy {strategy}: requires several devices; on one use --compiler thunder")
    if accelerator == "mps":
        raise UserError(f"--strategy {strategy}: is not supported on mps; use --accelerator cpu")
    return size
