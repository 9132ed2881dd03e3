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
    if (size := args.tensor_parallel_size) > 1:
        raise UserError(f"--tensor_parallel_size {size}: is not supported with {name}, which generates answers; use 1")
    if args.lora and args.lora.dropout and isinstance(args.objective, GRPO):
        hint = f"is not supported with {name}, which samples without dropout; use 0"
        raise UserError(f"--lora_dropout {args.lora.dropout}: {hint}")
    if not args.is_finetune:
        raise UserError(f"{name}: is not supported with pretrain; use finetune_full or finetune_lora")


def make_callbacks(launch: Any, stack: Any) -> list[Any]:
    """Return the callback of a run with an on-policy objective."""
    if not isinstance(launch.args.objective, OnPolicy):
        return []
    from toolkit_on_policy.callback import RolloutMetrics

    return [RolloutMetrics()]
