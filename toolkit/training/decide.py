"""What a run will be, from its arguments and the place alone: a run and its plan decide here, alike."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from toolkit.args import Precision
from toolkit.distributed.strategy import StrategyPlan, plan_strategy
from toolkit.errors import UserError
from toolkit.models.config import ModelConfig
from toolkit.training.batch import BatchPlan, plan_batch
from toolkit.training.optimizer import resolve_optimizer
from toolkit.training.resolve import RunArgs, choose_length, choose_model, with_defaults


@dataclass(frozen=True)
class ResolvedConfig:
    """A run before anything is started.

    Args:
        args: With the command's defaults filled in, and the precision.
        device: "cpu", "cuda" or "mps".
        strategy: With its mesh.
        batch: How the global batch is cut.
        config: The architecture; None for a user-provided module. Its vocabulary may come from the tokenizer.
        max_seq_length: Tokens of the longest row; None where the data decides.
        optimizer: See :func:`toolkit.training.optimizer.resolve_optimizer`.
    """

    args: RunArgs
    device: str
    strategy: StrategyPlan
    batch: BatchPlan
    config: ModelConfig | None
    max_seq_length: int | None
    optimizer: dict[str, Any]

    @property
    def precision(self) -> Precision:
        assert self.args.precision is not None
        return self.args.precision


def resolve_config(args: RunArgs, device: str, devices: int, num_nodes: int, precision: Precision) -> ResolvedConfig:
    """Decide what the run of ``args`` is on so many devices per node.

    Raises:
        UserError: options that do not go together, or would have no effect.
    """
    args = replace(with_defaults(args), precision=precision)
    sizes = {"devices": devices, "num_nodes": num_nodes}
    strategy = plan_strategy(args.strategy, args.fsdp, args.ddp, **sizes, accelerator=device, precision=precision)
    if args.timeout is not None and devices * num_nodes == 1:
        raise UserError(f"--timeout {args.timeout}: would have no effect, one process waits for no other")
    if args.lora is not None:
        _require_fit_for_adapters(args, strategy.kind)
    batch = plan_batch(args.train.global_batch_size, args.train.micro_batch_size, **sizes)
    config = choose_model(args)
    length = choose_length(args.train, config)
    if strategy.kind == "fsdp" and args.module is not None and not args.block_classes:
        raise UserError("--strategy fsdp: shards the blocks of a model, and none were found; name them: block_classes")
    if strategy.kind == "fsdp" and args.optimizer.name.lower() == "adafactor":
        raise UserError(
            "--optimizer.name Adafactor: looks at whole matrices, and fsdp gives it parts; use --strategy ddp or AdamW"
        )
    optimizer = resolve_optimizer(args.optimizer, args.defaults.optimizer, precision, args.optimizer_class)
    return ResolvedConfig(args, device, strategy, batch, config, length, optimizer)


def _require_fit_for_adapters(args: RunArgs, strategy: str) -> None:
    """Refuse options that do not go with adapters, or with a quantised base."""
    if args.quantize is not None:
        if strategy == "fsdp":
            raise UserError(
                f"--quantize {args.quantize}: does not go with --strategy fsdp, which cannot shard weights of 4 bits; "
                "use --strategy ddp"
            )
        if args.precision == "16-mixed":
            raise UserError(f"--precision 16-mixed: is not proven with --quantize {args.quantize}; use bf16-true")
        if args.compiler != "none":
            raise UserError(f"--compiler {args.compiler}: does not go with --quantize {args.quantize}; leave one out")
    if args.fsdp.state_dict_type == "sharded":
        raise UserError(
            "--fsdp.state_dict_type sharded: would have no effect, every device holds all adapters; leave it out"
        )
    if args.train.tie_embeddings is not None:
        raise UserError(f"--train.tie_embeddings {args.train.tie_embeddings}: the base stays as it is; leave it out")
