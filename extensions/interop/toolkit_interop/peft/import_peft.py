"""Import adapters from peft's format. :mod:`.layers` maps native layers to Hugging Face layers."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from toolkit.checkpoints.fingerprint import base_fingerprint
from toolkit.checkpoints.hf.import_hf import is_import_of
from toolkit.checkpoints.importers import ImportedAdapters, Importer
from toolkit.checkpoints.store import WEIGHTS
from toolkit.checkpoints.torch_zip import DAMAGED
from toolkit.checkpoints.weights import Tensors
from toolkit.errors import UserError, one_line
from toolkit.io.safe_parse import read_json_object
from toolkit.models.config import ModelConfig
from toolkit.models.lora import adapted_on_meta, attention_rows
from toolkit.models.lora_config import PARTS, LoRAConfig
from toolkit_interop.peft.experts import ExpertParameter, Factors, expert_parameters, hf_module
from toolkit_interop.peft.layers import (
    PREFIX,
    RENAMED,
    SETTINGS,
    TENSORS,
    TEXT_MODEL,
    Layer,
    PlacedAdapter,
    linear_layers,
)

# Unsupported peft settings, with their neutral values.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "bias": ("none",), "modules_to_save": (None, []), "layers_to_transform": (None, []),
    "layer_replication": (None, []), "lora_bias": (None, False), "use_qalora": (None, False),
    "trainable_token_indices": (None, [], {}), "alora_invocation_tokens": (None, []),
}  # fmt: skip
# Initializations that also change the base weights, so the adapters alone are not sufficient.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


class _PeftAdapters(NamedTuple):
    """A loaded peft folder: settings, tensors by Hugging Face layer and kind, and the model's layers and experts."""

    folder: Path
    settings: dict[str, Any]
    tensors: dict[str, Tensors]
    layers: list[Layer]
    experts: list[ExpertParameter]

    def pattern_error(self) -> UserError:
        name = "rank_pattern" if self.settings.get("rank_pattern") else "alpha_pattern"
        return UserError(
            f"{self.folder / SETTINGS}: {name} {self.settings[name]!r:.100}: not supported; only the patterns that "
            "toolkit convert_to_peft writes for fused layers are supported"
        )

    def rank(self, lora: LoRAConfig, fused: list[Layer]) -> int:
        """Return the rank of fused layers. Reject patterns that match other layers or change the scaling.

        The patterns of experts are checked with their tensors.
        """
        ranks, alphas = (self.settings.get(name) or {} for name in ("rank_pattern", "alpha_pattern"))
        pattern_ranks = set()
        try:
            if ranks.keys() != alphas.keys():
                raise self.pattern_error()
            for key, rank in ranks.items():
                matches = [
                    layer for layer in self.layers if any(f".{module}".endswith(f".{key}") for module in layer.modules)
                ]
                is_same_scaling = math.isclose(replace(lora, r=rank, alpha=alphas[key]).scaling, lora.scaling)
                # peft's keys are regular expressions, such as those that it writes itself
                suffix = "." + key.removeprefix(r".*\.").replace(r"\.", ".")
                if is_same_scaling and any(expert.name.endswith(suffix) for expert in self.experts):
                    continue
                if not (is_same_scaling and type(rank) is int and matches and all(map(_is_fused, matches))):
                    raise self.pattern_error()
                pattern_ranks |= {rank for layer in matches if layer in fused}
        except (AttributeError, TypeError, ValueError) as error:  # the file may hold anything
            raise self.pattern_error() from error
        if len(pattern_ranks) > 1:
            raise self.pattern_error()
        return pattern_ranks.pop() if pattern_ranks else lora.r

    def nonzero_column_masks(self, layers: list[Layer], parts: dict[str, range], rank: int) -> Tensors:
        """Return {part: mask, (rank,)} of lora_B columns that are nonzero in the part's rows in any layer."""
        used = torch.zeros(layers[0].out_features, rank, dtype=torch.bool)
        for layer in layers:
            b = self.tensors.get(layer.modules[0], {}).get("lora_B")
            if b is not None and b.shape == used.shape:  # wrong shapes are reported later
                used |= layer.to_native([b]) != 0
        return {part: used[rows.start : rows.stop].any(0) for part, rows in parts.items()}


