"""What every run calls: checks and callbacks of on-policy objectives. Imports no torch."""

from typing import Any

from toolkit.errors import UserError
from toolkit_on_policy.grpo import GRPO
from toolkit_on_policy.objective import OnPolicy
from toolkit_on_policy.prompts import Prompts


def check(args: Any) -> None:
    """Raise UserError for an option that is not supported, of a :class:`toolkit.planning.run_args.RunArgs`."""
    name, is_on_policy = f"--objective {type(args.objective).__name__}", isinstance(args.objective, OnPolicy)
    if isinstance(args.data, Prompts) != is_on_policy:
        hint = "GRPO and OnPolicyDistillation need --data Prompts, and only they can use it"
        raise UserError(f"--data {type(args.data).__name__}: is not supported with {name}; {hint}")
    if not is_on_policy:
        return
    for option in ("tensor_parallel_size", "context_parallel_size", "pipeline_parallel_size"):
        if (size := getattr(args, option)) > 1:
            raise UserError(f"--{option} {size}: is not supported with {name}, which generates answers; use 1")
    noise = {"lora_dropout": args.lora and args.lora.dropout, "train.neftune_alpha": args.train.neftune_alpha}
    for option, value in noise.items():
        if value and isinstance(args.objective, GRPO):
            raise UserError(f"--{option} {value}: is not supported with {name}, which samples without it; remove it")
    if not args.is_finetune:
        raise UserError(f"{name}: is not supported with pretrain; use finetune_full or finetune_lora")


def make_callbacks(launch: Any, stack: Any) -> list[Any]:
    """Return the callback of a run with an on-policy objective."""
    if not isinstance(launch.args.objective, OnPolicy):
        return []
    from toolkit_on_policy.callback import RolloutMetrics

    return [RolloutMetrics()]
