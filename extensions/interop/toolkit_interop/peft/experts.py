"""Map adapters on stacked experts to peft's ``target_parameters``, for import and export.

transformers 5 stacks the experts of a layer in two parameters of one module. ``gate_up_proj`` has the rows of fc_1 and
of fc_2, ``down_proj`` has proj's. Of a parameter of n experts, peft's ``lora_A`` is (n * r, in), expert by expert, and
its ``lora_B`` is (out, r * n), in which the expert is the last index (``ParamWrapper.get_delta_weight``).

peft wraps the two parameters one inside the other, and its tensor names say only which wrapper is outside: down_proj.

An exported gate_up_proj has the adapters of fc_1 and fc_2: A stacked, B block-diagonal, with twice the rank and alpha.
"""

import re
from collections.abc import Container
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from toolkit.checkpoints.weights import Tensors
from toolkit.models.config import ModelConfig
from toolkit.models.families import family_of
from toolkit.models.families.tables import WeightMapping
from toolkit.models.gpt import GPT
from toolkit.models.moe import LoRAStackedLinear

_INNER = ".base_layer"  # of the module's name, for the parameter of the inner wrapper


def hf_module(name: str) -> str:
    """Return the name in transformers 5 of a module or a weight. Mixtral's and Granite's files have older names."""
    name = re.sub(r"\.block_sparse_moe\.(gate|experts\.\d)", r".mlp.\1", name)  # Mixtral
    return name.replace(".router.layer", ".router").replace(".output_linear.", ".experts.")


class Factors(NamedTuple):
    """A (experts, r, in) and B (experts, out, r)."""

    a: Tensor
    b: Tensor


@dataclass(frozen=True)
class ExpertParameter:
    """A parameter of transformers' experts.

    ``names`` are the native layers whose rows it has, ``entry`` is the map of the first one's weight, and ``module``
    the name of the experts. ``sizes`` are the number of experts, the inputs and the outputs.
    """

    names: tuple[str, ...]
    entry: WeightMapping
    module: str
    sizes: tuple[int, int, int]

    @property
    def name(self) -> str:
        """Name of the parameter."""
        return f"{self.module}.{'gate_up_proj' if len(self.names) > 1 else 'down_proj'}"

    @property
    def peft_module(self) -> str:
        """Module of its adapter in peft's files, if both parameters have adapters."""
        return self.module + _INNER if len(self.names) > 1 else self.module

    def has_both(self, modules: Container[str]) -> bool:
        """Whether both parameters of the experts have adapters in peft's files."""
        return self.module in modules and self.module + _INNER in modules

    def shapes(self, rows: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of peft's tensors, of which lora_A has about this number of rows."""
        n, n_in, n_out = self.sizes
        rows = max(1, rows // n) * n
        return {"lora_A": (rows, n_in), "lora_B": (n_out, rows)}

    def export(self, model: GPT) -> Tensors:
        """Return peft's tensors by name, without PREFIX; none without adapters."""
        layers = [layer for name in self.names if isinstance(layer := model.get_submodule(name), LoRAStackedLinear)]
        factors = [Factors(one.A.detach(), one.B.detach()) for layer in layers for one in layer.adapters]
        if not factors:
            return {}
        r, n = factors[0].a.size(1), len(factors)
        b = self._join([F.pad(one.b, (k * r, (n - 1 - k) * r)) for k, one in enumerate(factors)])
        lora_a = torch.cat([one.a for one in factors], dim=1).flatten(0, 1)
        lora_b = b.permute(1, 2, 0).flatten(1)
        return {
            f"{self.peft_module}.lora_A.weight": lora_a.contiguous(),
            f"{self.peft_module}.lora_B.weight": lora_b.contiguous(),
        }

    def split(self, lora_a: Tensor, lora_b: Tensor, r: int) -> dict[str, Factors] | None:
        """Return the factors of rank ``r`` of each native layer; None if the adapter has no such parts."""
        n, n_expert = len(self.names), self.sizes[0]
        a = lora_a.unflatten(0, (n_expert, -1))
        parts = self._split(lora_b.unflatten(1, (-1, n_expert)).permute(2, 0, 1))
        if a.size(1) == r:  # the layers share A
            return {name: Factors(a.clone(), b.contiguous()) for name, b in zip(self.names, parts, strict=True)}
        if a.size(1) != n * r:
            return None
        factors = {}
        for k, (name, b) in enumerate(zip(self.names, parts, strict=True)):
            columns = slice(k * r, (k + 1) * r)
            if b[..., : k * r].any() or b[..., (k + 1) * r :].any():
                return None
            factors[name] = Factors(a[:, columns].clone(), b[..., columns].contiguous())
        return factors

    @property
    def _is_transposed(self) -> bool:
        """Whether the parameter is (experts, in, out), as gpt-oss's."""
        probe = torch.empty(1, 1, 3, device="meta")
        return self.entry.to_hf([probe] * len(self.entry.native))[0].size(-2) == 3

    def _join(self, parts: list[Tensor]) -> Tensor:
        """Return the parameter's rows, (experts, out, k), from each layer's rows."""
        return self.entry.to_hf(parts)[0].mT if self._is_transposed else torch.cat(parts, dim=1)

    def _split(self, rows: Tensor) -> list[Tensor]:
        """Invert :meth:`_join`."""
        if self._is_transposed:
            return self.entry.from_hf([rows.mT])
        return list(rows.chunk(len(self.names), dim=1))


def expert_parameters(config: ModelConfig) -> list[ExpertParameter]:
    """Return the parameters of the experts of all layers, in the order of the layers."""
    entries = {name: entry for entry in family_of(config).weight_map(config) for name in entry.native}
    width, n_expert, parameters = config.expert_size, config.n_expert, []
    for i in range(config.n_layer) if config.n_moe_layer else ():
        native = f"transformer.h.{i}.mlp.experts."
        entry = entries.get(f"{native}proj.weight")
        if entry is not None:
            module = hf_module(entry.hf[0]).partition(".experts.")[0] + ".experts"
            gate_up, entry_up = (f"{native}fc_1", f"{native}fc_2"), entries[f"{native}fc_1.weight"]
            parameters += [
                ExpertParameter(gate_up, entry_up, module, (n_expert, config.n_embd, 2 * width)),
                ExpertParameter((f"{native}proj",), entry, module, (n_expert, width, config.n_embd)),
            ]
    return parameters