class _Fused(NamedTuple):
    """Adapter layout of layers that are fused in the Hugging Face model."""

    rank: int
    parts: tuple[str, ...] = ()
    """Parts with concatenated adapters, each with the same number of lora_B columns; empty if parts share columns."""

    def columns(self, part: str) -> slice:
        """Return the part's columns of lora_B, which are also its rows of lora_A."""
        width = self.rank // max(1, len(self.parts))
        first = self.parts.index(part) * width if self.parts else 0
        return slice(first, first + width)


def read_adapters(folder: Path, base: Path, config: ModelConfig) -> ImportedAdapters | None:
    """Read peft adapters for the model in ``base``; None if peft did not write the folder."""
    if not (folder / SETTINGS).is_file():
        return None
    lora, adapters, note = import_peft(folder, config)
    return ImportedAdapters(lora, adapters, [*filter(None, (check_base(folder, base), note))])


def import_peft(folder: Path, config: ModelConfig) -> tuple[LoRAConfig, Tensors, str | None]:
    """Read peft adapters for a base model of this architecture.

    The adapter of a fused Hugging Face layer is split into the parts that :func:`~.export_peft.export_peft`
    concatenated. If it has no such parts, queries, keys and values (or Phi-3's two MLP layers) each get a copy, which
    computes the same function with the same rank.

    Returns:
        The LoRA configuration, fp32 adapters by native name, and a note if an adapter was copied to several parts.
    """
    settings, tensors = _read_settings(folder), _read_tensors(folder, config)
    layers = linear_layers(config)
    for old, new in RENAMED.items():
        if any(old in layer.modules for layer in layers) and new in tensors:
            tensors[old] = tensors.pop(new)
    experts = expert_parameters(config)
    if settings.get("target_parameters") and not experts:
        raise UserError(f"--from_peft {folder}: adapts experts, and this base has none; give the base of its training")
    peft = _PeftAdapters(folder, settings, tensors, layers, experts)
    selected = _adapted_parts(layers, tensors, config)
    selected |= {"experts" for expert in experts if expert.module in tensors}
    lora = _lora_config(folder, settings, selected)
    hf_fused = _split_hf_fused(peft, lora)
    lora, qkv = _detect_fused_parts(peft, lora, config)
    model = adapted_on_meta(replace(config, tie_embeddings=False), lora)
    adapters: Tensors = {}
    note = None
    for layer in layers:
        fused = hf_fused[tuple(layer.rows)] if layer.is_fused_in_hf else qkv if _is_fused_qkv(layer) else _Fused(lora.r)
        placed = layer.adapters(model)
        adapters |= _convert_layer(layer, placed, peft, fused)
        if len(placed) > 1 and not fused.parts and _is_fused(layer):
            note = _copy_note(folder, layer.modules[0], len(placed), lora)
    for expert in experts if lora.experts else ():
        factors = _split_experts(expert, peft, lora)
        adapters |= {f"{name}.A": a for name, (a, _) in factors.items()}
        adapters |= {f"{name}.B": b for name, (_, b) in factors.items()}
        if len(factors) > 1 and len(peft.tensors[expert.peft_module]["lora_A"]) == expert.sizes[0] * lora.r:
            note = _copy_note(folder, expert.name, len(factors), lora)
    used = {module for layer in layers for module in layer.modules} | {expert.peft_module for expert in experts}
    if unknown := sorted(tensors.keys() - used):
        raise UserError(f"--from_peft {folder}: adapts {unknown[0]}, which is not supported for this model")
    return lora, adapters, note


