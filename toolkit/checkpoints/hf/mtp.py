"""Keep the weights of multi-token prediction (MTP) from import to export unchanged, as they are not trained (M2).

A model folder has them in ``mtp.safetensors`` by their Hugging Face names, with the base's config.json as metadata.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import torch

from toolkit.checkpoints.finite import warn_nonfinite
from toolkit.checkpoints.hf.files import FORMAT_NAMES, Weight, close, open_weights, write_safetensors
from toolkit.checkpoints.hf.reader import CONFIG
from toolkit.checkpoints.store import MTP
from toolkit.checkpoints.weights import Tensors
from toolkit.errors import UserError, one_line
from toolkit.io.safe_parse import parse_json, read_json_object
from toolkit.models.config import Fields, ModelConfig
from toolkit.models.families import family_of


def on_meta(weights: Mapping[str, Weight]) -> Tensors:
    """Return tensors with the same shapes and dtypes and without values."""
    return {name: torch.empty(one.shape, dtype=one.dtype, device="meta") for name, one in weights.items()}


def write_mtp(weights: Mapping[str, Weight], folder: Path, hf_dir: Path) -> None:
    """Write the weights into a model folder, one at a time. Quantized ones become bf16, as all others of the model."""
    config = json.dumps(read_json_object(hf_dir / CONFIG))
    tensors = ((name, weight.read()) for name, weight in weights.items())
    warn_nonfinite(write_safetensors(folder / MTP, on_meta(weights), tensors, {"config": config}), hf_dir)


def read_mtp(folder: Path, model: ModelConfig) -> tuple[Tensors, Fields]:
    """Return the memory-mapped weights of a model folder, and what the base's config.json says about them."""
    if model.head is not None or not (path := folder / MTP).is_file():
        return {}, {}
    file = open_weights(path)
    try:
        config = parse_json((file.metadata() or {}).get("config", "{}"))
        values = config | (config.get("text_config") or {})  # of a multimodal model
        keys = {key: value for key, value in values.items() if "mtp" in key or "nextn" in key}
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dictionary)
        for name, tensor in tensors.items():
            if tensor.dtype not in FORMAT_NAMES or not family_of(model).is_mtp(name, model):
                raise ValueError(f"{name!r:.100} ({tensor.dtype}) is no such weight of {model.family}")
        return tensors, keys
    except (ValueError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: damaged: {one_line(error)}; copy it again") from error
    finally:
        close()
