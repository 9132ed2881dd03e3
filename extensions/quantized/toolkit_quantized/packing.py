"""Quantized weights in a Hugging Face folder: the formats pack-quantized and int-quantized of compressed-tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from toolkit.checkpoints.hf.export_hf import load_with_transformers
from toolkit.checkpoints.merge import relative_difference
from toolkit.errors import GuardError, UserError, join_first, notice, require_option, require_package
from toolkit.models.config import Fields, ModelConfig
from toolkit.models.families import family_of
from toolkit.models.gpt import model_on_meta
from toolkit.models.quantize import quantized_layers
from toolkit.models.quantizer import NamedTensors
from toolkit_quantized.layers import describe
from toolkit_quantized.numbers import FakeQuantizer, dequantize, quantize
from toolkit_quantized.qat import GROUP_SIZE


class Packing:
    """How to export a model, see :class:`toolkit.models.quantizer.Packing`.

    Args:
        model: The architecture.
        kind: The value of ``--quantize``: int4, int8, int8-int4 or dense.
        dtype: Dtype of the folder. Loaders multiply integers and scales in it.
    """

    def __init__(self, model: ModelConfig, kind: str, dtype: torch.dtype) -> None:
        qat, name = model.qat or {}, str(dtype).removeprefix("torch.")
        is_trained = bool(qat) and kind in ("dense", qat["weights"])
        hint = "the model was not trained with --qat.weights; use int4, int8 or none"
        require_option(is_trained or kind != "dense", "quantize", kind, hint)
        if not is_trained:
            qat = {"weights": kind, "group_size": GROUP_SIZE, "dtype": name}
        hint = f"would round the scales, which were trained in {qat['dtype']}; remove it"
        require_option(name in ("float32", qat["dtype"]), "dtype", name, hint)
        self.quantizer, self.kind, self.dtype = FakeQuantizer.of(qat), kind, dtype
        how = "as they were trained" if is_trained else "without training: weights are rounded to nearest"
        stored = qat
        if kind == "dense":
            *inputs, weights = qat["weights"].split("-")
            stored = qat | {"weights": weights}
            how += "; inputs are not rounded" * len(inputs)
        self.note = f"{describe(stored)}, {how}"
        self._layers = {f"{name}.weight": layer for name, layer in quantized_layers(model_on_meta(model))}
        for name, layer in self._layers.items():
            hint = f"{name} has {layer.in_features} input features, which groups of {GROUP_SIZE} weights do not divide"
            fix = "remove it, or train with another --qat.group_size"
            require_option(layer.in_features % qat["group_size"] == 0, "quantize", kind, f"{hint}; {fix}")
        self._widths = {
            hf: self._layers[entry.native[0]].in_features
            for entry in family_of(model).weight_map(model)
            for hf in entry.hf
            if self._layers.keys() >= {*entry.native}
        }
        self._has_linear = model.family not in ("gpt2", "falcon")  # Conv1D and FalconLinear in transformers
        self._ignored = {"lm_head": None}

    def dense(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the model's weights with quantized values, each computed on access."""
        return _Dense(weights, self)

    def quantized(self, weight: Tensor) -> Tensor:
        """Return a weight, (..., in), with quantized values, in its dtype."""
        values, scale, _ = quantize(weight.flatten(0, -2), self.quantizer)
        return dequantize(values, scale).view_as(weight).to(weight.dtype)

    def pack(self, tensors: NamedTensors) -> Iterator[tuple[str, Tensor]]:
        """Replace weights by integers, scales and shapes, under the names of compressed-tensors; also on meta.

        Raises:
            UserError: transformers has no quantized layer for a weight.
        """
        for name, tensor in tensors:
            stem = name.removesuffix(".weight")
            if name not in self._widths:
                if tensor.ndim == 2:
                    self._ignored[stem] = None
                yield name, tensor
                continue
            if not self._has_linear or tensor.ndim != 2 or stem == name or tensor.size(1) != self._widths[name]:
                hint = f"transformers has no quantized layer for {name}; use dense after --qat.weights, or none"
                raise UserError(f"--quantize {self.kind}: {hint}")
            values, scale, _ = quantize(tensor, self.quantizer)
            yield f"{stem}.weight_scale", scale.to(self.dtype)
            if self.quantizer.rounds_inputs:
                yield name, values.to(torch.int8)
            else:
                yield f"{stem}.weight_packed", pack_integers(values, self.quantizer.largest)
                yield f"{stem}.weight_shape", torch.tensor(tensor.shape, device=tensor.device)

    @property
    def config(self) -> Fields:
        """The ``quantization_config`` of config.json, complete after :meth:`pack`."""
        weights = {"num_bits": self.quantizer.bits, "type": "int", "symmetric": True, "strategy": "group"}
        weights |= {"group_size": self.quantizer.group_size}
        # vLLM and compressed-tensors expect unpacked integers where inputs are rounded, too.
        name = "int-quantized" if self.quantizer.rounds_inputs else "pack-quantized"
        group: Fields = {"targets": ["Linear"], "format": name, "weights": weights}
        if self.quantizer.rounds_inputs:
            inputs = {"num_bits": 8, "type": "int", "symmetric": False, "strategy": "token", "dynamic": True}
            group["input_activations"] = inputs
        # Without the status, transformers loads random weights; without the group's format, vLLM refuses experts.
        return {
            "quant_method": "compressed-tensors", "quantization_status": "compressed", "format": name,
            "config_groups": {"group_0": group}, "ignore": [*self._ignored],
        }  # fmt: skip

    def load_verified(self, folder: Path, config: ModelConfig, tensors: dict[str, Tensor], tokens: Tensor) -> Any:
        """Load a folder with transformers and compare it with its dense ``tensors``, under Hugging Face's names.

        Returns transformers' fp32 model of these.

        Raises:
            GuardError: A weight differs, or the logits of ``tokens[0]`` by more than one unit of the dtype; with
                rounded inputs, logits are not compared.
        """
        require_package("--verify true", "compressed_tensors", "0.17")
        with redirect_stderr(StringIO()):  # progress bars
            packed = load_with_transformers(folder, config, self.dtype).eval()
            packed.hf_quantizer.compressor.decompress_model(packed)
        dense_config = type(packed.config).from_pretrained(str(folder), local_files_only=True)
        del dense_config.quantization_config

        def load_dense(dtype: torch.dtype) -> Any:
            values = dict(tensors)
            return type(packed).from_pretrained(None, config=dense_config, state_dict=values, dtype=dtype).eval()

        dense = load_dense(self.dtype)
        values = packed.state_dict()
        wrong = [name for name, tensor in dense.state_dict().items() if not torch.equal(values[name], tensor)]
        if wrong:
            raise GuardError(f"transformers loads other weights from {folder}: {join_first(wrong)}")
        a, b = (model(tokens[:1], use_cache=False).logits.float() for model in (packed, dense))
        difference = relative_difference(a, b)
        if self.quantizer.rounds_inputs:
            notice(f"note: rounded inputs change transformers' logits by {difference:.1e}, which is not verified")
        elif not difference <= torch.finfo(self.dtype).eps:
            raise GuardError(f"transformers computes other logits with the quantized weights: {difference:.1e}")
        return dense if self.dtype == torch.float32 else load_dense(torch.float32)


class _Dense(Mapping[str, Tensor]):
    def __init__(self, weights: Mapping[str, Tensor], packing: Packing) -> None:
        self._weights, self._packing = weights, packing

    def __getitem__(self, name: str) -> Tensor:
        weight = self._weights[name]
        return self._packing.quantized(weight) if name in self._packing._layers else weight

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


def pack_integers(values: Tensor, largest: int) -> Tensor:
    """Pack integers, (out, in), into (out, n) int32: the first in the lowest bits, plus ``largest + 1``."""
    unsigned = (values.short() + largest + 1).to(torch.uint8)
    if largest == 7:
        unsigned = F.pad(unsigned, (0, -unsigned.size(1) % 2))
        unsigned = unsigned[:, ::2] | unsigned[:, 1::2] << 4
    return F.pad(unsigned, (0, -unsigned.size(1) % 4)).contiguous().view(torch.int32)