def check_base(folder: str | Path, base: Path) -> str | None:
    """Raise UserError if ``base`` is not the adapters' base model. Return a note if that cannot be checked."""
    named = _read_settings(Path(folder)).get("base_model_name_or_path")
    if not isinstance(named, str) or not named:
        return f"--from_peft {folder}: {SETTINGS} names no base model; could not verify that it is {base}"
    try:
        same = _is_same_model(named, base)
    except (UserError, OSError, RuntimeError):  # the last two: too long a path, or ~ and no such user
        same = None
    named = one_line(named)
    if same is False:
        raise UserError(
            f"--from_peft {folder}: was trained on {named}, not on {base}; set checkpoint_dir to {named}, or correct "
            f"base_model_name_or_path in {SETTINGS}"
        )
    return None if same else f"--from_peft {folder}: was trained on {named}; could not verify that it is {base}"


def _is_same_model(named: str, base: Path) -> bool | None:
    """Whether ``named`` is the model in ``base``; None if no such folder exists, directly or below checkpoints/."""
    folder = next((p for p in (Path(named).expanduser(), Path("checkpoints") / named) if p.is_dir()), None)
    if folder is None:
        return None
    if (folder / WEIGHTS).exists():
        return base_fingerprint(folder) == base_fingerprint(base)
    return is_import_of(base, folder)


def _read_settings(folder: Path) -> dict[str, Any]:
    path = folder / SETTINGS
    settings = read_json_object(path)
    if settings.get("peft_type") != "LORA":
        raise UserError(f"{path}: peft_type must be LORA; other adapters are not supported")
    for name, neutral in _UNSUPPORTED.items():
        if name in settings and settings[name] not in neutral:
            raise UserError(f"{path}: {name} {settings[name]!r:.100}: not supported; only {neutral[0]!r} is")
    init = str(settings.get("init_lora_weights", "")).lower()
    if init.startswith(_CHANGES_BASE):
        raise UserError(
            f"{path}: init_lora_weights {init}: also changes the base's weights; save the adapters from peft with "
            "path_initial_model_for_weight_conversion first"
        )
    return settings


def _read_tensors(folder: Path, config: ModelConfig) -> dict[str, Tensors]:
    """Return {Hugging Face layer: {"lora_A", "lora_B" or "lora_magnitude_vector": tensor}}."""
    path = folder / TENSORS
    if not path.is_file():
        raise UserError(f"--from_peft {folder}: holds no {TENSORS}; save it from peft with safe_serialization=True")
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: {DAMAGED}") from error
    vocabulary = (config.padded_vocab_size, config.n_embd)
    by_layer: dict[str, Tensors] = {}
    for name, tensor in tensors.items():
        module, _, kind = name.removeprefix(PREFIX).removesuffix(".weight").rpartition(".")
        if kind in ("base_layer", "embed_tokens", "embed_in", "wte", "lm_head") and tensor.shape == vocabulary:
            continue  # base weights: peft adds them if the head is adapted, in case they were resized
        if kind not in ("lora_A", "lora_B", "lora_magnitude_vector"):
            raise UserError(f"{path}: holds {name}, which is not an adapter of a linear layer")
        by_layer.setdefault(hf_module(module.replace(TEXT_MODEL, "", 1)), {})[kind] = tensor.float()
    return by_layer


def _adapted_parts(layers: list[Layer], tensors: dict[str, Any], config: ModelConfig) -> set[str]:
    """Return the parts of LoRAConfig that have adapters in the file."""
    selected: set[str] = set()
    for layer in layers:
        for i, module in enumerate(layer.modules):
            if module in tensors:
                selected |= {part for part, rows in _parts(layer, config).items() if layer.covers(rows)[i]}
    return selected


