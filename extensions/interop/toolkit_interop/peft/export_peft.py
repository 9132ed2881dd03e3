"""Export adapters to peft's format. :mod:`.layers` maps native layers to Hugging Face layers."""

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from toolkit.checkpoints.adapters import load_adapters, read_adapter, read_adapter_info
from toolkit.checkpoints.finite import warn_nonfinite
from toolkit.checkpoints.folder import load_compatible_weights, read_model_config
from toolkit.checkpoints.hf.card import write_model_card
from toolkit.checkpoints.hf.export_hf import write_config
from toolkit.checkpoints.hf.files import write_safetensors
from toolkit.checkpoints.hf.origin import hf_origin
from toolkit.checkpoints.hf.sums import write_sums
from toolkit.checkpoints.merge import copy_files
from toolkit.checkpoints.store import WEIGHTS, require_new_folder, write_folder
from toolkit.checkpoints.weights import Tensors
from toolkit.data.tokenizer import FILE_PATTERNS, Tokenizer
from toolkit.errors import UserError, notice
from toolkit.io.safe_parse import read_json_object
from toolkit.models.families import MULTIMODAL
from toolkit.models.families.hf_heads import task_of
from toolkit.models.gpt import model_on_meta
from toolkit.models.lora import SCORE, TRAINED_SCORE, adapted_on_meta, initial_magnitude
from toolkit.models.lora_config import LoRAConfig
from toolkit_interop.peft.experts import ExpertParameter, expert_parameters
from toolkit_interop.peft.layers import (
    PREFIX,
    RENAMED,
    SETTINGS,
    TENSORS,
    TEXT_MODEL,
    Layer,
    PlacedAdapter,
    linear_layers,
    scatter_rows,
)

_HEAD = "lm_head"


class ExportResult(NamedTuple):
    base: str
    """``base_model_name_or_path`` of the new folder."""
    has_known_base: bool
    """Whether ``base`` is a hub name or Hugging Face folder, which transformers can load."""
    is_checked: bool
    """Whether the base model exists and its fingerprint was verified."""
    wrapper_type: str | None
    """Model type of the multimodal model that contains the base model, which determines the tensor names."""
    has_tied_head: bool
    """Whether it has adapters of a head that is tied to the embedding."""


