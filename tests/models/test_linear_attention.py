"""Weights of linear attention: initial values, optimizer groups and dtypes. test_unseen_configs.py compares logits."""

import torch
from helpers.tiny_configs import GATED_DELTA_NET
from helpers.tiny_models import to_folder
from safetensors.torch import load_file

from toolkit.checkpoints.folder import load_model
from toolkit.checkpoints.hf.export_hf import export_hf
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


def test_decay_and_norm_keep_their_dtype(tmp_path):
    """The files of Qwen3.5 have them in fp32, which must not widen the others."""
    names = {f"{ATTN}A_log", f"{ATTN}out_norm.weight"}
    for wide in (names, set()):
        hf, folder, back = (tmp_path / str(len(wide)) / name for name in ("hf", "native", "back"))
        model = make().bfloat16()
        for name in wide:
            weight = model.get_parameter(name)
            weight.data = weight.data.float()
        to_folder(model, hf)
        assert not [note for note in import_hf(hf, folder) if "dtypes" in note]
        native = load_model(folder)
        assert {name for name, weight in native.state_dict().items() if weight.dtype == torch.float32} == wide
        export_hf(folder, back)
        before, after = (load_file(path / "model.safetensors") for path in (hf, back))
        assert {k: v.dtype for k, v in before.items()} == {k: v.dtype for k, v in after.items()}
        export_hf(folder, tmp_path / str(len(wide)) / "fp32", torch.float32)
        wider = load_file(tmp_path / str(len(wide)) / "fp32" / "model.safetensors")
        assert {v.dtype for v in wider.values()} == {torch.float32}
