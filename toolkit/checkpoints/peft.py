"""Adapters to peft's format and back, through the families' tables of weight names.

Where Hugging Face keeps apart what is fused here (Llama's q_proj, k_proj, v_proj), each part's adapter becomes the one
of its layer. Where both are fused (GPT-NeoX, GPT-2), the parts become one adapter: A one below the other, B in blocks;
its rank is that of all parts together, and its alpha grows so that the scaling stays.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from toolkit.checkpoints.adapters import load_adapters, named_base, read_adapter, read_adapter_info
from toolkit.checkpoints.folder import fitting_weights, model_on_meta, read_model_config
from toolkit.checkpoints.merge import copy_files
from toolkit.checkpoints.store import require_new_folder, write_folder
from toolkit.data.tokenizer import FILE_PATTERNS
from toolkit.errors import UserError
from toolkit.models.config import ModelConfig
from toolkit.models.families import family_of
from toolkit.models.families.tables import Map
from toolkit.models.lora import Adapter, LoRALinear, add_lora, magnitude_of, qkv_rows
from toolkit.models.lora_config import PARTS, LoRAConfig

SETTINGS, TENSORS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
# What peft can do and this program cannot, with the values that ask for nothing.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "bias": ("none",), "modules_to_save": (None, []), "rank_pattern": (None, {}), "alpha_pattern": (None, {}),
    "layers_to_transform": (None, []), "layer_replication": (None, []), "lora_bias": (None, False),
    "use_qalora": (None, False), "trainable_token_indices": (None, [], {}), "target_parameters": (None, []),
    "alora_invocation_tokens": (None, []),
}  # fmt: skip
# These ways to begin change the base's weights, so that the adapters alone are half of the model.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
# transformers 5 has renamed GPT-NeoX's head: an adapter of it is written under both names, and read under either.
_RENAMED = {"embed_out": "lm_head"}


@dataclass(frozen=True)
class _Layer:
    """A linear layer under its name here and the entry of the family's table that has its weight."""

    name: str
    out_features: int
    entry: Map

    @property
    def modules(self) -> list[str]:
        """The Hugging Face layers that it is, by name."""
        return [name.removesuffix(".weight") for name in self.entry.theirs]

    @property
    def is_turned(self) -> bool:
        """Whether theirs are (in, out)."""
        probe = torch.empty(self.out_features, self.out_features + 1, device="meta")
        return self.entry.to_hf([probe])[0].size(0) == self.out_features + 1

    def to_theirs(self, rows: Tensor) -> list[Tensor]:
        """(out, k) -> what of it belongs to each of their layers, (their out, k)."""
        parts = self.entry.to_hf([rows])
        return [part.t() if self.is_turned else part for part in parts]

    def to_ours(self, parts: list[Tensor]) -> Tensor:
        """The inverse."""
        return self.entry.from_hf([part.t() if self.is_turned else part for part in parts])[0]

    def covers(self, rows: range) -> list[bool]:
        """Which of their layers hold some of these rows."""
        return [bool(part.any()) for part in self.to_theirs(_in_rows(torch.ones(len(rows), 1), rows, self))]


def export_peft(checkpoint_dir: Path, out_dir: Path, base_checkpoint_dir: str | Path | None = None) -> str:
    """Write a folder that ``peft.PeftModel.from_pretrained`` loads, whole or not at all.

    Args:
        checkpoint_dir: A folder with adapters.
        out_dir: The new folder; one that is there must be empty.
        base_checkpoint_dir: Where the base is; what it was in training when not given. Its weights are read only for
            DoRA on a part of a layer that is fused in the Hugging Face model, too.

    Returns:
        What the new folder names as its base.

    Raises:
        UserError: the adapters cannot be read, out_dir is in use, or the disk is full.
    """
    require_new_folder(out_dir)
    info, config = read_adapter_info(checkpoint_dir), replace(read_model_config(checkpoint_dir), tie_embeddings=False)
    model = model_on_meta(config)
    add_lora(model, info.lora)
    model.load_state_dict(load_adapters(checkpoint_dir, model), strict=False, assign=True)
    base_weights: dict[str, Tensor] = {}

    def weight_of(name: str) -> Tensor:
        if not base_weights:
            base = read_adapter(checkpoint_dir, base_checkpoint_dir).base
            base_weights.update(fitting_weights(base, model_on_meta(read_model_config(base))))
        return base_weights[name]

    tensors: dict[str, Tensor] = {}
    for layer in _layers(config):
        part = model.get_submodule(layer.name)
        if isinstance(part, LoRALinear):
            tensors |= dict(_exported(layer, part, weight_of))
    base_name = _base_name(info.base if base_checkpoint_dir is None else named_base(base_checkpoint_dir))
    settings = _settings(info.lora, tensors, _layers(config), base_name)

    def write(folder: Path) -> None:
        from safetensors.torch import save_file

        save_file(tensors, folder / TENSORS, metadata={"format": "pt"})
        (folder / SETTINGS).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
        copy_files(checkpoint_dir, folder, FILE_PATTERNS)

    write_folder(out_dir, write, flag="out_dir")
    return base_name