def _parts(layer: Layer, config: ModelConfig) -> dict[str, range]:
    """Return {part of LoRAConfig: row range} of a layer."""
    name = layer.names[0].rpartition(".")[2]
    if ".attn." in layer.names[0] and config.has_linear_attention(int(layer.names[0].split(".")[2])):
        return {"linear_attention": range(layer.out_features)}
    if ".attn." in layer.names[0] and name != "proj":
        return attention_rows(config, int(layer.names[0].split(".")[2])).get(name, {})
    kinds = {"lm_head": "head", "gate": "router", "per_layer_gate": "mlp", "per_layer_proj": "mlp"}
    kind = kinds.get(name) or ("mlp" if ".mlp." in layer.names[0] else "projection")
    return {kind: range(layer.out_features)}


def _lora_config(folder: Path, settings: dict[str, Any], selected: set[str]) -> LoRAConfig:
    if not selected:
        raise UserError(f"--from_peft {folder}: adapts none of this model's layers; give adapters of this architecture")
    try:
        if type(r := settings.get("r", 8)) is not int or r >= 2**31:
            raise TypeError(f"r {r!r:.100}: must be an integer below 2**31")
        return LoRAConfig(
            r=r,
            alpha=settings.get("lora_alpha", 8),
            dropout=settings.get("lora_dropout", 0.0),
            rslora=settings.get("use_rslora", False),
            dora=settings.get("use_dora", False),
            **{part: part in selected for part in PARTS},
        )
    except (TypeError, UserError) as error:
        raise UserError(f"{folder / SETTINGS}: {error}") from error


def _is_fused_qkv(layer: Layer) -> bool:
    """Whether queries, keys and values, or two of them, are one layer both natively and in Hugging Face."""
    return layer.names[0].endswith((".attn.qkv", ".attn.kv_b")) and len(layer.modules) == 1


def _is_fused(layer: Layer) -> bool:
    return layer.is_fused_in_hf or _is_fused_qkv(layer)


