"""Find, load and write model folders (``checkpoint_dir``), in toolkit's format or one that an extension reads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from toolkit.checkpoints.adapters import (
    has_adapters_only,
    load_adapters,
    read_adapter,
    read_adapter_info,
    require_adapters,
)
from toolkit.checkpoints.find import CONFIG as CONFIG
from toolkit.checkpoints.find import HYPERPARAMETERS as HYPERPARAMETERS
from toolkit.checkpoints.find import find_checkpoint_dir as find_checkpoint_dir
from toolkit.checkpoints.importers import convert_weights, import_config
from toolkit.checkpoints.manifest import EDITABLE, TRAINER_STATE, require_intact
from toolkit.checkpoints.store import WEIGHTS
from toolkit.checkpoints.weights import (
    Tensors,
    exact_dtype,
    load_weights,
    require_compatible,
    resolve_weight_dtype,
    save_weights,
)
from toolkit.data.tokenizer import Tokenizer
from toolkit.errors import UserError, notice, one_line, require_option
from toolkit.extension import missing_message, registered
from toolkit.io.safe_parse import read_yaml, write_yaml
from toolkit.models.config import ModelConfig
from toolkit.models.families import families
from toolkit.models.gpt import GPT, model_on_meta
from toolkit.models.head import pad_head
from toolkit.models.lora_config import SCORE, LoRAConfig, is_adapter

_HEAD = "lm_head.weight"


def read_model_config(folder: Path) -> ModelConfig:
    """Read the architecture from a folder's ``model_config.yaml``, in toolkit's or another tool's format."""
    path = folder / CONFIG
    try:
        values = read_yaml(path)
        if not isinstance(values, dict):
            raise ValueError("must be a mapping")
        extension = values.pop("extension", None)
        if extension is not None and values.get("family") not in families():
            raise UserError(f"family {values.get('family')}: {missing_message(str(extension))}")
        config = ModelConfig.from_dict(values) if "family" in values else import_config(values)
        if config.padded_vocab_size is None:
            raise ValueError("vocab_size is missing")
        return config
    except UserError as error:
        raise UserError(f"{path}: {one_line(error)}") from error
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such file; give a model folder") from error
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{path}: not a model configuration: {one_line(error)}; copy it again") from error


def read_adapted_config(folder: Path, base: Path) -> ModelConfig:
    """Return the architecture of a model with adapters: the base's, or with a score layer the folder's.

    The quantization is the folder's.
    """
    config = read_model_config(folder) if (folder / CONFIG).is_file() else None
    base_config = read_model_config(base)
    if config is None:
        return base_config
    return config if config.head is not None else replace(base_config, qat=config.qat)


def require_language_model(config: ModelConfig, source: str) -> None:
    """Raise UserError for a model with a score layer. ``source``: option and value, such as ``checkpoint_dir out``."""
    if config.head is not None:
        hint = "use `toolkit classify` or `toolkit evaluate`, or give a language model"
        raise UserError(f"{source}: the model has a {config.head} head and cannot predict tokens; {hint}")


def find_model(
    checkpoint_dir: str | Path,
    base_checkpoint_dir: str | Path | None = None,
    verify: bool = True,
    editable: tuple[str, ...] = EDITABLE,
) -> Path:
    """Resolve ``checkpoint_dir`` to a model folder, for :func:`load_model`.

    ``verify`` verifies the checksums, except of ``editable``; see :func:`toolkit.checkpoints.manifest.require_intact`.
    """
    folder = find_checkpoint_dir(checkpoint_dir)
    require_adapters(folder, base_checkpoint_dir=base_checkpoint_dir)
    if verify:
        require_intact_model(folder, base_checkpoint_dir, editable)
    return folder


def require_intact_model(
    folder: Path, base_checkpoint_dir: str | Path | None = None, editable: tuple[str, ...] = EDITABLE
) -> None:
    """Verify a model folder against its manifest. For unmerged adapters, also verify the base model."""
    require_intact(folder, (*editable, TRAINER_STATE))
    if has_adapters_only(folder):
        base = read_adapter_info(folder).base
        if base_checkpoint_dir is not None:
            base = find_checkpoint_dir(base_checkpoint_dir, "--base_checkpoint_dir")
        if base.is_dir():
            require_intact(base, (*EDITABLE, TRAINER_STATE))


