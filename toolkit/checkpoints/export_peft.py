"""Adapters out to peft's format, through the families' tables of weight names; see :mod:`.peft_layers`."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from toolkit.checkpoints.adapters import load_adapters, read_adapter, read_adapter_info
from toolkit.checkpoints.export_hf import write_safetensors
from toolkit.checkpoints.finite import nonfinite_tensors
from toolkit.checkpoints.folder import load_compatible_weights, model_on_meta, read_model_config
from toolkit.checkpoints.hf_reader import read_json
from toolkit.checkpoints.import_hf import read_origin
from toolkit.checkpoints.merge import copy_files
from toolkit.checkpoints.peft_layers import (
    PREFIX,
    RENAMED,
    SETTINGS,
    TENSORS,
    TEXT_MODEL,
    Layer,
    Placed,
    in_rows,
    linear_layers,
)
from toolkit.checkpoints.store import WEIGHTS, require_new_folder, write_folder
from toolkit.data.tokenizer import FILE_PATTERNS
from toolkit.models.families import WITH_IMAGES
from toolkit.models.lora import add_lora, magnitude_of
from toolkit.models.lora_config import LoRAConfig

_HEAD = "lm_head"


class Exported(NamedTuple):
    base: str
    """What the new folder names as its base."""
    is_known: bool
    """Whether that is a model which transformers loads: given by the user, or recorded when the base was imported."""
    is_checked: bool
    """Whether the base is there, and the one that the adapters were trained on."""
    around: str | None
    """The type of the model that sees images, too, whose text model the base is; the names are that one's."""
    nonfinite: list[str]
    """The names of the tensors in the new folder that contain NaN or Inf."""


def export_peft(
    checkpoint_dir: Path,
    out_dir: Path,
    base_checkpoint_dir: str | Path | None = None,
    base_model: str | None = None,
) -> Exported:
    """Write a folder that ``peft.PeftModel.from_pretrained`` loads, whole or not at all.

    Args:
        checkpoint_dir: A folder with adapters.
        out_dir: The new folder; one that is there must be empty.
        base_checkpoint_dir: Where the base is; what it was in training when not given. Its weights are read only for
            DoRA on a part of a layer that is fused in the Hugging Face model, too.
        base_model: The hub name or the Hugging Face folder of the base, for base_model_name_or_path; what is recorded
            beside the base when not given.

    Raises:
        UserError: the adapters cannot be read, the base is another checkpoint or base_checkpoint_dir none, out_dir is
            in use, or the disk is full.
    """
    require_new_folder(out_dir)
    info, config = read_adapter_info(checkpoint_dir), replace(read_model_config(checkpoint_dir), tie_embeddings=False)
    if is_checked := base_checkpoint_dir is not None or (info.base / WEIGHTS).exists():
        info = read_adapter(checkpoint_dir, base_checkpoint_dir)
    model = model_on_meta(config)
    add_lora(model, info.lora)
    model.load_state_dict(load_adapters(checkpoint_dir, model), strict=False, assign=True)
    base_weights: dict[str, Tensor] = {}

    def weight_of(name: str) -> Tensor:
        if not base_weights:
            base = read_adapter(checkpoint_dir, base_checkpoint_dir).base
            base_weights.update(load_compatible_weights(base, model_on_meta(read_model_config(base))))
        return base_weights[name]

    tensors: dict[str, Tensor] = {}
    for layer in linear_layers(config):
        tensors |= dict(_exported(layer, layer.adapters(model), weight_of))
    known = (base_model, None) if base_model else _hf_base(info.base)
    base_name, revision = known or (str(info.base), None)
    settings = _settings(info.lora, tensors, linear_layers(config), base_name) | {"revision": revision}
    if (around := _model_around(info.base)) is not None:
        tensors = {name.replace(".layers.", f".{TEXT_MODEL}layers.", 1): tensor for name, tensor in tensors.items()}
        settings["target_modules"] = _within_text_model(settings["target_modules"])

    def write(folder: Path) -> None:
        write_safetensors(folder / TENSORS, tensors, iter(tensors.items()))
        (folder / SETTINGS).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
        copy_files(checkpoint_dir, folder, FILE_PATTERNS)

    write_folder(out_dir, write, flag="out_dir")
    return Exported(base_name, known is not None, is_checked, around, nonfinite_tensors(tensors))


def _exported(layer: Layer, placed: list[Placed], weight_of: Callable[[str], Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield (name in peft, tensor) for the adapters of one layer, if it has any."""
    adapters = [one.adapter for one in placed]
    covers = [layer.covers(one.rows) for one in placed]
    factors = [layer.to_theirs(in_rows(one.adapter.B.detach(), one.rows, layer)) for one in placed]
    dora = any(hasattr(adapter, "magnitude") for adapter in adapters)
    magnitudes = _magnitudes(layer, placed, weight_of) if dora else None
    for i, module in enumerate(layer.modules):
        used = [k for k in range(len(adapters)) if covers[k][i]]
        for name in filter(None, (module, RENAMED.get(module))) if used else ():
            yield f"{PREFIX}{name}.lora_A.weight", torch.cat([adapters[k].A.detach() for k in used])
            yield f"{PREFIX}{name}.lora_B.weight", torch.cat([factors[k][i] for k in used], dim=1).contiguous()
            if magnitudes is not None:
                yield f"{PREFIX}{name}.lora_magnitude_vector", magnitudes[i].flatten().contiguous()


def _magnitudes(layer: Layer, placed: list[Placed], weight_of: Callable[[str], Tensor]) -> list[Tensor]:
    """DoRA's magnitudes of each of their layers, (their out, 1); rows that are not adapted keep the norms they have."""
    full, adapted = torch.zeros(layer.out_features), torch.zeros(layer.out_features, 1)
    for one in placed:
        adapted[one.rows.start : one.rows.stop] = 1
    if any(theirs.any() and not theirs.all() for theirs in layer.to_theirs(adapted)):
        full = torch.cat([magnitude_of(weight_of(f"{name}.weight")) for name in layer.names])
    for one in placed:
        full[one.rows.start : one.rows.stop] = one.adapter.magnitude.detach()
    return layer.to_theirs(full[:, None])


def _settings(lora: LoRAConfig, tensors: dict[str, Tensor], layers: list[Layer], base: str) -> dict[str, Any]:
    """The content of adapter_config.json."""
    ending = ".lora_A.weight"
    ranks = {n[len(PREFIX) : -len(ending)]: t.size(0) for n, t in tensors.items() if n.endswith(ending)}
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


def _within_text_model(targets: list[str]) -> str:
    """A pattern for peft instead of names, which other parts of such a model have as well."""
    inner = "|".join(re.escape(target) for target in targets if target != _HEAD)
    patterns = [rf".*\.{re.escape(TEXT_MODEL)}.*\.({inner})"] if inner else []
    return "|".join(patterns + [_HEAD] * (_HEAD in targets))


def _model_around(base: Path) -> str | None:
    """The type of the model that the base's config.json is of, where that is more than the text model."""
    file = base / "config.json"
    kind = read_json(file).get("model_type") if file.is_file() else None
    return kind if isinstance(kind, str) and kind in WITH_IMAGES else None


def _hf_base(base: Path) -> tuple[str, str | None] | None:
    """What the base was imported from, with the revision of a hub name that is not the main one, else its name at
    Hugging Face where its folder is checkpoints/ORGANISATION/NAME.

    The ``_name_or_path`` of a config.json is not it: there transformers notes what the model was made from.
    """
    parts = base.resolve().parts
    return read_origin(base) or (("/".join(parts[-2:]), None) if "checkpoints" in parts[-3:-2] else None)
