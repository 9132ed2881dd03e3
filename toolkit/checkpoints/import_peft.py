"""Adapters in from peft's format, through the families' tables of weight names; see :mod:`.peft_layers`."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from toolkit.checkpoints.fingerprint import base_fingerprint
from toolkit.checkpoints.folder import model_on_meta
from toolkit.checkpoints.import_hf import is_import_of
from toolkit.checkpoints.peft_layers import PREFIX, RENAMED, SETTINGS, TENSORS, TEXT_MODEL, Layer, Placed, linear_layers
from toolkit.checkpoints.store import WEIGHTS
from toolkit.errors import UserError
from toolkit.models.config import ModelConfig
from toolkit.models.lora import Adapter, add_lora, attention_rows
from toolkit.models.lora_config import PARTS, LoRAConfig
from toolkit.untrusted import read_json

# What peft can do and this program cannot, with the values that ask for nothing.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "bias": ("none",), "modules_to_save": (None, []), "layers_to_transform": (None, []),
    "layer_replication": (None, []), "lora_bias": (None, False), "use_qalora": (None, False),
    "trainable_token_indices": (None, [], {}), "target_parameters": (None, []), "alora_invocation_tokens": (None, []),
}  # fmt: skip
# These ways to begin change the base's weights, so that the adapters alone are half of the model.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


@dataclass(frozen=True)
class _Fused:
    """The adapters of layers of one kind that hold several parts in the Hugging Face model.

    Args:
        rank: Of each.
        parts: What they are put together from, with as many columns of lora_B each; empty where all rows share all.
    """

    rank: int
    parts: tuple[str, ...] = ()

    def columns(self, part: str) -> slice:
        """Of lora_B, or the rows of lora_A, that are the part's."""
        width = self.rank // max(1, len(self.parts))
        first = self.parts.index(part) * width if self.parts else 0
        return slice(first, first + width)


def import_peft(folder: str | Path, config: ModelConfig) -> tuple[LoRAConfig, dict[str, Tensor]]:
    """Read adapters that peft saved, for a base of this architecture.

    An adapter of a layer that is fused in the Hugging Face model becomes again what :func:`~.peft.export_peft` put
    together; any other one for the queries, one for the keys and one for the values (or one of each of Phi-3's two
    layers): the same function, of the same rank each.

    Returns:
        The options and the adapters in fp32, by their names here.

    Raises:
        UserError: a file is missing or broken, a setting is one that this program does not have, or the adapters are
            not for this architecture; the setting or the tensor is named.
    """
    folder = Path(folder)
    settings, found = _read_settings(folder), _read_tensors(folder, config)
    layers = linear_layers(config)
    for old, new in RENAMED.items():
        if any(old in layer.modules for layer in layers) and new in found:
            found[old] = found.pop(new)
    lora = _options(folder, settings, _selected(layers, found, config))
    joined = _take_joined_apart(folder, settings, lora, layers, found)
    lora, fused = _take_apart(folder, settings, lora, layers, found, config)
    model = model_on_meta(replace(config, tie_embeddings=False))
    add_lora(model, lora)
    adapters: dict[str, Tensor] = {}
    for layer in layers:
        of_kind = joined if layer.is_joined else fused if _is_fused(layer) else _Fused(lora.r)
        adapters |= _imported(layer, layer.adapters(model), found, folder, of_kind)
    used = {module for layer in layers for module in layer.modules}
    if unknown := sorted(module for module in found if module not in used):
        raise UserError(f"--from_peft {folder}: adapts {unknown[0]}, which this program cannot adapt in such a model")
    return lora, adapters


def check_base(folder: str | Path, base: Path) -> str | None:
    """Compare the base that peft's adapters name with the one that they are to be put on.

    Returns:
        What the user should know, in a line, where the named base is not here or cannot be read.

    Raises:
        UserError: the named base is here, and another checkpoint.
    """
    named = _read_settings(Path(folder)).get("base_model_name_or_path")
    if not isinstance(named, str) or not named:
        return f"--from_peft {folder}: does not say what it was trained on; whether that is {base} is unchecked"
    try:
        same = _is_same_model(named, base)
    except UserError:
        same = None
    if same is False:
        raise UserError(
            f"--from_peft {folder}: was trained on {named}, which is another checkpoint than {base}; "
            f"give that one as checkpoint_dir, or correct base_model_name_or_path in {SETTINGS}"
        )
    return None if same else f"--from_peft {folder}: was trained on {named}; whether that is {base} is unchecked"


