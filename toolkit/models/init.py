"""Initial weights, a pure function of (seed, name of the parameter): the same on any number of ranks, in any order.

| parameter | initial value |
|---|---|
| weights of norms (``norm_1``, ``norm_2``, ``ln_f``) | 1 |
| all biases | 0 |
| ``attn.proj.weight``, ``mlp.proj.weight`` (they write to the residual stream) | normal, 0.02 / sqrt(2 n_layer) |
| all other weights (``wte``, ``wpe``, ``attn.qkv``, ``mlp.fc*``, ``lm_head``) | normal, 0.02 |

Means are zero. The table is GPT-2's (Radford et al. 2019, section 2.3, and its Hugging Face implementation). A tied
head is the embedding, drawn under the embedding's name.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import nn

STD = 0.02


def draw(name: str, shape: torch.Size | tuple[int, ...], *, seed: int, n_layer: int) -> torch.Tensor:
    """Return the initial value of the parameter ``name``: always fp32 on the CPU, so that it is the same everywhere."""
    module, _, kind = name.rpartition(".")
    if kind == "bias":
        return torch.zeros(shape, device="cpu")
    if module.rpartition(".")[2] in ("norm_1", "norm_2", "ln_f"):
        return torch.ones(shape, device="cpu")
    std = STD / math.sqrt(2 * n_layer) if module.endswith(".proj") else STD
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator(device="cpu").manual_seed(int.from_bytes(digest[:8], "little", signed=True))
    return torch.empty(shape, device="cpu").normal_(0.0, std, generator=generator)


def parameter_names(model: nn.Module) -> dict[int, str]:
    """Return the name under which each parameter is drawn, by ``id(parameter)``.

    Of a tied pair the last name counts: that is ``transformer.wte.weight``. The ids are good while the model lives.
    """
    return {id(p): name for name, p in model.named_parameters(remove_duplicate=False)}


@torch.no_grad()
def initialize(model: nn.Module, seed: int, device: torch.device | str = "cpu") -> None:
    """Give every parameter of a GPT its initial value, in place.

    Args:
        model: A GPT (it needs ``model.config.n_layer``).
        seed: Any integer.
        device: Where parameters on the meta device are made; others stay where they are. Dtypes stay, ties survive.
    """
    names, originals = parameter_names(model), list(model.parameters())  # the list keeps the ids from being reused
    ready: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for key, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) not in ready:
                ready[id(parameter)] = _initialized(parameter, names[id(parameter)], seed, model.config.n_layer, device)
            setattr(module, key, ready[id(parameter)])  # the same object for both of a tied pair
    del originals


def _initialized(
    parameter: nn.Parameter, name: str, seed: int, n_layer: int, device: torch.device | str
) -> nn.Parameter:
    value = draw(name, parameter.shape, seed=seed, n_layer=n_layer)
    if parameter.is_meta:
        return nn.Parameter(value.to(device, parameter.dtype), requires_grad=parameter.requires_grad)
    parameter.copy_(value)
    return parameter