def import_peft(folder: str | Path, config: ModelConfig) -> tuple[LoRAConfig, dict[str, Tensor]]:
    """Read adapters that peft saved, for a base of this architecture.

    An adapter of a layer that is fused in the Hugging Face model, too, becomes one for the queries, one for the keys
    and one for the values: the same function of the same rank each.

    Returns:
        The options and the adapters in fp32, by their names here.

    Raises:
        UserError: a file is missing or broken, a setting is one that this program does not have, or the adapters are
            not for this architecture; the setting or the tensor is named.
    """
    folder = Path(folder)
    settings, found = _read_settings(folder), _read_tensors(folder, config)
    layers = _layers(config)
    for old, new in _RENAMED.items():
        if any(old in layer.modules for layer in layers) and new in found:
            found[old] = found.pop(new)
    lora = _options(folder, settings, _selected(layers, found, config))
    model = model_on_meta(replace(config, tie_embeddings=False))
    add_lora(model, lora)
    adapters: dict[str, Tensor] = {}
    for layer in layers:
        part = model.get_submodule(layer.name)
        if isinstance(part, LoRALinear):
            adapters |= _imported(layer, part, found, folder)
    used = {module for layer in layers for module in layer.modules}
    if unknown := sorted(module for module in found if module not in used):
        raise UserError(f"--from_peft {folder}: adapts {unknown[0]}, which this program cannot adapt in such a model")
    return lora, adapters


def _layers(config: ModelConfig) -> list[_Layer]:
    """All linear layers that adapters may have."""
    config = replace(config, tie_embeddings=False)  # a tied head has no entry of its own
    model, layers = model_on_meta(config), []
    for entry in family_of(config).weights(config):
        name, _, kind = entry.ours[0].rpartition(".")
        part = model.get_submodule(name)
        if kind == "weight" and isinstance(part, torch.nn.Linear):
            layers.append(_Layer(name, part.out_features, entry))
    return layers


def _in_rows(values: Tensor, rows: range, layer: _Layer) -> Tensor:
    """(out, k) with these values in some rows and zeros elsewhere."""
    full = values.new_zeros(layer.out_features, values.size(1))
    full[rows.start : rows.stop] = values
    return full