def _is_same_model(named: str, base: Path) -> bool | None:
    """Whether a name is that of a model; None where there is no such folder, here or below checkpoints/."""
    place = next((p for p in (Path(named).expanduser(), Path("checkpoints") / named) if p.is_dir()), None)
    if place is None:
        return None
    if (place / WEIGHTS).exists():
        return base_fingerprint(place) == base_fingerprint(base)
    return is_import_of(base, place)


def _read_settings(folder: Path) -> dict[str, Any]:
    path = folder / SETTINGS
    try:
        settings = read_json(path)
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
        module, _, kind = name.removeprefix(PREFIX).removesuffix(".weight").rpartition(".")
        if kind in ("base_layer", "embed_tokens", "embed_in", "wte", "lm_head") and tensor.shape == vocabulary:
            continue  # of the base: peft adds them where the head is adapted, in case they were resized
        if kind not in ("lora_A", "lora_B", "lora_magnitude_vector"):
            raise UserError(f"{path}: holds {name}, which is no adapter of a linear layer")
        found.setdefault(module.replace(TEXT_MODEL, "", 1), {})[kind] = tensor.float()
    return found


def _selected(layers: list[Layer], found: dict[str, Any], config: ModelConfig) -> set[str]:
    """The parts of LoRAConfig that have adapters in the file."""
    selected: set[str] = set()
    for layer in layers:
        for i, module in enumerate(layer.modules):
            if module in found:
                selected |= {part for part, rows in _parts(layer, config).items() if layer.covers(rows)[i]}
    return selected


def _parts(layer: Layer, config: ModelConfig) -> dict[str, range]:
    """The parts of LoRAConfig that a layer belongs to, and their rows."""
    name = layer.names[0].rpartition(".")[2]
    if ".attn." in layer.names[0] and name != "proj":
        return attention_rows(config).get(name, {})
    kind = "head" if name == "lm_head" else "mlp" if ".mlp." in layer.names[0] else "projection"
    return {kind: range(layer.out_features)}


def _options(folder: Path, settings: dict[str, Any], selected: set[str]) -> LoRAConfig:
    if not selected:
        raise UserError(f"--from_peft {folder}: adapts none of this model's layers; give adapters of this architecture")
    try:
        if type(settings.get("r", 8)) is not int:
            raise TypeError(f"r {settings['r']!r:.100}: must be a whole number")
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


def _is_fused(layer: Layer) -> bool:
    """Whether queries, keys and values, or two of them, are one layer on either side."""
    return layer.names[0].endswith((".attn.qkv", ".attn.kv_b")) and len(layer.modules) == 1


