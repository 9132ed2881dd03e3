"""Exports that a family's class in transformers cannot express are rejected; all others load there with equal logits.

Every field of ModelConfig, including future ones, is varied one at a time with the fields it requires: in five families
that differ in structure, and in the slow tests in every family and shape.
"""

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import torch
from helpers.cases import slow_except
from helpers.tiny_configs import HF_CONFIGS, NATIVE_CONFIGS
from helpers.tiny_models import randomize, relative_error, to_folder

from toolkit.checkpoints.hf.export_hf import to_hf_names
from toolkit.errors import UserError, option_text
from toolkit.models.config import ModelConfig
from toolkit.models.config_checks import HEAD_FIELDS
from toolkit.models.families import FAMILIES, config_from_hf, family_of, llama, tables
from toolkit.models.gpt import GPT, model_on_meta

transformers = pytest.importorskip("transformers")

HINTS = get_type_hints(ModelConfig)
# Other fields that a field requires, for any non-default value or for one value.
COMPANIONS: dict[str, dict[str, Any]] = {
    "shared_attention_norm": {"parallel_residual": True},
    "norm_qk_type": {"norm_qk": True},
}  # fmt: skip
EXPERTS = {"mlp_class_name": "LLaMAMoE", "n_expert": 4, "n_expert_per_token": 2}
LATENT = {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 12}
LINEAR = {"n_key_heads": 2, "n_value_heads": 2, "key_size": 8, "value_size": 16, "conv_size": 3}
NO_WINDOW: dict[str, Any] = {"sliding_window_size": None, "sliding_window_indices": None}
YARN = {"factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "original_max_seq_len": 16}


def changes(config: ModelConfig) -> dict[str, list[dict[str, Any]]]:
    """Return changes by field: the field and the fields it requires."""
    first, last = ([int(i == layer) for i in range(config.n_layer)] for layer in (0, config.n_layer - 1))
    longrope = {
        "short_factor": [1.0 + i / 20 for i in range(config.rope_n_elem // 2)],
        "long_factor": [1.0 + i for i in range(config.rope_n_elem // 2)],
    }  # fmt: skip
    found = {
        "name": ["a name"],
        "family": list(FAMILIES),
        "family_options": [{"family_options": {"width": 2}}],
        "block_size": [4096],
        "vocab_size": [70],
        "padded_vocab_size": [104],
        "padding_multiple": [8],
        "n_layer": [1],
        "n_head": [
            {"n_head": 2, "n_query_groups": None, "head_size": None}, {"n_head": 3, "n_query_groups": 3},
        ],
        "n_query_groups": [1, 4],
        "n_embd": [{"n_embd": 128, "head_size": None}],
        "head_size": [40],
        "intermediate_size": [72],
        "rotary_percentage": [0, 0.25, 0.5, 1],
        "rope_base": [300],
        "rope_adjustments": [
            None,
            {"rope_adjustments": {"factor": 4}},
            {"rope_adjustments": {
                "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_seq_len": 32,
            }},
            {"rope_adjustments": YARN},
            {"rope_adjustments": YARN | {"truncate": False, "attention_factor": 1.5}},
            {"rope_adjustments": YARN | {"mscale": 0.7, "mscale_all_dim": 1.2}},
            *({"rope_adjustments": {**longrope, "original_max_seq_len": n, "attention_factor": a}}
              for n, a in ((16, 1.3), (60, 1.0))),
        ],
        "rope_local_base_freq": [None, 77],
        "query_scaling_beta": [
            None, 0, 0.5, {"query_scaling_beta": 0.5, "rope_adjustments": YARN},
        ],
        "rope_indices": [
            None, [-i for i in first], [-1] * config.n_layer,
            *({"rope_indices": i, "rope_local_base_freq": 77.0} for i in (first, last, [1] * config.n_layer)),
        ],
        "sliding_window_size": [None, 20, NO_WINDOW, NO_WINDOW | {"rope_indices": None}],
        "sliding_window_indices": [
            part | {"sliding_window_size": 20, "sliding_window_indices": i}
            for i in (None, first, last, [0] * config.n_layer, [1] * config.n_layer)
            for part in ({}, {"rope_indices": i or [1] * config.n_layer, "rope_local_base_freq": 77.0})
        ],
        "attention_scores_scalar": [None, 24, 24.5],
        "attention_multiplier": [None, 1],
        "attention_logit_softcapping": [None, 2],
        "final_logit_softcapping": [None, 2],
        "latent_attention": [
            {"latent_attention": None, "head_size": 16},
            *({"latent_attention": LATENT | {"q_lora_rank": n}, "n_query_groups": 4} for n in (None, 24)),
        ],
        "linear_attention": [
            {"linear_attention": None, "linear_attention_indices": None}, {"linear_attention": LINEAR},
        ],
        "linear_attention_indices": [
            None, *({"linear_attention": LINEAR, "linear_attention_indices": i} for i in (first, [0] * config.n_layer)),
        ],
        "clip_qkv": [None, 1],
        "embedding_multiplier": [1, 3],
        "residual_multiplier": [1, 2],
        "logits_scaling": [1, 3],
        "norm_eps": [1e-2],
        "n_expert": [6],
        "n_expert_per_token": [1],
        "moe_intermediate_size": [None, 40],
        "routed_scaling_factor": [1, 2],
        "n_expert_groups": [None, {"n_expert_groups": 2, "n_topk_groups": 1}],
        "n_topk_groups": [{"n_expert_groups": 2, "n_topk_groups": 2}],
        "shared_expert_intermediate_size": [None, 24, 40, 64, config.expert_size],
        "swiglu_limit": [None, 1],
        "moe_indices": [None, first, last, [0] * config.n_layer],
        "router_aux_loss_coef": [0],
    }  # fmt: skip
    for name, hint in HINTS.items():
        if hint is bool or get_origin(hint) is Literal:
            found[name] = [False, True] if hint is bool else list(get_args(hint))
    found["mlp_class_name"].append(EXPERTS)
    found["norm_qk_type"].append({"norm_qk": True, "norm_qk_type": "per_head", "norm_class_name": "LayerNorm"})
    by_field = {name: [v if isinstance(v, dict) else {name: v} for v in values] for name, values in found.items()}
    return {name: [COMPANIONS.get(name, {}) | change for change in values] for name, values in by_field.items()}


def variants(config: ModelConfig) -> Iterator[tuple[dict[str, Any], ModelConfig]]:
    """Yield the config and all valid variants, each with its changes."""
    seen = set()
    for change in [{}, *(change for values in changes(config).values() for change in values)]:
        try:
            changed = replace(config, **change)
        except UserError:
            continue
        if (fields := repr(changed)) not in seen:
            seen.add(fields)
            yield change, changed


def test_every_field_is_varied():
    """A new field of another type needs an entry in ``changes``. Heads: extensions/align."""
    assert changes(ModelConfig()).keys() == {f.name for f in fields(ModelConfig)} - {*HEAD_FIELDS, "qat"}


def shapes() -> dict[str, ModelConfig]:
    native = {"block_size": 64, "n_layer": 2, "n_head": 4, "n_embd": 64}
    found = {name: config_from_hf(make().to_dict()) for name, make in HF_CONFIGS.items()}
    return found | {f"{name}-native": ModelConfig(**native | fields) for name, fields in NATIVE_CONFIGS.items()}


SHAPES = shapes()
# Dense, sliding windows and post-norms, parallel residual and LayerNorm, experts and sinks, latent attention; the last
# shape of each, which is small.
STRUCTURES = ("llama", "gemma3_text", "gpt_neox", "gpt_oss", "deepseek_v3")
BY_FAMILY = {config.family: name for name, config in SHAPES.items()}
FAST = [BY_FAMILY[family] for family in STRUCTURES]


def exported(config: ModelConfig) -> tuple[dict[str, Any], list] | None:
    """Return ``config.json`` and weight map; None if both are rejected in one line that names a field."""
    found = []
    for export in (family_of(config).to_hf_config, family_of(config).weight_map):
        try:
            found.append(export(config))
        except UserError as error:
            message = re.match(r"--model_config\.(\w+) (.*)", str(error))
            assert message and message[2].startswith(f"{option_text(getattr(config, message[1]))}: "), error
            assert "\n" not in str(error)
    assert len(found) != 1
    return (found[0], found[1]) if found else None


IDS = torch.randint(0, 70, (2, 48), generator=torch.Generator().manual_seed(1))


def logits_of_transformers(values: dict[str, Any], weights: dict[str, torch.Tensor]) -> torch.Tensor:
    """Compute logits with the class named in ``config.json``, which must load all weights."""
    config = transformers.CONFIG_MAPPING[values["model_type"]].from_dict(json.loads(json.dumps(values)))
    model, info = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].from_pretrained(
        None, config=config, state_dict=weights, output_loading_info=True
    )
    assert not any(info[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    return model.eval()(IDS, use_cache=False).logits  # its cache needs a layer with attention


@torch.no_grad()
def require_equal(config: ModelConfig, values: dict[str, Any], table: list, known: dict[str, torch.Tensor]) -> None:
    """Check that transformers loads the export with equal logits, and that toolkit reads its own export.

    ``known`` holds what transformers computed before, for changes that make no difference to the export.
    """
    native = model_on_meta(config).to_empty(device="cpu").eval()
    native.tie_weights()
    randomize(native, seed=2)
    weights = dict(to_hf_names(table, native.state_dict()))
    limit = 1e-5 if config.linear_attention is None else 5e-5  # transformers' form rounds with the sums in a chunk
    key = json.dumps([values, {name: tensor.sum().item() for name, tensor in weights.items()}])
    if key not in known:
        known[key] = logits_of_transformers(values, weights)
        again = model_on_meta(config_from_hf(values)).eval()
        again.load_state_dict(native.state_dict(), assign=True)
        assert (error := relative_error(again(IDS), known[key])) < limit, f"read again, differs by {error}"
    assert (error := relative_error(native(IDS), known[key])) < limit, f"differs by {error}"


def require_refused_or_equal(name: str) -> None:
    wrong, known = {}, {}
    for change, config in variants(SHAPES[name]):
        try:
            if (export := exported(config)) is not None:
                require_equal(config, *export, known)
            elif not change:
                raise AssertionError("the shape itself is refused")
        except Exception as error:
            wrong[str(change)] = f"{type(error).__name__}: {str(error)[:300]}"
    assert not wrong, "\n".join(f"{change}: {error}" for change, error in wrong.items())


@pytest.mark.parametrize("name", slow_except(["llama-biases-native"], FAST))
def test_export_is_rejected_or_has_equal_logits_in_transformers(name):
    require_refused_or_equal(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in SHAPES if name not in FAST])
def test_export_of_other_shapes_is_rejected_or_has_equal_logits(name):
    require_refused_or_equal(name)


def test_unmapped_weight_is_an_error(tmp_path, monkeypatch):
    model = GPT(ModelConfig(vocab_size=96))
    to_folder(model, tmp_path / "full")
    table = llama.weight_map(model.config)
    for wrong, message in (
        (table[:-1], "has no"),
        ([*table, tables.one_to_one("extra", "extra")], "requires"),
    ):
        monkeypatch.setattr(llama, "weight_map", lambda config, wrong=wrong: wrong)
        with pytest.raises(UserError, match=f"^(transformer.ln_f.weight|extra): .* 'llama' {message} such a weight"):
            to_folder(model, tmp_path / "wrong")
        shutil.rmtree(tmp_path / "wrong-checkpoint")
        assert not (tmp_path / "wrong").exists()