def export_peft(
    checkpoint_dir: Path, out_dir: Path, base_checkpoint_dir: str | Path | None = None, base_model: str | None = None
) -> ExportResult:
    """Write a folder that ``peft.PeftModel.from_pretrained`` loads, atomically.

    Args:
        checkpoint_dir: A folder with adapters.
        out_dir: The new folder; an existing one must be empty.
        base_checkpoint_dir: Folder of the base; by default the path recorded in training. Its weights are read only
            for DoRA on a part of a layer that is also fused in the Hugging Face model.
        base_model: Hub name or Hugging Face folder of the base, for base_model_name_or_path; by default the origin
            recorded in the base's folder.
    """
    require_new_folder(out_dir)
    if base_model is not None and base_model.startswith(("./", "../", "/")) and not Path(base_model).is_dir():
        raise UserError(f"--base_model {base_model}: no such folder; give a Hugging Face folder or a name on the hub")
    info, config = read_adapter_info(checkpoint_dir), replace(read_model_config(checkpoint_dir), tie_embeddings=False)
    if is_checked := base_checkpoint_dir is not None or (info.base / WEIGHTS).exists():
        info = read_adapter(checkpoint_dir, base_checkpoint_dir)
    if config.qat is not None:
        notice(
            f"note: the adapters were trained to compute with {config.qat['weights']} weights; peft does not quantize"
        )
    model = adapted_on_meta(config, info.lora)
    adapters = load_adapters(checkpoint_dir, model)
    model.load_state_dict(adapters, strict=False, assign=True)
    base_weights: Tensors = {}

    def weight_of(name: str) -> Tensor:
        if not base_weights:
            base = read_adapter(checkpoint_dir, base_checkpoint_dir).base
            base_weights.update(load_compatible_weights(base, model_on_meta(read_model_config(base))))
        return base_weights[name]

    tensors: Tensors = {}
    layers, parameters = linear_layers(config), expert_parameters(config)
    for layer in layers:
        tensors |= dict(_convert_layer(layer, layer.adapters(model), weight_of))
    if info.lora.dora and info.lora.mlp and parameters:
        hint = "peft loads no DoRA of the MLPs of a model with experts; use `toolkit merge_lora` instead"
        raise UserError(f"checkpoint_dir {checkpoint_dir}: {hint}")
    targets = _targets(info.lora, tensors, layers, parameters)
    for parameter in parameters:
        tensors |= {PREFIX + name: tensor for name, tensor in parameter.export(model).items()}
    hf_base = (base_model, None) if base_model else hf_origin(info.base)
    base_name, revision = hf_base or (str(info.base), None)
    settings = _settings(info.lora, *targets, base_name) | {"revision": revision}
    settings["fan_in_fan_out"] = any(layer.is_transposed for layer in layers)
    if config.head is not None:
        tensors[f"{PREFIX}{SCORE}"] = score = adapters[TRAINED_SCORE]
        if config.head == "token_reward":  # peft asks for the bias that transformers' layer has by default
            tensors[f"{PREFIX}score.bias"] = torch.zeros(score.size(0))
        settings |= {"task_type": task_of(config).peft_type, "modules_to_save": ["score"]}
    model_type = read_json_object(info.base / "config.json", optional=True).get("model_type")
    wrapper_type = model_type if isinstance(model_type, str) and model_type in MULTIMODAL else None
    if wrapper_type is not None:
        text = f"{PREFIX}model."
        tensors = {name.replace(text, text + TEXT_MODEL, 1): tensor for name, tensor in tensors.items()}
        settings["target_modules"] = _text_model_pattern(settings["target_modules"])

    def write(folder: Path) -> None:
        warn_nonfinite(write_safetensors(folder / TENSORS, tensors, iter(tensors.items())), out_dir)
        write_config(folder / SETTINGS, settings)
        if (checkpoint_dir / "tokenizer.json").is_file():
            Tokenizer.load(checkpoint_dir, flag="checkpoint_dir").save(folder, for_transformers=True)
        else:
            copy_files(checkpoint_dir, folder, FILE_PATTERNS)
        card = folder / "README.md"
        write_model_card(card, read_model_config(checkpoint_dir), checkpoint_dir, has_tokenizer=False, is_adapter=True)
        write_sums(folder)

    write_folder(out_dir, write)
    is_tied = info.lora.head and read_model_config(checkpoint_dir).tie_embeddings
    return ExportResult(base_name, hf_base is not None, is_checked, wrapper_type, is_tied)


