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
        sharding_strategy: What thunder_fsdp keeps between the forward and the backward pass of a block: ZERO2 its
            gathered weights, ZERO3 only the shards, which are then gathered twice.
        bucketing_strategy: What thunder_fsdp gathers in one collective: one tensor (NONE), the weights of a layer
            (LAYER), or the weights of a block (BLOCK).
        jit: Compile the blocks in thunder_fsdp and thunder_ddp. false runs them eagerly, to look for an error;
            thunder_fsdp then keeps gathered weights, as with ZERO2.
        executors: Names of Thunder's executors in order of priority, separated by commas, such as sdpa,nvfuser.
            Default: Thunder's own choice.
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
        """The names; None for Thunder's own choice."""
        return None if self.executors is None else split_names(self.executors)


def check_run(args: Any) -> None:
    """Check the options of a run, a :class:`toolkit.planning.run_args.RunArgs`.

    Raises:
        UserError: an option of Thunder has no effect, an option or an installed version is not supported.
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
        "finetune_lora": (args.strategy == "thunder_fsdp" and args.lora is not None, "adapters would be sharded"),
    }
    for option, (is_given, reason) in refused.items():
        if is_given:
            raise UserError(f"{option}: is not supported with {uses[-1]}: {reason}; remove one of them")


def _check_used(options: ThunderArgs, compiler: str, strategy: str) -> None:
    """Check that every option with a value other than its default has an effect."""
    used = {
        "sharding_strategy": strategy == "thunder_fsdp",
        "bucketing_strategy": strategy == "thunder_fsdp",
        "jit": strategy in STRATEGIES and compiler != "thunder",
        "executors": strategy in STRATEGIES or compiler == "thunder",
    }
    for field in fields(options):
        value = getattr(options, field.name)
        if value != field.default and not used[field.name]:
            needs = "--strategy thunder_fsdp" if field.name.endswith("_strategy") else "a strategy of Thunder"
            if field.name == "executors":
                needs = "--compiler thunder or a strategy of Thunder"
            raise UserError(f"--thunder.{field.name} {value}: has no effect without {needs}; remove it")
    if strategy in STRATEGIES and compiler == "torch":
        raise UserError(f"--compiler torch: is not supported with --strategy {strategy}, which compiles with Thunder")
