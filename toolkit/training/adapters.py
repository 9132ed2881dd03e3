"""LoRA adapters of a run: base model, initial values, and the values that must not change on resume."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from toolkit.checkpoints.adapters import AdapterInfo, load_adapters
from toolkit.checkpoints.fingerprint import base_fingerprint
from toolkit.checkpoints.peft.import_peft import check_base, import_peft
from toolkit.planning.run_args import RunArgs
from toolkit.training.model import ModelSpec


def describe_base(args: RunArgs) -> AdapterInfo:
    """Return the LoRA configuration, and path and hash of the base model."""
    assert args.lora is not None and args.base_dir is not None
    base_hash = base_fingerprint(args.base_dir)
    return AdapterInfo(lora=args.lora, base=args.base_dir, base_hash=base_hash, quantize=args.quantize)


def fingerprint(info: AdapterInfo) -> dict[str, Any]:
    """Return the values that must not change on resume, by flag."""
    return info.lora.to_options() | {"quantize": info.quantize, "checkpoint_dir": info.base_hash}


def initial_adapters(
    args: RunArgs, spec: ModelSpec, resume_from: Path | None, report: Callable[[str], None]
) -> dict[str, torch.Tensor] | None:
    """Load the initial adapters from the checkpoint to resume, else from the peft folder. None: new or no adapters.

    ``report`` receives notes on the peft folder, for example if its base model cannot be verified.
    """
    if args.lora is None:
        return None
    if resume_from is not None:
        return load_adapters(resume_from, spec.module)
    if args.from_peft is None:
        return None
    assert args.base_dir is not None and spec.config is not None
    if note := check_base(args.from_peft, args.base_dir):
        report(note)
    _, adapters, note = import_peft(Path(args.from_peft), spec.config)
    if note:
        report(note)
    return adapters