def _convert_layer(
    layer: Layer, placed: list[PlacedAdapter], weight_of: Callable[[str], Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Yield (peft name, tensor) for the adapters of one layer, if any."""
    adapters = [one.adapter for one in placed]
    covers = [layer.covers(one.rows) for one in placed]
    factors = [layer.to_hf(scatter_rows(one.adapter.B.detach(), one.rows, layer)) for one in placed]
    dora = any(hasattr(adapter, "magnitude") for adapter in adapters)
    magnitudes = _magnitudes(layer, placed, weight_of) if dora else None
    for i, module in enumerate(layer.modules):
        used = [k for k in range(len(adapters)) if covers[k][i]]
        for name in filter(None, (module, RENAMED.get(module))) if used else ():
            yield f"{PREFIX}{name}.lora_A.weight", torch.cat([adapters[k].A.detach() for k in used])
            yield f"{PREFIX}{name}.lora_B.weight", torch.cat([factors[k][i] for k in used], dim=1).contiguous()
            if magnitudes is not None:
                yield f"{PREFIX}{name}.lora_magnitude_vector", magnitudes[i].flatten().contiguous()


def _magnitudes(layer: Layer, placed: list[PlacedAdapter], weight_of: Callable[[str], Tensor]) -> list[Tensor]:
    """Return DoRA magnitudes per Hugging Face layer, (out, 1). Rows without adapters get the base weight's norms."""
    full, adapted = torch.zeros(layer.out_features), torch.zeros(layer.out_features, 1)
    for one in placed:
        adapted[one.rows.start : one.rows.stop] = 1
    if any(part.any() and not part.all() for part in layer.to_hf(adapted)):
        full = torch.cat([initial_magnitude(weight_of(f"{name}.weight")) for name in layer.names])
    for one in placed:
        full[one.rows.start : one.rows.stop] = one.adapter.magnitude.detach()
    return layer.to_hf(full[:, None])


def _targets(
    lora: LoRAConfig, tensors: Tensors, layers: list[Layer], parameters: list[ExpertParameter]
) -> tuple[dict[str, int], dict[str, int]]:
    """Return the ranks of target_modules and target_parameters. ``tensors`` are the adapters of ``layers``.

    In transformers 5, routers are not linear layers. In models with experts, peft takes gate_proj in target_modules for
    an expert's layer of transformers 4, also of a shared expert: all layers of their MLPs are target_parameters.
    """
    ending = ".lora_A.weight"
    ranks = {n[len(PREFIX) : -len(ending)]: t.size(0) for n, t in tensors.items() if n.endswith(ending)}
    modules = [module for layer in layers for module in layer.modules]
    in_mlps = {module for layer in layers if parameters and ".mlp." in layer.names[0] for module in layer.modules}
    by_module = _shortest_targets({m: r for m, r in ranks.items() if m not in in_mlps}, modules)
    of_parameters = {f"{m}.weight": r for m, r in ranks.items() if m in in_mlps}
    if lora.experts:
        of_parameters |= {parameter.name: len(parameter.names) * lora.r for parameter in parameters}
    return by_module, _shortest_targets(of_parameters, [f"{m}.weight" for m in modules], min_depth=2)


def _settings(
    lora: LoRAConfig, target_modules: dict[str, int], target_parameters: dict[str, int], base: str
) -> dict[str, Any]:
    """Return the content of adapter_config.json."""
    by_target = target_modules | target_parameters
    parameters = {"target_parameters": sorted(target_parameters)} if target_parameters else {}
    rank = lora.r if lora.r in by_target.values() else min(by_target.values())
    other = {target: r for target, r in by_target.items() if r != rank}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "target_modules": sorted(target_modules),
        **parameters,
        "r": rank,
        "lora_alpha": _alpha(lora, rank),
        "rank_pattern": other,
        "alpha_pattern": {target: _alpha(lora, r) for target, r in other.items()},
        "lora_dropout": 0.0 if parameters else lora.dropout,  # peft has none of parameters
        "use_rslora": lora.rslora,
        "use_dora": lora.dora,
        "bias": "none",
        "modules_to_save": None,
        "init_lora_weights": True,
        "inference_mode": True,
    }


def _alpha(lora: LoRAConfig, rank: int) -> int | float:
    """Return the alpha that gives adapters of this rank the same scaling as ``lora``."""
    alpha = lora.alpha * (math.sqrt(rank / lora.r) if lora.rslora else rank / lora.r)
    return int(alpha) if alpha == int(alpha) else alpha


def _shortest_targets(ranks: dict[str, int], modules: list[str], min_depth: int = 1) -> dict[str, int]:
    """Return {target: rank}. A target is the shortest name suffix that matches only adapted layers of that rank."""
    targets = {}
    for module, rank in ranks.items():
        parts = module.split(".")
        for depth in range(min_depth, len(parts) + 1):
            target = ".".join(parts[-depth:])
            named = [m for m in modules if m == target or m.endswith(f".{target}")]
            if all(ranks.get(m) == rank for m in named):
                break
        targets[target] = rank
    return targets


def _text_model_pattern(targets: list[str]) -> str:
    """Return a regular expression for peft that matches layers of the text model only."""
    inner = "|".join(re.escape(target) for target in targets if target != _HEAD)
    patterns = [rf".*\.{re.escape(TEXT_MODEL)}(.*\.)?({inner})"] if inner else []
    return "|".join(patterns + [_HEAD] * (_HEAD in targets))
