"""The model of a run on the meta device, to count its parameters."""

from typing import Any

from toolkit.checkpoints.folder import meta_model
from toolkit.models.config import ModelConfig
from toolkit.models.gpt import GPT
from toolkit.models.lora_config import LoRAConfig

_built: dict[str, GPT] = {}


def model_of(config: ModelConfig, lora: LoRAConfig | None, tensor: int = 1) -> GPT:
    """Return the model on the meta device, or a rank's part of it. The last models are cached.

    ``tensor`` is the number of ranks over which each layer is divided.
    """
    key = f"{config} {lora} {tensor}"
    if key not in _built:
        if len(_built) > 1:
            _built.clear()  # consecutive plans use the same model, and the same frozen model
        _built[key] = build_part(config, lora, tensor)
    return _built[key]


def build_part(config: ModelConfig, lora: LoRAConfig | None, tensor: int, group: Any = None) -> GPT:
    """Build a rank's part of the model. For ``group`` see :func:`toolkit.distributed.tensor_parallel.split_model`."""
    model = meta_model(config, lora)
    if tensor > 1:
        from toolkit.distributed.tensor_parallel import split_model

        split_model(model, tensor, group=group)
    return model
