"""`toolkit plan`: batch, parameters and memory of a run before it starts."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any, Literal, get_args, get_type_hints

from toolkit.commands import COMMANDS
from toolkit.errors import UserError, did_you_mean

Command = Literal["pretrain", "finetune_full", "finetune_lora"]
PLANNABLE = get_args(Command)


def setup(
    command: Command,
    device_memory_gb: float | None = None,
    format: Literal["text", "json"] = "text",
    **run: Any,
) -> None:
    """Show the resolved settings of a run, and its memory per device by component.

    Put plan before the command that you would run:

    toolkit plan pretrain pythia-160m --devices 8 --train.micro_batch_size 8 --device_memory_gb 80

    `toolkit plan COMMAND --help` shows all options. Nothing is started: neither GPUs nor weights are needed. GPUs are
    assumed unless --accelerator cpu says otherwise. A checkpoint_dir that is not on this disk stands for the named
    architecture, such as meta-llama/Llama-2-7b-hf. Sequences count with their greatest length,
    --train.max_seq_length.

    Args:
        command: The command to plan: pretrain, finetune_full or finetune_lora.
        device_memory_gb: Memory of one device in GB (1e9 bytes), to check whether the run fits and suggest changes.
        format: Text table, or JSON.
    """
    if device_memory_gb is not None and not device_memory_gb > 0:
        raise UserError(f"--device_memory_gb {device_memory_gb}: must be greater than zero")
    from toolkit.planning.advice import advice_for
    from toolkit.planning.plan import device_spec_of, plan_run, run_args_of
    from toolkit.ui.plan import format_plan, plan_summary

    with run_args_of(command, run) as args:
        plan = plan_run(args, device_spec_of(args))
        advice = [] if device_memory_gb is None else advice_for(plan, device_memory_gb)
    summary = plan_summary(command, plan, device_memory_gb, advice)
    if format == "json":
        import json

        print(json.dumps(summary, indent=2))
    else:
        print(format_plan(summary))


def choose(argv: list[str]) -> tuple[Callable[..., None], tuple[str, ...]]:
    """Return a function with the parameters of ``setup`` and of the command that ``argv`` begins with, and its
    positional parameters.

    Raises:
        UserError: it does not begin with a command that can be planned.
    """
    name = argv[0] if argv else "--help"
    if name in PLANNABLE:
        return _with_options_of(name), ("command", *COMMANDS[name][1])
    if argv and name not in ("--help", "-h"):
        commands = ", ".join(PLANNABLE)
        raise UserError(
            f"{name}: the command to plan must come first, one of {commands}{did_you_mean(name, PLANNABLE)}"
        )
    return _drop_parameter(setup, "run"), ("command",)


setup.choose = choose


def _drop_parameter(function: Callable[..., None], name: str) -> Callable[..., None]:
    parameters = inspect.signature(function).parameters
    return _typed(function.__doc__, [p for n, p in parameters.items() if n != name], get_type_hints(function))


def _with_options_of(name: str) -> Callable[..., None]:
    inner = importlib.import_module(COMMANDS[name][0]).setup
    own, planned = inspect.signature(setup).parameters, inspect.signature(inner).parameters
    parameters = [own["command"], *planned.values(), own["device_memory_gb"], own["format"]]
    options = (inspect.getdoc(inner) or "").partition("\nArgs:\n")[2]
    doc = f"{inspect.getdoc(setup)}\n{options}"
    return _typed(doc, parameters, get_type_hints(inner) | get_type_hints(setup))


def _typed(doc: str | None, parameters: list[inspect.Parameter], hints: dict[str, Any]) -> Callable[..., None]:
    """Return a function with this signature for the command line to parse."""

    def typed() -> None: ...

    keyword = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]
    typed.__signature__ = inspect.Signature(keyword)
    typed.__annotations__ = {p.name: hints[p.name] for p in parameters} | {"return": None}
    typed.__doc__ = doc
    typed.optional = ("data",)  # a plan reads no data
    return typed
