"""The options ``--thunder.*``, and the options that are not supported with Thunder. Imports no torch."""

from dataclasses import dataclass, fields
from typing import Any, Literal

from toolkit.errors import UserError, require_option
from toolkit.extension import split_names
from toolkit_thunder.versions import require_versions

STRATEGIES = ("thunder_fsdp", "thunder_ddp")
_CHOICES = {"sharding_strategy": ("ZERO2", "ZERO3"), "bucketing_strategy": ("NONE", "LAYER", "BLOCK")}


@dataclass(frozen=True)
class ThunderArgs:
    """Options of --compiler thunder and --strategy thunder_fsdp or thunder_ddp.

    Args:
        sharding_strategy: How thunder_fsdp shards. ZERO2 keeps gathered weights from the forward to the backward pass;
            ZERO3 keeps only the shards and gathers twice.
        bucketing_strategy: Weights that thunder_fsdp gathers in one collective: one tensor (NONE), one layer (LAYER)
            or one block (BLOCK).
        jit: Compile the blocks in thunder_fsdp and thunder_ddp. false runs them eagerly for debugging; thunder_fsdp
            then keeps gathered weights, as with ZERO2.
        executors: Thunder executors in order of priority, separated by commas, such as sdpa,nvfuser. Default:
            Thunder's defaults.
    """

    sharding_strategy: Literal["ZERO2", "ZERO3"] = "ZERO3"
    bucketing_strategy: Literal["NONE", "LAYER", "BLOCK"] = "NONE"
    jit: bool = True
    executors: str | list[str] | None = None

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            require_option(value in choices, f"thunder.{name}", value, f"must be one of {', '.join(choices)}")
        require_option(isinstance(self.jit, bool), "thunder.jit", self.jit, "must be true or false")
        split_names(self.executors, "--thunder.executors")
        if not self.jit:
            for name in ("bucketing_strategy", "executors"):
                value = getattr(self, name)
                ok = value == getattr(type(self), name)
                require_option(ok, f"thunder.{name}", value, "has no effect with --thunder.jit false; remove it")

    @property
    def executor_names(self) -> list[str] | None:
        """The executor names; None for Thunder's defaults."""
        return None if self.executors is None else split_names(self.executors)


def check_run(args: Any) -> None:
    """Check the options of a run, a :class:`toolkit.planning.run_args.RunArgs`.

    Raises:
        UserError: a Thunder option has no effect, or an option or installed version is not supported.
    """
    options: ThunderArgs = args.groups.get("thunder", ThunderArgs())
    uses = [f"--compiler {args.compiler}"] if args.compiler == "thunder" else []
    uses += [f"--strategy {args.strategy}"] if args.strategy in STRATEGIES else []
    _check_used(options, args.compiler, args.strategy)
    if not uses:
        return
    needed_by = uses[0]
    require_versions(needed_by)
    mode = args.train.activation_checkpointing
    refused = {
        f"--train.activation_checkpointing {mode}": (mode != "none", "Thunder decides what to recompute"),
        "--quantize": (args.quantize is not None, "Thunder cannot trace quantized weights"),
        f"--fsdp.auto_wrap {args.fsdp.auto_wrap}": (args.fsdp.auto_wrap != "block", "Thunder compiles complete blocks"),
        "--optimizer.in_backward true": (
            args.strategy in STRATEGIES and args.optimizer.in_backward,
            "gradients are complete only after the backward pass",
        ),
        "finetune_lora": (args.strategy == "thunder_fsdp" and args.lora is not None, "it would shard the adapters"),
    }
    for option, (is_given, reason) in refused.items():
        if is_given:
            raise UserError(f"{option}: is not supported with {uses[-1]}: {reason}; remove one of them")


def _check_used(options: ThunderArgs, compiler: str, strategy: str) -> None:
    """Check that every option with a non-default value has an effect."""
    used = {
        "sharding_strategy": strategy == "thunder_fsdp",
        "bucketing_strategy": strategy == "thunder_fsdp",
        "jit": strategy in STRATEGIES and compiler != "thunder",
        "executors": strategy in STRATEGIES or compiler == "thunder",
    }
    for field in fields(options):
        value = getattr(options, field.name)
        if value != field.default and not used[field.name]:
            needs = "--strategy thunder_fsdp" if field.name.endswith("_strategy") else "a Thunder strategy"
            if field.name == "executors":
                needs = "--compiler thunder or a Thunder strategy"
            raise UserError(f"--thunder.{field.name} {value}: has no effect without {needs}; remove it")
    if strategy in STRATEGIES and compiler == "torch":
        raise UserError(f"--compiler torch: is not supported with --strategy {strategy}, which uses Thunder; remove it")
