"""Adapters on disk: what was trained, and which base it belongs to.

A checkpoint of adapters holds ``lit_model.pth.lora`` (their tensors only) and ``adapter.yaml`` instead of weights; the
rest of the folder is that of any model. Merged weights, once they lie beside them, are the folder's model.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml
from torch import Tensor, nn

from toolkit.checkpoints.fingerprint import ADAPTERS, base_fingerprint
from toolkit.checkpoints.store import WEIGHTS
from toolkit.checkpoints.weights import load_state, require_fit, save_weights
from toolkit.errors import UserError
from toolkit.models.lora import is_adapter
from toolkit.models.lora_config import LoRAConfig
from toolkit.untrusted import read_yaml

ADAPTER_CONFIG = "adapter.yaml"


@dataclass(frozen=True)
class AdapterInfo:
    """What the adapters of a folder are.

    Args:
        lora: Their options.
        base: The checkpoint folder that they were trained on.
        base_hash: Its :func:`~toolkit.checkpoints.fingerprint.base_fingerprint`.
        quantize: How the base was quantised in training; None where it was not. Merging takes the plain one.
    """

    lora: LoRAConfig
    base: Path
    base_hash: str
    quantize: str | None = None


def is_adapter_dir(folder: str | Path) -> bool:
    """Whether the folder holds adapters, merged or not."""
    return (Path(folder) / ADAPTERS).is_file()


def has_adapters_only(folder: str | Path) -> bool:
    """Whether the folder needs another one, its base, to be a model."""
    return is_adapter_dir(folder) and not (Path(folder) / WEIGHTS).exists()


def require_adapters(folder: str | Path, **flags: Any) -> None:
    """Refuse flags that are for adapters without merged weights, where the folder holds a whole model.

    Raises:
        UserError: one of them is given (neither None nor false).
    """
    given = next((name for name, value in flags.items() if value not in (None, False)), None)
    if given is not None and not has_adapters_only(folder):
        value = str(flags[given]).lower() if flags[given] is True else flags[given]
        raise UserError(f"--{given} {value}: would have no effect, {folder} holds a whole model; leave it out")


def write_adapter_files(folder: Path, adapters: dict[str, Tensor], info: AdapterInfo) -> None:
    """Write the adapters, under canonical names, and what they are.

    Raises:
        OSError, RuntimeError: what writing raises; :func:`~toolkit.checkpoints.store.write_checkpoint` explains it.
    """
    assert adapters and all(is_adapter(name) for name in adapters), "not adapters"
    save_weights(adapters, folder / ADAPTERS)
    values = {
        "lora": info.lora.to_dict(),
        "base_checkpoint_dir": str(info.base),
        "base_absolute_path": str(info.base.resolve()),
        "base_hash": info.base_hash,
        "quantize": info.quantize,
    }
    (folder / ADAPTER_CONFIG).write_text(yaml.safe_dump(values, sort_keys=False, allow_unicode=True), encoding="utf-8")


def read_adapter_info(folder: str | Path) -> AdapterInfo:
    """Read what the adapters of a folder are; their base may be gone.

    Raises:
        UserError: the folder holds no adapters, or their file is missing or broken.
    """
    folder = Path(folder)
    if not is_adapter_dir(folder):
        raise UserError(f"checkpoint_dir {folder}: holds no {ADAPTERS}; give a folder that finetune_lora wrote")
    path = folder / ADAPTER_CONFIG
    try:
        values = read_yaml(path)
        known = {field.name for field in fields(LoRAConfig)}
        if extra := set(values["lora"]) - known:
            raise ValueError(f"unknown {', '.join(sorted(extra))}")
        places = [Path(values["base_absolute_path"]), Path(values["base_checkpoint_dir"])]
        base = next((place for place in places if place.is_dir()), places[0])
        return AdapterInfo(LoRAConfig(**values["lora"]), base, str(values["base_hash"]), values.get("quantize"))
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such file; copy it from the run's folder") from error
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(f"{path}: does not describe adapters: {' '.join(str(error).split())}") from error


def read_adapter(folder: str | Path, base_checkpoint_dir: str | Path | None = None) -> AdapterInfo:
    """Read what the adapters of a folder are, and make sure that their base is there and the one they were trained on.

    Args:
        folder: Of the adapters.
        base_checkpoint_dir: Where the base is now, a folder or a name below ``checkpoints/``; where it was in training
            when not given.

    Raises:
        UserError: as :func:`read_adapter_info`, or the base is missing or another checkpoint.
    """
    info = read_adapter_info(folder)
    base = info.base
    if base_checkpoint_dir is not None:
        base = named_base(base_checkpoint_dir)
        if not (base / WEIGHTS).exists():
            raise UserError(f"--base_checkpoint_dir {base_checkpoint_dir}: holds no {WEIGHTS}; give a model's folder")
    elif not (base / WEIGHTS).exists():
        raise UserError(
            f"{folder}: its base {base} is not there any more; say with --base_checkpoint_dir where it is now"
        )
    if base_fingerprint(base) != info.base_hash:
        raise UserError(
            f"{folder}: was trained on another checkpoint than {base}, whose weights have another fingerprint; "
            "give the right one with --base_checkpoint_dir"
        )
    return AdapterInfo(info.lora, base, info.base_hash, info.quantize)


def named_base(base_checkpoint_dir: str | Path) -> Path:
    """Return the folder that --base_checkpoint_dir names, whether it is there or not."""
    given = Path(base_checkpoint_dir).expanduser()
    return given if given.is_dir() else Path("checkpoints") / given


def load_adapters(folder: str | Path, model: nn.Module) -> dict[str, Tensor]:
    """Read a folder's adapters, in fp32 on the CPU, and check that they are those of ``model`` (on any device).

    Raises:
        UserError: the file is missing or broken, or adapters are missing, extra or of another shape, each named.
    """
    path = Path(folder) / ADAPTERS
    adapters: dict[str, Any] = load_state(path)
    for name, value in adapters.items():
        if not (isinstance(name, str) and isinstance(value, Tensor)):
            raise UserError(f"{path}: {name!r} is not a tensor; the file must hold adapters only")
    wanted = {name: parameter for name, parameter in model.named_parameters() if is_adapter(name)}
    require_fit(adapters, wanted, path, ADAPTER_CONFIG)
    return {name: adapters[name].float() for name in wanted}
