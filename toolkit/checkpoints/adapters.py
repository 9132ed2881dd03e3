"""Read and write LoRA adapter checkpoints.

An adapter checkpoint holds ``lit_model.pth.lora`` (adapter tensors only) and ``adapter.yaml`` (which names the base
model) instead of ``lit_model.pth``. All other files are the same as in a model folder. If ``lit_model.pth`` exists as
well, it holds the merged weights and takes precedence.
"""

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from torch import nn

from toolkit.checkpoints.find import find_checkpoint_dir
from toolkit.checkpoints.fingerprint import base_fingerprint
from toolkit.checkpoints.store import ADAPTERS, WEIGHTS
from toolkit.checkpoints.weights import Tensors, load_state, only_tensors, require_compatible, save_weights
from toolkit.errors import UserError, one_line, require_option
from toolkit.io.safe_parse import read_yaml, write_yaml
from toolkit.models.lora_config import LoRAConfig, Quantize, is_adapter

ADAPTER_CONFIG = "adapter.yaml"


@dataclass(frozen=True)
class AdapterInfo:
    """The content of ``adapter.yaml``."""

    lora: LoRAConfig
    base: Path
    """Checkpoint folder of the base model."""
    base_hash: str
    """:func:`~toolkit.checkpoints.fingerprint.base_fingerprint` of the base model."""
    quantize: Quantize | None = None
    """Quantization of the base model during training, if any. Merging uses the unquantized base model."""


def is_adapter_dir(folder: Path) -> bool:
    """Whether the folder contains adapters, merged or not."""
    return (folder / ADAPTERS).is_file()


def has_adapters_only(folder: Path) -> bool:
    """Whether the folder contains adapters without merged weights, so that loading it requires the base model."""
    return is_adapter_dir(folder) and not (folder / WEIGHTS).exists()


def require_adapters(folder: Path, **flags: Any) -> None:
    """Raise UserError if a flag for unmerged adapters is set and the folder holds a complete model."""
    for flag, value in flags.items():
        has_effect = value in (None, False) or has_adapters_only(folder)
        require_option(has_effect, flag, value, f"has no effect, {folder} holds a complete model; remove it")


def write_adapter_files(folder: Path, adapters: Tensors, info: AdapterInfo) -> None:
    """Write the adapter tensors, under canonical names, and ``adapter.yaml``."""
    assert adapters and all(is_adapter(name) for name in adapters), "not adapters"
    save_weights(adapters, folder / ADAPTERS)
    values = {
        "lora": info.lora.to_dict(),
        "base_checkpoint_dir": str(info.base),
        "base_absolute_path": str(info.base.resolve()),
        "base_hash": info.base_hash,
        "quantize": info.quantize,
    }
    write_yaml(folder / ADAPTER_CONFIG, values)


def read_adapter_info(folder: Path) -> AdapterInfo:
    """Read ``adapter.yaml``. The base model's folder need not exist."""
    if not is_adapter_dir(folder):
        raise UserError(f"checkpoint_dir {folder}: holds no {ADAPTERS}; give a folder that finetune_lora wrote")
    path = folder / ADAPTER_CONFIG
    try:
        values = read_yaml(path)
        if extra := set(values["lora"]) - {field.name for field in fields(LoRAConfig)}:
            raise ValueError(f"unknown {', '.join(sorted(extra))}")
        paths = [Path(values["base_absolute_path"]), Path(values["base_checkpoint_dir"])]
        if not all(str(path).isprintable() for path in paths):
            raise ValueError("the path of the base model has unprintable characters")
        base = next((path for path in paths if path.is_dir()), paths[0])
        return AdapterInfo(LoRAConfig(**values["lora"]), base, str(values["base_hash"]), values.get("quantize"))
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such file; copy it from the run's folder") from error
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(f"{path}: does not describe adapters: {one_line(error)}; copy it again") from error


def read_adapter(folder: Path, base_checkpoint_dir: str | Path | None = None) -> AdapterInfo:
    """Read ``adapter.yaml``, and check that the base model exists and has the fingerprint recorded in training.

    ``base_checkpoint_dir`` is a path, a name below ``checkpoints/`` or a URL. By default, it is the path in
    ``adapter.yaml``.
    """
    info = read_adapter_info(folder)
    base = (
        info.base if base_checkpoint_dir is None else find_checkpoint_dir(base_checkpoint_dir, "--base_checkpoint_dir")
    )
    if not (base / WEIGHTS).exists():
        raise UserError(f"{folder}: the base model {base} does not exist; set its location with --base_checkpoint_dir")
    if base_fingerprint(base) != info.base_hash:
        raise UserError(
            f"{folder}: these adapters were not trained on {base} (fingerprint mismatch); set --base_checkpoint_dir to "
            "the checkpoint they were trained on"
        )
    return replace(info, base=base)


def load_adapters(folder: Path, model: nn.Module) -> Tensors:
    """Load adapter tensors as fp32 on the CPU. Check names and shapes against ``model`` (on any device)."""
    path = folder / ADAPTERS
    adapters = only_tensors(load_state(path), path, "adapters")
    expected = {name: parameter for name, parameter in model.named_parameters() if is_adapter(name)}
    require_compatible(adapters, expected, path, ADAPTER_CONFIG)
    return {name: adapters[name].float() for name in expected}