def _detect_fused_parts(peft: _PeftAdapters, lora: LoRAConfig, config: ModelConfig) -> tuple[LoRAConfig, _Fused]:
    """Find which of q, k and v are adapted in QKV layers that both toolkit and Hugging Face fuse.

    ``lora`` is the configuration of all other layers. Returns the configuration with a separate adapter for each part,
    and the layout of the fused adapters.
    """
    layers = list(filter(_is_fused_qkv, peft.layers))
    rank = peft.rank(lora, layers)
    parts: tuple[str, ...] = ()
    if layers:
        columns = peft.nonzero_column_masks(layers, _parts(layers[0], config), rank)
        used = tuple(part for part in columns if columns[part].any())
        parts = used if _are_in_blocks(columns, _Fused(rank, used)) else ()
    n = max(1, len(parts))
    if rank not in (lora.r, n * lora.r):
        raise peft.pattern_error()
    if not parts or (rank != n * lora.r and set(lora.parts) - {"query", "key", "value"}):
        return lora, _Fused(rank)
    if rank == lora.r:
        alpha = float(f"{lora.alpha / (math.sqrt(n) if lora.rslora else n):.12g}")  # removes rounding errors
        lora = replace(lora, r=rank // n, alpha=alpha)
    all_parts = {part for layer in layers for part in _parts(layer, config)}
    return replace(lora, **{part: part in parts for part in all_parts}), _Fused(rank, parts)


def _split_hf_fused(peft: _PeftAdapters, lora: LoRAConfig) -> dict[tuple[str, ...], _Fused]:
    """Like :func:`_detect_fused_parts`, for layers that only Hugging Face fuses, by the names of their parts.

    All of their parts are adapted.
    """
    layouts: dict[tuple[str, ...], _Fused] = {}
    for parts in {tuple(layer.rows) for layer in peft.layers if layer.is_fused_in_hf}:
        layers = [layer for layer in peft.layers if tuple(layer.rows) == parts]
        rank = peft.rank(lora, layers)
        layouts[parts] = _Fused(rank)
        if rank != lora.r:
            columns = peft.nonzero_column_masks(layers, layers[0].rows, rank)
            layouts[parts] = fused = _Fused(rank, parts)
            if rank != lora.r * len(parts) or not _are_in_blocks(columns, fused):
                raise peft.pattern_error()
    return layouts


def _are_in_blocks(columns: Tensors, fused: _Fused) -> bool:
    """Whether the parts use disjoint, equally wide, ordered blocks of columns."""
    if fused.rank % max(1, len(fused.parts)):
        return False
    outside = {part: columns[part].clone() for part in fused.parts}
    for part in outside:
        outside[part][fused.columns(part)] = False
    return not any(column.any() for column in outside.values())


def _convert_layer(layer: Layer, placed: list[PlacedAdapter], peft: _PeftAdapters, fused: _Fused) -> Tensors:
    """Return the adapter tensors of one layer by native name."""
    outs = [part.size(0) for part in layer.to_hf(torch.empty(layer.out_features, 1))]
    adapters: Tensors = {}
    for name, part, at, adapter in placed:
        i = layer.covers(at).index(True)
        tensors = peft.tensors.get(layer.modules[i], {})
        shapes: dict[str, tuple[int, ...]] = {
            "lora_A": (fused.rank, adapter.A.size(1)),
            "lora_B": (outs[i], fused.rank),
        }
        if has_magnitude := hasattr(adapter, "magnitude"):
            shapes |= {"lora_magnitude_vector": (outs[i],)}
        _require_shapes(tensors, layer.modules[i], shapes, peft.folder)
        rows, columns = slice(at.start, at.stop), fused.columns(part)
        adapters[f"{name}.A"] = tensors["lora_A"][columns].clone()
        adapters[f"{name}.B"] = _part_to_native(layer, i, tensors["lora_B"], outs)[rows, columns].clone()
        if has_magnitude:
            magnitude = _part_to_native(layer, i, tensors["lora_magnitude_vector"][:, None], outs)
            adapters[f"{name}.magnitude"] = magnitude[rows, 0].clone()
    return adapters


def _copy_note(folder: Path, module: str, n: int, lora: LoRAConfig) -> str:
    return (
        f"--from_peft {folder}: each of the {n} parts of {module.rpartition('.')[2]} gets a copy of its adapter, so "
        f"training will diverge from peft's, and an export will have rank {n * lora.r}"
    )


def _split_experts(expert: ExpertParameter, peft: _PeftAdapters, lora: LoRAConfig) -> dict[str, Factors]:
    """Return the factors of a parameter of the experts by native adapter name."""
    if not expert.has_both(peft.tensors):
        raise UserError(
            f"--from_peft {peft.folder}: {expert.module}: must have adapters on gate_up_proj and down_proj in every "
            "layer with experts"
        )
    tensors = peft.tensors[expert.peft_module]
    rows = tensors["lora_A"].size(0) if "lora_A" in tensors else lora.r
    _require_shapes(tensors, expert.peft_module, expert.shapes(rows), peft.folder)
    factors = expert.split(tensors["lora_A"], tensors["lora_B"], lora.r)
    if factors is None:
        raise peft.pattern_error()
    return {f"{name}.lora.whole": one for name, one in factors.items()}


def _part_to_native(layer: Layer, i: int, tensor: Tensor, outs: list[int]) -> Tensor:
    """Return a native tensor (out, k) with the rows of the i-th Hugging Face layer, zeros elsewhere."""
    return layer.to_native([tensor if k == i else tensor.new_zeros(out, tensor.size(1)) for k, out in enumerate(outs)])


def _require_shapes(tensors: Tensors, module: str, shapes: dict[str, tuple[int, ...]], folder: Path) -> None:
    for kind, shape in shapes.items():
        if kind not in tensors:
            raise UserError(
                f"--from_peft {folder}: has no {module}.{kind}; every block must adapt the same layers, and "
                "either all layers of its MLP or none"
            )
        if tuple(tensors[kind].shape) != shape:
            raise UserError(f"{folder / TENSORS}: {module}.{kind} is {tuple(tensors[kind].shape)}, not {shape}")


IMPORTER = Importer(adapters=read_adapters)
