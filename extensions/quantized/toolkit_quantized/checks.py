"""What quantized weights are not supported with. Does not import torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from toolkit.errors import require_option

if TYPE_CHECKING:
    from toolkit.planning.run_args import RunArgs


def require_supported(args: RunArgs, weights: str, is_set: bool) -> None:
    """Raise a UserError for an option that ``--qat.weights`` is not supported with.

    Args:
        args: The run's options.
        weights: How the run quantizes.
        is_set: Whether an option says so, and not the initial checkpoint.
    """
    lora = args.lora
    for flag, is_used in {
        f"--quantize {args.quantize}": args.quantize is not None,
        f"--train.fp8 {args.train.fp8}": args.train.fp8 != "none",
        f"--tensor_parallel_size {args.tensor_parallel_size}": args.tensor_parallel_size > 1,
        f"--compiler {args.compiler}": args.compiler not in ("auto", "none", "torch"),
        f"--strategy {args.strategy}": args.strategy not in ("auto", "single", "ddp", "fsdp"),
        "--lora_dora true": lora is not None and lora.dora,
        f"--lora_dropout {lora and lora.dropout}": lora is not None and lora.dropout > 0,
        "a model from Python": args.module is not None,
    }.items():
        fix = "one of them" if is_set else "it, or set --qat.weights none: the checkpoint has this format"
        require_option(not is_used, "qat.weights", weights, f"is not supported with {flag}; remove {fix}")