def _take_apart(
    folder: Path,
    settings: dict[str, Any],
    lora: LoRAConfig,
    layers: list[Layer],
    found: dict[str, dict[str, Tensor]],
    config: ModelConfig,
) -> tuple[LoRAConfig, _Fused]:
    """Find what the adapters of layers fused on both sides are put together from.

    Args:
        lora: What the settings say of all other layers.

    Returns:
        The options with which each part has an adapter of its own, and where in the fused ones these are.

    Raises:
        UserError: rank_pattern or alpha_pattern is another one than :func:`~.peft.export_peft` writes.
    """
    fused = list(filter(_is_fused, layers))
    rank = _pattern_rank(settings, lora, layers, fused)
    parts: tuple[str, ...] = ()
    if fused and rank is not None:
        columns = _used_columns(fused, _parts(fused[0], config), found, rank)
        used = tuple(part for part in columns if columns[part].any())
        parts = used if _are_in_blocks(columns, _Fused(rank, used)) else ()
    n = max(1, len(parts))
    if rank not in (lora.r, n * lora.r):
        raise _refused_pattern(folder, settings)
    if not parts or (rank != n * lora.r and (lora.projection or lora.mlp or lora.head)):
        return lora, _Fused(rank)
    if rank == lora.r:
        alpha = float(f"{lora.alpha / (math.sqrt(n) if lora.rslora else n):.12g}")  # without the digits of rounding
        lora = replace(lora, r=rank // n, alpha=alpha)
    all_parts = {part for layer in fused for part in _parts(layer, config)}
    return replace(lora, **{part: part in parts for part in all_parts}), _Fused(rank, parts)


def _take_joined_apart(
    folder: Path, settings: dict[str, Any], lora: LoRAConfig, layers: list[Layer], found: dict[str, dict[str, Tensor]]
) -> _Fused:
    """As :func:`_take_apart` for layers that are several here. All of these are adapted, beside others of an MLP."""
    joined = [layer for layer in layers if layer.is_joined]
    rank = _pattern_rank(settings, lora, layers, joined)
    if rank == lora.r:
        return _Fused(rank)
    if rank is None or rank != lora.r * len(joined[0].names):
        raise _refused_pattern(folder, settings)
    columns = _used_columns(joined, joined[0].rows, found, rank)
    fused = _Fused(rank, tuple(columns))
    if not _are_in_blocks(columns, fused):
        raise _refused_pattern(folder, settings)
    return fused


def _refused_pattern(folder: Path, settings: dict[str, Any]) -> UserError:
    name = "rank_pattern" if settings.get("rank_pattern") else "alpha_pattern"
    return UserError(
        f"{folder / SETTINGS}: {name} {settings[name]!r:.100}: not supported; only what toolkit convert_to_peft "
        "writes is, for what is one layer there and has several parts here"
    )


def _pattern_rank(settings: dict[str, Any], lora: LoRAConfig, layers: list[Layer], some: list[Layer]) -> int | None:
    """The rank of some layers; None where a pattern is for others than fused ones, or changes the scaling."""
    ranks, alphas = (settings.get(name) or {} for name in ("rank_pattern", "alpha_pattern"))
    found = set()
    try:
        if ranks.keys() != alphas.keys():
            return None
        for key, rank in ranks.items():
            named = [layer for layer in layers if any(f".{module}".endswith(f".{key}") for module in layer.modules)]
            same = math.isclose(replace(lora, r=rank, alpha=alphas[key]).scaling, lora.scaling) and type(rank) is int
            if not same or not named or not all(layer.is_joined or _is_fused(layer) for layer in named):
                return None
            found |= {rank for layer in named if layer in some}
    except (AttributeError, TypeError, ValueError, UserError):
        return None
    found = found or {lora.r}
    return found.pop() if len(found) == 1 else None


def _used_columns(
    layers: list[Layer], parts: dict[str, range], found: dict[str, dict[str, Tensor]], rank: int
) -> dict[str, Tensor]:
    """{part: which columns of lora_B have anything in its rows, (rank,)}, over these layers."""
    used = torch.zeros(layers[0].out_features, rank, dtype=torch.bool)
    for layer in layers:
        b = found.get(layer.modules[0], {}).get("lora_B")
        if b is not None and b.shape == used.shape:  # others are named later on
            used |= layer.to_ours([b]) != 0
    return {part: used[rows.start : rows.stop].any(0) for part, rows in parts.items()}


def _are_in_blocks(columns: dict[str, Tensor], fused: _Fused) -> bool:
    """Whether each part uses columns of its own, of equal number and in order."""
    if fused.rank % max(1, len(fused.parts)):
        return False
    outside = {part: columns[part].clone() for part in fused.parts}
    for part in outside:
        outside[part][fused.columns(part)] = False
    return not any(column.any() for column in outside.values())


def _imported(
    layer: Layer, placed: list[Placed], found: dict[str, dict[str, Tensor]], folder: Path, fused: _Fused
) -> dict[str, Tensor]:
    """The adapters of one layer, by their names here."""
    outs = [theirs.size(0) for theirs in layer.to_theirs(torch.empty(layer.out_features, 1))]
    adapters: dict[str, Tensor] = {}
    for name, part, at, adapter in placed:
        i = layer.covers(at).index(True)
        given = found.get(layer.modules[i], {})
        _require_adapter(given, layer.modules[i], outs[i], adapter, fused.rank, folder)
        rows, columns = slice(at.start, at.stop), fused.columns(part)
        adapters[f"{name}.A"] = given["lora_A"][columns].clone()
        adapters[f"{name}.B"] = _to_ours(layer, i, given["lora_B"], outs)[rows, columns].clone()
        if hasattr(adapter, "magnitude"):
            magnitude = _to_ours(layer, i, given["lora_magnitude_vector"][:, None], outs)
            adapters[f"{name}.magnitude"] = magnitude[rows, 0].clone()
    return adapters


def _to_ours(layer: Layer, i: int, tensor: Tensor, outs: list[int]) -> Tensor:
    """(out, k), from what belongs to the i-th of their layers."""
    return layer.to_ours([tensor if k == i else tensor.new_zeros(out, tensor.size(1)) for k, out in enumerate(outs)])


def _require_adapter(given: dict[str, Tensor], module: str, out: int, adapter: Adapter, r: int, folder: Path) -> None:
    in_features = adapter.A.size(1)
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