def load_model(
    folder: Path,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    base_checkpoint_dir: str | Path | None = None,
    ignores_merged: bool = False,
    quantize: str | None = None,
) -> GPT:
    """Load a model folder. On the CPU, weights stay memory-mapped unless ``dtype`` converts them.

    Unmerged adapters are loaded together with the base model. Merged weights in the same folder take precedence. Of a
    model that was trained with quantized weights, these are loaded, with adapters merged.

    Args:
        folder: A model folder (see :func:`find_checkpoint_dir`).
        device: Device for the weights, which are moved one at a time.
        dtype: Dtype of the weights; by default the file's. Adapters are always fp32.
        base_checkpoint_dir: Base model of the adapters; by default the path recorded in training.
        ignores_merged: Load adapters unmerged also if there are merged weights.
        quantize: What the caller quantizes the weights to: a UserError if they are quantized already.
    """
    source, lora = folder, None
    if ignores_merged or has_adapters_only(folder):
        info = read_adapter(folder, base_checkpoint_dir)
        source, lora = info.base, info.lora
    model = meta_model(read_adapted_config(folder, source), lora)
    weights = load_compatible_weights(source, model)
    adapters = {} if lora is None else load_adapters(folder, model)
    if tied := model.config.tie_embeddings:
        del weights[_HEAD]
    is_quantized = model.config.qat is not None and not ignores_merged
    # of quantized layers, the device never holds the unquantized model
    target, loaded = ("cpu", exact_dtype(weights, model.config)) if is_quantized else (device, dtype)
    for name in weights:
        weights[name] = weights[name].to(device=target, dtype=resolve_weight_dtype(name, loaded))
    weights |= {name: tensor.to(device) for name, tensor in adapters.items()}
    model.load_state_dict(weights, strict=not tied, assign=True)
    model.tie_weights()
    if is_quantized:
        require_option(quantize is None, "quantize", quantize, f"{model.note}, as they were trained; remove it")
        notice(f"note: {model.note}, as they were trained")
        model.freeze_quantized(device, dtype)
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            tensor.data = tensor.data.to(device, None if is_adapter(name) else resolve_weight_dtype(name, dtype))
    pad_head(model)
    return model


def meta_model(config: ModelConfig, lora: LoRAConfig | None) -> GPT:
    """Return a GPT on the meta device. If ``lora`` is set, add adapters and freeze the base parameters."""
    if lora is None:
        return model_on_meta(config)
    from toolkit.models.lora import adapted_on_meta

    return adapted_on_meta(config, lora)


def load_compatible_weights(folder: Path, model: GPT, has_new_head: bool = False) -> Tensors:
    """Load a folder's weights. Check names and shapes against ``model`` (on any device), without adapters.

    Tied weights share memory; untied weights do not. A language model gives the weights of a model with a score layer
    whose weight is among the adapters, or with ``has_new_head`` is not needed.
    """
    if has_adapters_only(folder):
        raise UserError(f"{folder}: holds adapters and no merged weights; run toolkit merge_lora on it first")
    expected = {name: tensor for name, tensor in model.state_dict().items() if not is_adapter(name)}
    weights = load_weights(folder)
    if model.config.head is not None:
        if has_new_head:
            del expected[SCORE]
        unused = {name for name in weights if name.startswith("lm_head.")} | ({SCORE} - expected.keys())
        weights = {name: tensor for name, tensor in weights.items() if name not in unused}
    if weights.keys() - expected.keys():
        convert_weights(weights, model.config)
    _tie_or_untie(weights, model.config, folder)
    require_compatible(weights, expected, folder / WEIGHTS, CONFIG)
    return {name: weights[name] for name in expected}


def write_model_files(
    folder: Path,
    *,
    state_dict: Tensors | None,
    config: ModelConfig | None,
    hyperparameters: dict[str, Any] | None,
    tokenizer: Tokenizer | None,
) -> None:
    """Write a model folder's weights, architecture, hyperparameters and tokenizer files.

    Arguments that are None are skipped: for example, ``state_dict`` if the weights are sharded, or ``config`` for a
    user-defined module.
    """
    if state_dict is not None:
        save_weights(state_dict, folder / WEIGHTS)
    if config is not None:
        write_model_config(config, folder / CONFIG)
    if hyperparameters is not None:
        write_yaml(folder / HYPERPARAMETERS, hyperparameters)
    if tokenizer is not None:
        tokenizer.save(folder)


def write_model_config(config: ModelConfig, path: Path) -> None:
    """Write an architecture in the format that :func:`read_model_config` reads."""
    entry = registered("families").get(config.family)
    write_yaml(path, config.to_dict() | ({} if entry is None else {"extension": entry.origin}))


def _tie_or_untie(weights: Tensors, config: ModelConfig, folder: Path) -> None:
    head, embedding = _HEAD, "transformer.wte.weight"
    if not config.tie_embeddings:
        if head in weights and embedding in weights and _shares_memory(weights[head], weights[embedding]):
            weights[head] = weights[head].clone()  # otherwise updating one would change the other
        return
    for name, other in ((head, embedding), (embedding, head)):
        if other in weights:
            weights.setdefault(name, weights[other])
    if head not in weights:  # the embedding is missing, too
        return
    if not (_shares_memory(weights[head], weights[embedding]) or torch.equal(weights[head], weights[embedding])):
        raise UserError(f"{folder / CONFIG}: tie_embeddings true: but {head} and {embedding} differ in {WEIGHTS}")
    weights[head] = weights[embedding]


def _shares_memory(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
