"""A model on disk: the folder that every command takes as ``checkpoint_dir``, ours or LitGPT's."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import yaml
from torch import Tensor, nn

from toolkit.checkpoints.adapters import (
    has_adapters_only,
    load_adapters,
    named_base,
    read_adapter,
    read_adapter_info,
)
from toolkit.checkpoints.litgpt import config_from_litgpt, to_our_layout
from toolkit.checkpoints.manifest import EDITABLE, require_intact
from toolkit.checkpoints.store import FINAL, WEIGHTS, newest
from toolkit.checkpoints.weights import load_weights, require_fit, save_weights
from toolkit.errors import UserError
from toolkit.models.config import ModelConfig
from toolkit.models.gpt import GPT
from toolkit.models.lora import add_lora
from toolkit.models.moe import type_of
from toolkit.untrusted import read_yaml

if TYPE_CHECKING:
    from toolkit.data.tokenizer import Tokenizer

_HEAD = "lm_head.weight"
CONFIG, HYPERPARAMETERS = "model_config.yaml", "hyperparameters.yaml"


def find_checkpoint_dir(value: str | Path) -> Path:
    """Return the model folder that ``value`` names: a folder, else the one of that name below ``checkpoints/``.

    Raises:
        UserError: there is no such folder, or it holds no model.
    """
    given = Path(value).expanduser()
    folder = given if given.is_dir() else Path("checkpoints") / value
    if given.is_file():
        raise UserError(f"checkpoint_dir {value}: is a file; give the folder that holds it")
    if not folder.is_dir():
        is_hub_name = re.fullmatch(r"[\w.-]+/[\w.-]+", str(value)) and not str(value).startswith(".")
        name = value if is_hub_name else "ORGANIZATION/NAME"
        raise UserError(
            f"checkpoint_dir {value}: no such folder, here or below checkpoints/; to fetch a model from the hub, run "
            f"`toolkit download {name}`"
        )
    if not (folder / CONFIG).is_file():
        if (folder / WEIGHTS).exists():
            raise UserError(
                f"checkpoint_dir {value}: holds weights but no {CONFIG}, as that of a module of one's own does; "
                f"load its {WEIGHTS} with load_state_dict"
            )
        raise UserError(f"checkpoint_dir {value}: holds no {CONFIG}; {_what_was_meant(folder)}")
    return folder


def _what_was_meant(folder: Path) -> str:
    """The mend for a folder that holds no model of ours."""
    converted = "checkpoints" / folder
    if model := newest(folder) or (converted if (converted / CONFIG).is_file() else None):
        return f"did you mean {model}?"
    if (folder / "config.json").is_file():
        return f"run `toolkit convert_from_hf {folder} checkpoints/{folder.resolve().name}` first"
    return f"a run's models are in its step-* and {FINAL} folders"


def read_model_config(folder: Path) -> ModelConfig:
    """Read the architecture of a model folder, ours or LitGPT's.

    Raises:
        UserError: the file is missing or broken, or describes what this program cannot compute.
    """
    path = Path(folder) / CONFIG
    try:
        values = read_yaml(path)
        if not isinstance(values, dict):
            raise ValueError("must hold names and values")
        config = ModelConfig.from_dict(values) if "family" in values else config_from_litgpt(values)
        if config.padded_vocab_size is None:
            raise ValueError("vocab_size is missing")
        return config
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such file; give the folder of a model") from error
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{path}: not a model's configuration: {' '.join(str(error).split())}") from error


def require_intact_model(
    folder: Path,
    base_checkpoint_dir: str | Path | None = None,
    report: Callable[[str], None] | None = None,
    editable: tuple[str, ...] = EDITABLE,
) -> None:
    """Compare the files of a model folder with its manifest, and those of its base if it holds adapters only.

    ``base_checkpoint_dir``: see :func:`load_model`; the others: see
    :func:`toolkit.checkpoints.manifest.require_intact`; notes go to stderr where there is no ``report``.

    Raises:
        DamagedCheckpointError: naming the damaged files.
    """
    report = report or partial(print, file=sys.stderr)
    require_intact(folder, report, editable)
    if has_adapters_only(folder):
        base = read_adapter_info(folder).base if base_checkpoint_dir is None else named_base(base_checkpoint_dir)
        if base.is_dir():
            require_intact(base, report)


def load_model(
    folder: str | Path,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    base_checkpoint_dir: str | Path | None = None,
) -> GPT:
    """Load the model of a folder; on the CPU and without a ``dtype`` its weights stay in the file until they are used.

    A folder that holds adapters is loaded with its base, unmerged; merged weights that lie beside them win.

    Args:
        folder: A model folder (see :func:`find_checkpoint_dir`).
        device: Where the weights go, one after the other.
        dtype: Their type; that of the file when not given. Adapters are fp32 always.
        base_checkpoint_dir: The base of adapters; where it was in training when not given.

    Raises:
        UserError: a file is missing or broken, the weights are not those of the configuration, or the adapters have
            another base.
    """
    folder, adapters = Path(folder), None
    if has_adapters_only(folder):
        adapter = read_adapter(folder, base_checkpoint_dir)
        model = model_on_meta(read_model_config(adapter.base))
        weights = load_compatible_weights(adapter.base, model)
        add_lora(model, adapter.lora)
        adapters = load_adapters(folder, model)
    else:
        model = model_on_meta(read_model_config(folder))
        weights = load_compatible_weights(folder, model)
    if tied := model.config.tie_embeddings:
        del weights[_HEAD]
    for name in weights:
        weights[name] = weights[name].to(device=device, dtype=type_of(name, dtype))
    for name, tensor in (adapters or {}).items():
        weights[name] = tensor.to(device)
    model.load_state_dict(weights, strict=not tied, assign=True)
    model.tie_weights()
    return model


def model_on_meta(config: ModelConfig) -> GPT:
    """Return a GPT without memory for its weights."""
    with torch.device("meta"):
        return GPT(config)


def load_compatible_weights(folder: Path, model: nn.Module) -> dict[str, Tensor]:
    """Read a folder's weights under the names that ``model`` (on any device, or none) has, and check that they fit.

    Weights that are one tensor in the model are one here, and those that are not share no memory.

    Raises:
        UserError: weights are missing, extra or of another shape, each named.
    """
    if has_adapters_only(folder):
        raise UserError(f"{folder}: holds adapters and no weights of its own; run toolkit merge_lora on it first")
    weights, wanted = load_weights(folder), model.state_dict()
    to_our_layout(weights, model.config)
    _tie_or_untie(weights, model.config, Path(folder))
    require_fit(weights, wanted, Path(folder) / WEIGHTS, CONFIG)
    return {name: weights[name] for name in wanted}


def write_model_files(
    folder: Path,
    *,
    state_dict: dict[str, Tensor] | None,
    config: ModelConfig | None,
    hyperparameters: dict[str, Any] | None,
    tokenizer: Tokenizer | None,
) -> None:
    """Write what makes a folder a model: weights, architecture, the options of its run, all tokenizer files.

    Each may be None: weights that are written in shards, the architecture of somebody's own module.
    """
    if state_dict is not None:
        save_weights(state_dict, folder / WEIGHTS)
    if config is not None:
        write_model_config(config, folder / CONFIG)
    if hyperparameters is not None:
        _write_yaml(folder / HYPERPARAMETERS, hyperparameters)
    if tokenizer is not None:
        tokenizer.save(folder)


def write_model_config(config: ModelConfig, path: Path) -> None:
    """Write an architecture so that :func:`read_model_config` reads it."""
    _write_yaml(path, config.to_dict())


def _write_yaml(path: Path, values: dict[str, Any]) -> None:
    path.write_text(yaml.safe_dump(values, sort_keys=False, allow_unicode=True), encoding="utf-8")


def _tie_or_untie(weights: dict[str, Tensor], config: ModelConfig, folder: Path) -> None:
    head, embedding = _HEAD, "transformer.wte.weight"
    if not config.tie_embeddings:
        if head in weights and embedding in weights and _same_memory(weights[head], weights[embedding]):
            weights[head] = weights[head].clone()  # else a step on the one would move the other
        return
    weights.setdefault(head, weights.get(embedding))
    weights.setdefault(embedding, weights[head])
    if weights[head] is None:
        del weights[head], weights[embedding]
    elif not (_same_memory(weights[head], weights[embedding]) or torch.equal(weights[head], weights[embedding])):
        raise UserError(f"{folder / CONFIG}: tie_embeddings true: but {head} and {embedding} differ in {WEIGHTS}")
    else:
        weights[head] = weights[embedding]


def _same_memory(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
