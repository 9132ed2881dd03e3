"""Weights in 8 bits, as DeepSeek-V3 and others are published."""

import json

import pytest
import torch
from helpers.damage import edit_json
from helpers.tiny_configs import HF_CONFIGS
from helpers.tiny_models import randomize, token_ids
from safetensors.torch import load_file, save_file

from toolkit.checkpoints.folder import load_model
from toolkit.checkpoints.hf.fp8 import dequantize
from toolkit.checkpoints.hf.import_hf import import_hf
from toolkit.checkpoints.weights import load_weights
from toolkit.errors import UserError

transformers = pytest.importorskip("transformers")
BLOCK = (16, 24)
QUANTIZATION = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(BLOCK), "activation_scheme": "dynamic"}


def quantized(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The weight in 8 bits, and the scales of its blocks."""
    rows, columns = (-(-n // size) for n, size in zip(weight.shape, BLOCK, strict=True))
    found, scales = torch.empty(weight.shape, dtype=torch.float8_e4m3fn), torch.empty(rows, columns)
    for i in range(rows):
        for j in range(columns):
            part = tuple(slice(k * size, (k + 1) * size) for k, size in zip((i, j), BLOCK, strict=True))
            scales[i, j] = weight[part].abs().max() / 448  # the largest number of this format
            found[part] = (weight[part] / scales[i, j]).to(torch.float8_e4m3fn)
    return found, scales


@pytest.fixture
def folder(tmp_path):
    """DeepSeek-V3's form: linear layers in 8 bits, all else in 16, the correction in fp32."""
    hf = transformers.AutoModelForCausalLM.from_config(HF_CONFIGS["deepseek-v3"]()).eval()
    randomize(hf, seed=0)
    hf.save_pretrained(tmp_path / "hf")
    weights = {}
    for name, tensor in load_file(tmp_path / "hf" / "model.safetensors").items():
        if "_proj" in name:
            weights[name], weights[f"{name}_scale_inv"] = quantized(tensor)
        else:
            weights[name] = tensor if "correction" in name else tensor.bfloat16()
    save_file(weights, tmp_path / "hf" / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config | {"quantization_config": QUANTIZATION}))
    return tmp_path / "hf"


def test_each_block_has_its_scale():
    weight = torch.randn(40, 60, generator=torch.Generator().manual_seed(0))  # blocks at the end are smaller
    small, scales = quantized(weight)
    found = dequantize(small, scales, BLOCK)
    for i, j in ((0, 0), (15, 23), (16, 24), (39, 59)):
        expected = small[i, j].float() * scales[i // 16, j // 24]
        assert found[i, j] == expected.bfloat16()
    assert (found.float() - weight).abs().max() < weight.abs().max() / 16


def test_dequantization_is_bit_equal_to_transformers():
    module = pytest.importorskip("transformers.integrations.finegrained_fp8")
    if not hasattr(module, "Fp8Dequantize"):
        pytest.skip("this version of transformers has it elsewhere")
    small, scales = quantized(torch.randn(48, 72, generator=torch.Generator().manual_seed(1)))
    expected = module.Fp8Dequantize(None)._dequantize_one(small, scales, torch.bfloat16)
    assert torch.equal(dequantize(small, scales, BLOCK), expected)


def test_fp8_model_imports_as_its_16_bit_equivalent(folder, tmp_path):
    import_hf(folder, tmp_path / "native")
    weights = load_weights(tmp_path / "native")
    assert {t.dtype for name, t in weights.items() if "correction" not in name} == {torch.bfloat16}

    plain = {name: t for name, t in load_file(folder / "model.safetensors").items() if "scale_inv" not in name}
    scales = {name: t for name, t in load_file(folder / "model.safetensors").items() if "scale_inv" in name}
    for name in list(plain):
        if f"{name}_scale_inv" in scales:
            plain[name] = dequantize(plain[name], scales[f"{name}_scale_inv"], BLOCK)
    (tmp_path / "plain").mkdir()
    save_file(plain, tmp_path / "plain" / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "plain" / "config.json").write_text(json.dumps(config))
    import_hf(tmp_path / "plain", tmp_path / "same")
    same = load_weights(tmp_path / "same")
    assert same.keys() == weights.keys() and all(torch.equal(weights[name], same[name]) for name in same)
    with torch.no_grad():
        assert load_model(tmp_path / "native").eval()(token_ids()).isfinite().all()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"weight_block_size": None}, "quantized by 'fp8' .* weight_block_size"),
        ({"weight_block_size": [16, 16]}, r"_proj.weight_scale_inv is \(.*\) in float32; it must be \(.*\) in float32"),
        ({"fmt": "e5m2"}, "quantized by 'fp8'"),
    ],
)
def test_other_fp8_formats_are_rejected(folder, tmp_path, changed, message):
    edit_json(folder / "config.json", lambda config: config["quantization_config"].update(changed))
    with pytest.raises(UserError, match=message):
        import_hf(folder, tmp_path / "native")
    assert not (tmp_path / "native").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda scales: None, "weight_scale_inv is missing; it must be .* in float32; copy or download it again"),
        (lambda scales: scales.bfloat16(), "weight_scale_inv is .* in bfloat16; it must be .* in float32"),
        (lambda scales: scales[:1], r"weight_scale_inv is \(1, .* it must be"),
    ],
)
def test_damaged_scales_are_named(folder, tmp_path, change, message):
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.0.self_attn.o_proj.weight_scale_inv"
    changed = change(weights.pop(name))
    weights |= {} if changed is None else {name: changed.contiguous()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=f"model.safetensors: model.layers.0.self_attn.o_proj.{message}"):
        import_hf(folder, tmp_path / "native")