def _exported(layer: _Layer, part: LoRALinear, weight_of: Callable[[str], Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield (name in peft, tensor) for the adapters of one layer."""
    adapters: list[Adapter] = list(part.lora.values())
    covers = [layer.covers(adapter.rows) for adapter in adapters]
    factors = [layer.to_theirs(_in_rows(adapter.B.detach(), adapter.rows, layer)) for adapter in adapters]
    magnitudes = _magnitudes(layer, part, weight_of) if part.dora else None
    for i, module in enumerate(layer.modules):
        used = [k for k in range(len(adapters)) if covers[k][i]]
        for name in filter(None, (module, _RENAMED.get(module))) if used else ():
            yield f"{_PREFIX}{name}.lora_A.weight", torch.cat([adapters[k].A.detach() for k in used])
            yield f"{_PREFIX}{name}.lora_B.weight", torch.cat([factors[k][i] for k in used], dim=1).contiguous()
            if magnitudes is not None:
                yield f"{_PREFIX}{name}.lora_magnitude_vector", magnitudes[i].flatten().contiguous()


def _magnitudes(layer: _Layer, part: LoRALinear, weight_of: Callable[[str], Tensor]) -> list[Tensor]:
    """DoRA's magnitudes of each of their layers, (their out, 1); rows that are not adapted keep the norms they have."""
    full, adapted = torch.zeros(layer.out_features), torch.zeros(layer.out_features, 1)
    for adapter in part.lora.values():
        adapted[adapter.rows.start : adapter.rows.stop] = 1
    if any(theirs.any() and not theirs.all() for theirs in layer.to_theirs(adapted)):
        full = magnitude_of(weight_of(f"{layer.name}.weight"))
    for adapter in part.lora.values():
        full[adapter.rows.start : adapter.rows.stop] = adapter.magnitude.detach()
    return layer.to_theirs(full[:, None])


def _settings(lora: LoRAConfig, tensors: dict[str, Tensor], layers: list[_Layer], base: str) -> dict[str, Any]:
    """The content of adapter_config.json."""
    ending = ".lora_A.weight"
    ranks = {n[len(_PREFIX) : -len(ending)]: t.size(0) for n, t in tensors.items() if n.endswith(ending)}
    by_target = _targets(ranks, [module for layer in layers for module in layer.modules])
    rank = lora.r if lora.r in by_target.values() else min(by_target.values())
    other = {target: r for target, r in by_target.items() if r != rank}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "target_modules": sorted(by_target),
        "r": rank,
        "lora_alpha": _alpha(lora, rank),
        "rank_pattern": other,
        "alpha_pattern": {target: _alpha(lora, r) for target, r in other.items()},
        "lora_dropout": lora.dropout,
        "use_rslora": lora.rslora,
        "use_dora": lora.dora,
        "fan_in_fan_out": any(layer.is_turned for layer in layers),
        "bias": "none",
        "modules_to_save": None,
        "init_lora_weights": True,
        "inference_mode": True,
    }


def _alpha(lora: LoRAConfig, rank: int) -> int | float:
    """The alpha with which adapters of that rank have the scaling of ours."""
    alpha = lora.alpha * (math.sqrt(rank / lora.r) if lora.rslora else rank / lora.r)
    return int(alpha) if alpha == int(alpha) else alpha


def _targets(ranks: dict[str, int], modules: list[str]) -> dict[str, int]:
    """{last part of a layer's name: rank}; two parts where one would name layers that are not adapted, too."""
    targets = {}
    for module, rank in ranks.items():
        parts = module.split(".")
        for depth in range(1, len(parts) + 1):
            target = ".".join(parts[-depth:])
            named = [m for m in modules if m == target or m.endswith(f".{target}")]
            if all(ranks.get(m) == rank for m in named):
                break
        targets[target] = rank
    return targets


def _base_name(base: Path) -> str:
    """The name of the base at Hugging Face, where its folder tells it, else the folder."""
    try:
        name = json.loads((base / "config.json").read_text(encoding="utf-8")).get("_name_or_path")
    except (OSError, ValueError, AttributeError):
        name = None
    parts = base.resolve().parts
    if not name and "checkpoints" in parts[-3:-2]:  # checkpoints/ORGANISATION/NAME
        name = "/".join(parts[-2:])
    return name if isinstance(name, str) and name else str(base)


def _read_settings(folder: Path) -> dict[str, Any]:
    path = folder / SETTINGS
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"--from_peft {folder}: holds no {SETTINGS}; give a folder that peft wrote") from error
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: not JSON: {error}") from error
    if not isinstance(settings, dict) or settings.get("peft_type") != "LORA":
        raise UserError(f"{path}: peft_type must be LORA; other adapters are not supported")
    for name, neutral in _UNSUPPORTED.items():
        if name in settings and settings[name] not in neutral:
            raise UserError(f"{path}: {name} {settings[name]!r:.100}: not supported; only {neutral[0]!r} is")
    start = str(settings.get("init_lora_weights", "")).lower()
    if start.startswith(_CHANGES_BASE):
        raise UserError(
            f"{path}: init_lora_weights {start}: changes the base's weights, too; save such adapters from peft with "
            "path_initial_model_for_weight_conversion first"
        )
    return settings


