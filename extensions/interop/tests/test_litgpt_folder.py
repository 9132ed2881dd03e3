"""LitGPT's checkpoint folders are read as they are, with an older layout of attention too; wrong ones are one line."""

import dataclasses

import pytest
import torch
import yaml

from tests.checkpoints.test_folder import LLAMA, NEOX, TOKENS, change, save
from toolkit.checkpoints.folder import find_checkpoint_dir, load_model, read_model_config
from toolkit.errors import UserError


@pytest.mark.parametrize("config", [LLAMA, NEOX], ids=["grouped", "one key per head"])
def test_litgpts_older_attention_weights(tmp_path, config):
    model = save(tmp_path / "m", config)
    head, per_group = config.head_size, config.n_head // config.n_query_groups

    def interleave(qkv):  # [q of group 0, its k, its v, q of group 1, ...]
        q, k, v = qkv.split([config.n_head * head, config.n_query_groups * head, config.n_query_groups * head])
        rows = zip(q.split(per_group * head), k.split(head), v.split(head), strict=True)
        return torch.cat([part for group in rows for part in group])

    def age(state):
        for name in [n for n in state if ".attn.qkv." in n]:
            state[name.replace(".qkv.", ".attn.")] = interleave(state.pop(name))

    change(tmp_path / "m", age)
    loaded = load_model(tmp_path / "m")
    assert torch.equal(loaded(TOKENS), model(TOKENS))


def litgpt_config(**values):
    """What LitGPT writes for a small Pythia."""
    return {
        "name": "pythia-x", "hf_config": {"org": "EleutherAI", "name": "pythia-x"}, "block_size": 32, "n_layer": 2,
        "n_embd": 64, "vocab_size": 100, "padding_multiple": 64, "padded_vocab_size": 128, "n_head": 4, "head_size": 16,
        "norm_class_name": "LayerNorm", "norm_eps": 1e-05, "norm_qk": False, "post_attention_norm": False,
        "parallel_residual": True, "shared_attention_norm": False, "n_query_groups": 4, "attn_bias": False,
        "sliding_window_size": None, "rope_base": 10000, "rotary_percentage": 0.25, "rope_condense_ratio": 1,
        "rope_adjustments": None, "intermediate_size": 256, "bias": True, "mlp_class_name": "GptNeoxMLP", "n_expert": 0,
        "gelu_approximate": "none", "scale_embeddings": False, "lm_head_bias": False, "norm_1": True, "norm_2": True,
        **values,
    }  # fmt: skip


def test_litgpt_folder_loads_without_conversion(tmp_path):
    model = save(tmp_path / "m", NEOX)
    (tmp_path / "m" / "COMPLETE").unlink()
    (tmp_path / "m" / "model_config.yaml").write_text(yaml.safe_dump(litgpt_config()))
    torch.save({"model": model.state_dict(), "iter_num": 7}, tmp_path / "m" / "lit_model.pth")
    loaded = load_model(find_checkpoint_dir(str(tmp_path / "m")))
    assert loaded.config == dataclasses.replace(NEOX, name="pythia-x")
    assert torch.equal(loaded(TOKENS), model(TOKENS))


def test_wrong_values_are_named(tmp_path):
    for values, message in (
        ({"mlp_class_name": "SomeMoE"}, "mlp_class_name SomeMoE: must be one of LLaMAMLP"),
        ({"mlp_class_name": "LLaMAMoE"}, "n_expert_per_token 0: must be between 1 and n_expert 0"),
        ({"rope_interleave": True}, "rope_interleave True: unknown field, perhaps"),
    ):
        (tmp_path / "model_config.yaml").write_text(yaml.safe_dump(litgpt_config(**values)))
        with pytest.raises(UserError, match=f"^{tmp_path}/model_config.yaml: .*{message}"):
            read_model_config(tmp_path)
