"""Finetuning: what it hands to the one assembly, and what low-rank adapters ask of a run."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

from toolkit.checkpoints.adapters import has_adapters_only
from toolkit.checkpoints.folder import find_checkpoint_dir, read_model_config
from toolkit.checkpoints.peft.import_peft import check_base, import_peft
from toolkit.config import CommandDefaults
from toolkit.errors import UserError
from toolkit.models.config import ModelOverrides
from toolkit.models.lora_config import LoRAConfig
from toolkit.planning.run_args import RunArgs


def finetune_args(defaults: CommandDefaults, given: dict[str, Any]) -> RunArgs:
    """Turn the arguments of a finetuning command into those of a run.

    Raises:
        UserError: they do not go together.
    """
    base = find_checkpoint_dir(given["checkpoint_dir"])
    if has_adapters_only(base):
        raise UserError(
            f"checkpoint_dir {given['checkpoint_dir']}: holds adapters, not a model; "
            f"run `toolkit merge_lora {given['checkpoint_dir']}` first, or --resume it"
        )
    shared = {f.name: given[f.name] for f in fields(RunArgs) if f.name in given}
    return RunArgs(
        defaults=defaults,
        model_name=None,
        model_config=ModelOverrides(),
        initial_checkpoint_dir=given["checkpoint_dir"],
        lora=_lora(given) if "lora_r" in given else None,
        given=given,
        **shared,
    )


def _lora(given: dict[str, Any]) -> LoRAConfig:
    """The options of the adapters: the flags, or what peft's folder says."""
    flags = {f.name: given[f"lora_{f.name}"] for f in fields(LoRAConfig)}
    if given["from_peft"] is None:
        return LoRAConfig(**flags)
    plain = LoRAConfig()
    if changed := next((name for name, value in flags.items() if value != getattr(plain, name)), None):
        raise UserError(
            f"--lora_{changed} {flags[changed]}: --from_peft {given['from_peft']} says what is adapted; leave it out"
        )
    base = find_checkpoint_dir(given["checkpoint_dir"])
    lora = import_peft(Path(given["from_peft"]), read_model_config(base))[0]
    check_base(given["from_peft"], base)
    return lora