def _read_tensors(folder: Path, config: ModelConfig) -> dict[str, dict[str, Tensor]]:
    """{Hugging Face layer: {"lora_A" or "lora_B" or "lora_magnitude_vector": tensor}}"""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = folder / TENSORS
    if not path.is_file():
        raise UserError(f"--from_peft {folder}: holds no {TENSORS}; save it from peft with safe_serialization=True")
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: the file is damaged or cut short; copy or download it again") from error
    vocabulary = (config.padded_vocab_size, config.n_embd)
    found: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        module, _, kind = name.removeprefix(_PREFIX).removesuffix(".weight").rpartition(".")
        if kind in ("base_layer", "embed_tokens", "embed_in", "wte", "lm_head") and tensor.shape == vocabulary:
            continue  # of the base: peft adds them where the head is adapted, in case they were resized
        if kind not in ("lora_A", "lora_B", "lora_magnitude_vector"):
            raise UserError(f"{path}: holds {name}, which is no adapter of a linear layer")
        found.setdefault(module, {})[kind] = tensor.float()
    return found


def _selected(layers: list[_Layer], found: dict[str, Any], config: ModelConfig) -> set[str]:
    """The parts of LoRAConfig that have adapters in the file."""
    selected: set[str] = set()
    for layer in layers:
        for i, module in enumerate(layer.modules):
            if module in found:
                selected |= {part for part, rows in _parts(layer, config).items() if layer.covers(rows)[i]}
    return selected


def _parts(layer: _Layer, config: ModelConfig) -> dict[str, range]:
    """The parts of LoRAConfig that a layer belongs to, and their rows."""
    if layer.name.endswith(".attn.qkv"):
        return qkv_rows(config)
    kind = "head" if layer.name == "lm_head" else "mlp" if ".mlp." in layer.name else "projection"
    return {kind: range(layer.out_features)}


def _options(folder: Path, settings: dict[str, Any], selected: set[str]) -> LoRAConfig:
    if not selected:
        raise UserError(f"--from_peft {folder}: adapts none of this model's layers; give adapters of this architecture")
    try:
        return LoRAConfig(
            r=settings.get("r", 8),
            alpha=settings.get("lora_alpha", 8),
            dropout=settings.get("lora_dropout", 0.0),
            rslora=settings.get("use_rslora", False),
            dora=settings.get("use_dora", False),
            **{part: part in selected for part in PARTS},
        )
    except (TypeError, UserError) as error:
        raise UserError(f"{folder / SETTINGS}: {error}") from error


def _imported(layer: _Layer, part: LoRALinear, found: dict[str, dict[str, Tensor]], folder: Path) -> dict[str, Tensor]:
    """The adapters of one layer, by their names here."""
    outs = [theirs.size(0) for theirs in layer.to_theirs(torch.empty(layer.out_features, 1))]
    adapters: dict[str, Tensor] = {}
    for name, adapter in part.lora.items():
        i = layer.covers(adapter.rows).index(True)
        given = found.get(layer.modules[i], {})
        _require_adapter(given, layer.modules[i], outs[i], adapter, folder)
        rows = slice(adapter.rows.start, adapter.rows.stop)
        adapters[f"{layer.name}.lora.{name}.A"] = given["lora_A"].clone()
        adapters[f"{layer.name}.lora.{name}.B"] = _to_ours(layer, i, given["lora_B"], outs)[rows].clone()
        if part.dora:
            magnitude = _to_ours(layer, i, given["lora_magnitude_vector"][:, None], outs)
            adapters[f"{layer.name}.lora.{name}.magnitude"] = magnitude[rows, 0].clone()
    return adapters


def _to_ours(layer: _Layer, i: int, tensor: Tensor, outs: list[int]) -> Tensor:
    """(out, k), from what belongs to the i-th of their layers."""
    return layer.to_ours([tensor if k == i else tensor.new_zeros(out, tensor.size(1)) for k, out in enumerate(outs)])


def _require_adapter(given: dict[str, Tensor], module: str, out: int, adapter: Adapter, folder: Path) -> None:
    r, in_features = adapter.A.shape
    wanted = {"lora_A": (r, in_features), "lora_B": (out, r)}
    if hasattr(adapter, "magnitude"):
        wanted["lora_magnitude_vector"] = (out,)
    for kind, shape in wanted.items():
        if kind not in given:
            raise UserError(
                f"--from_peft {folder}: has no {module}.{kind}; the same layers must be adapted in every block, and "
                "all of an MLP or none"
            )
        if tuple(given[kind].shape) != shape:
            raise UserError(f"{folder / TENSORS}: {module}.{kind} is {tuple(given[kind].shape)}, not {shape}")
