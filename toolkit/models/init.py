"""Initial weights, a pure function of (seed, name of the parameter): the same on any number of ranks, in any order.

| parameter | initial value |
|---|---|
| weights of norms (:data:`NORMS`) | 1; with an offset 0 |
| all biases, ``mlp.correction`` | 0 |
| ``attn.proj.weight``, ``mlp.*proj.weight`` (they write to the residual stream) | normal, 0.02 / sqrt(2 n_layer) |
| all other weights (``wte``, ``wpe``, ``attn.qkv``, ``mlp.*fc*``, ``mlp.*gate``, ``lm_head``, ...) | normal, 0.02 |
| ``attn.sinks`` (as transformers has them) | normal, 0.02 |

Means are zero. The table is GPT-2's (Radford et al. 2019, section 2.3, and its Hugging Face implementation). A tied
head is the embedding, init_weight under the embedding's name.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable

import torch
from torch import nn

from toolkit.models.config import ModelConfig

STD = 0.02
NORMS = (
    "norm_1", "norm_2", "post_attention_norm", "post_mlp_norm", "norm_q", "norm_k", "q_a_norm", "kv_a_norm", "ln_f",
)  # fmt: skip


def draw(name: str, shape: torch.Size | tuple[int, ...], *, seed: int, config: ModelConfig) -> torch.Tensor:
    """Return the initial value of the parameter ``name``: always fp32 on the CPU, so that it is the same everywhere."""
    module, _, kind = name.rpartition(".")
    if kind in ("bias", "correction"):
        return torch.zeros(shape, device="cpu")
    if module.rpartition(".")[2] in NORMS:
        return torch.full(shape, 0.0 if config.norm_offset else 1.0, device="cpu")
    std = STD / math.sqrt(2 * config.n_layer) if module.endswith(".proj") else STD
    return torch.empty(shape, device="cpu").normal_(0.0, std, generator=generator_of(name, seed))


def generator_of(name: str, seed: int) -> torch.Generator:
    """Return the generator on the CPU that draws the parameter ``name``."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator(device="cpu").manual_seed(int.from_bytes(digest[:8], "little", signed=True))


def parameter_names(model: nn.Module) -> dict[int, str]:
    """Return the name under which each parameter is init_weight, by ``id(parameter)``.

    Of a tied pair the last name counts: that is ``transformer.wte.weight``. The ids are good while the model lives.
    """
    return {id(p): name for name, p in model.named_parameters(remove_duplicate=False)}


class Materializer:
    """Gives the parameters of a model their values, module by module, wherever the modules are by then.

    Args:
        model: Its parameters may be on the meta device. FSDP takes them out of the model one unit after the other; that
            is why their names are noted now.
        value_of: (name, shape) -> the parameter's value, on any device and in any floating-point dtype.
        device: Where parameters on the meta device are made; others stay where they are. Dtypes stay, ties survive.
    """

    def __init__(
        self,
        model: nn.Module,
        value_of: Callable[[str, torch.Size], torch.Tensor],
        device: torch.device | str = "cpu",
    ) -> None:
        self._value_of, self._device = value_of, device
        self._names = parameter_names(model)
        self._names |= {id(buffer): name for name, buffer in model.named_buffers()}
        self._originals = [*model.parameters(), *model.buffers()]  # keeps the ids from being reused
        self._ready: dict[int, nn.Parameter] = {}

    @torch.no_grad()
    def __call__(self, module: nn.Module, wanted: Callable[[nn.Parameter], bool] = lambda parameter: True) -> None:
        """Give the parameters directly in ``module`` their values, those that are ``wanted``; and its buffers."""
        for key, buffer in list(module.named_buffers(recurse=False)):
            if id(buffer) in self._names:
                setattr(module, key, self._filled(buffer))
        for key, parameter in list(module.named_parameters(recurse=False)):
            if not parameter.is_floating_point():
                continue  # quantised: it has its value
            if id(parameter) in self._names and wanted(parameter):
                if id(parameter) not in self._ready:
                    self._ready[id(parameter)] = self._filled(parameter)
                setattr(module, key, self._ready[id(parameter)])  # the same object for both of a tied pair

    def _filled(self, tensor: torch.Tensor) -> torch.Tensor:
        value = self._value_of(self._names[id(tensor)], tensor.shape)
        if tensor.is_meta:
            filled = torch.empty_like(tensor, device=self._device).copy_(value)
            is_parameter = isinstance(tensor, nn.Parameter)
            return nn.Parameter(filled, requires_grad=tensor.requires_grad) if is_parameter else filled
        tensor.copy_(value)
        return tensor


def initialize(model: nn.Module, seed: int, device: torch.device | str = "cpu") -> None:
    """Give every parameter of a GPT (it needs ``model.config``) its initial value, in place."""
    materialize = Materializer(model, init_weight(model, seed), device)
    for module in model.modules():
        materialize(module)


def init_weight(model: nn.Module, seed: int) -> Callable[[str, torch.Size], torch.Tensor]:
    """Return the function from name and shape to initial value."""
    config = model.config
    return lambda name, shape: draw(name, shape, seed=seed, config=config)
