"""Weights of linear attention: initial values, optimizer groups and dtypes. test_unseen_configs.py compares logits."""

import torch
from helpers.tiny_configs import GATED_DELTA_NET
from helpers.tiny_models import to_folder

from toolkit.checkpoints.folder import load_model
from toolkit.checkpoints.hf.import_hf import import_hf
from toolkit.models.config import ModelConfig
from toolkit.models.gpt import GPT
from toolkit.models.init import draw
from toolkit.optim.groups import block_params, no_decay_params
from toolkit.optim.hybrid import Muon

ATTN = "transformer.h.0.attn."


def make(**fields) -> GPT:
    sizes = {"family": "qwen3_5_text", "block_size": 64, "n_layer": 2, "n_head": 4, "n_embd": 64}
    return GPT(ModelConfig(**sizes | GATED_DELTA_NET | fields), seed=3)


def test_n3_initial_values_are_those_of_transformers_by_name():
    model = make(linear_attention=GATED_DELTA_NET["linear_attention"] | {"n_value_heads": 200})
    attn = model.transformer.h[0].attn
    decay = attn.A_log.detach().exp()
    assert 0.01 <= decay.min() < 0.5 and 15.5 < decay.max() <= 16 and abs(decay.mean() - 8) < 1
    assert torch.equal(attn.A_log, draw(f"{ATTN}A_log", attn.A_log.shape, seed=3, config=model.config))
    assert (attn.dt_bias == 1).all() and (attn.out_norm.weight == 1).all()  # other norms: 1 + weight
    assert abs(attn.conv.std().item() / 0.02 - 1) < 0.05 and abs(attn.proj.weight.std().item() / 0.01 - 1) < 0.05


def test_n5_decay_is_spared_and_muon_gets_matrices_only():
    model, decaying = make(), no_decay_params(make())
    assert {f"{ATTN}{name}" for name in ("A_log", "dt_bias", "out_norm.weight")} <= decaying
    blocks = block_params(model, (type(model.transformer.h[0]),))
    assert blocks[f"{ATTN}in_qkv.weight"] == (16, 16, 96)
    assert blocks["transformer.h.1.attn.qkv.weight"] == (128, 128, 64, 64)  # gates first
    main = {n for n, p in model.named_parameters() if Muon.is_main(p, n in blocks, n not in decaying)}
    assert {name.removeprefix(ATTN) for name in main if name.startswith(ATTN)} == {
        *(f"in_{part}.weight" for part in ("qkv", "gate", "beta", "decay")), "proj.weight",
    }  # fmt: skip


def test_decay_and_norm_stay_in_fp32_in_a_bf16_model(tmp_path):
    """As in the files of Qwen3.5, which would otherwise be imported in fp32."""
    to_folder(make().bfloat16(), tmp_path / "hf")
    notes = import_hf(tmp_path / "hf", tmp_path / "native")
    assert not [note for note in notes if "dtypes" in note]
    native = load_model(tmp_path / "native")
    wide = {name for name, weight in native.state_dict().items() if weight.dtype == torch.float32}
    assert wide == {f"{ATTN}A_log", f"{ATTN}out_norm.weight"}
