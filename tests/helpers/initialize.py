"""Adapters with the initial values of a run, without a run."""

from toolkit.models import lora
from toolkit.models.gpt import GPT
from toolkit.models.init import initialize as initialize
from toolkit.models.lora_config import LoRAConfig


def add_lora(model: GPT, config: LoRAConfig, seed: int = 0) -> None:
    """Add adapters to a GPT in place, with initial values from ``seed`` unless it is on the meta device."""
    lora.add_lora(model, config)
    weights = dict(model.named_parameters(remove_duplicate=False))
    value_of = lora.adapter_values(model, seed, weights.__getitem__)
    for name, parameter in model.named_parameters():
        if lora.is_adapter(name) and not parameter.is_meta:
            parameter.data.copy_(value_of(name, parameter.shape))
