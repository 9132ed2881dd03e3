"""Published checkpoints of gpt-oss: experts in 4 bits become the 16-bit weights that transformers makes of them."""

import json
import re
import subprocess
import sys

import pytest
import torch
from helpers.damage import change_json
from helpers.peak_memory import with_path
from safetensors.torch import load_file, save_file

from toolkit.checkpoints.folder import load_model, read_model_config
from toolkit.checkpoints.hf.export_hf import export_hf
from toolkit.checkpoints.hf.import_hf import import_hf, is_import_of
from toolkit.checkpoints.hf.mxfp4 import dequantize
from toolkit.checkpoints.weights import load_weights
from toolkit.cli import main

transformers = pytest.importorskip("transformers")
IDS = torch.randint(0, 96, (2, 40), generator=torch.Generator().manual_seed(1))
PACKED = ("gate_up_proj", "down_proj")


def save(folder, **sizes):
    """A random gpt-oss as OpenAI published it: experts in 4 bits, everything else in bf16."""
    transformers.utils.logging.disable_progress_bar()
    options = {
        "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 24,
        "num_key_value_heads": 2, "vocab_size": 96, "max_position_embeddings": 4096 * 32, "num_local_experts": 4,
        "num_experts_per_tok": 2, "sliding_window": 16, "router_aux_loss_coef": 0.9,
    } | sizes  # fmt: skip
    model = transformers.GptOssForCausalLM(transformers.GptOssConfig(**options)).bfloat16()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(float("norm" in name), 0.15, generator=generator)
    model.save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    for name in [name for name in weights if name.endswith(PACKED)]:
        experts, inputs, outputs = weights.pop(name).shape
        shape = (experts, outputs, inputs // 32)
        weights[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
        weights[f"{name}_scales"] = torch.randint(121, 125, shape, dtype=torch.uint8, generator=generator)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    change_json(folder / "config.json", quantization_config=quantization)
    return folder


def change(folder, drop=(), **add):
    weights = load_file(folder / "model.safetensors")
    for name in drop:
        del weights[name]
    save_file(weights | add, folder / "model.safetensors", metadata={"format": "pt"})


def test_all_bytes_and_scales_match_transformers():
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(2, 256, 16, 16).contiguous()
    scales = torch.arange(256, dtype=torch.uint8).view(1, 256, 1).expand(2, 256, 16).contiguous()
    scales[1] = scales[1].flip(0)
    expected, found = convert_moe_packed_tensors(blocks, scales), dequantize(blocks, scales)
    assert found.shape == expected.shape == (2, 16 * 32, 256) and found.dtype == expected.dtype == torch.bfloat16
    assert torch.equal(found.contiguous().view(torch.int16), expected.view(torch.int16))


@torch.no_grad()
def test_published_checkpoint_matches_transformers(tmp_path):
    hf = save(tmp_path / "hf")
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        hf, dtype=torch.bfloat16, quantization_config=transformers.Mxfp4Config(dequantize=True)
    )
    notes = import_hf(hf, tmp_path / "m")
    native = load_model(tmp_path / "m")
    assert not [note for note in notes if "type" in note]
    assert {p.dtype for p in load_weights(tmp_path / "m").values()} == {torch.bfloat16}
    expected, found = (model.float().eval() for model in (reference, native))
    logits = expected(IDS).logits
    assert (found(IDS) - logits).abs().max() < 1e-5 * logits.abs().max()
    assert is_import_of(tmp_path / "m", hf)

    export_hf(tmp_path / "m", tmp_path / "out")  # in 16 bits
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    again = load_file(tmp_path / "out" / "model.safetensors")
    for name, value in reference.bfloat16().state_dict().items():
        assert torch.equal(again[name], value), name


def test_published_router_aux_loss_coef_is_replaced(tmp_path):
    import_hf(save(tmp_path / "hf"), tmp_path / "m")
    assert read_model_config(tmp_path / "m").router_aux_loss_coef == 0.001


EXPERTS = "model.layers.0.mlp.experts."
BAD = {
    "scales missing": (
        lambda f: change(f, drop=[f"{EXPERTS}down_proj_scales"]),
        rf"{re.escape(EXPERTS)}down_proj_blocks has unsupported dtype U8",
    ),
    "scales misshapen": (
        lambda f: change(f, **{f"{EXPERTS}down_proj_scales": torch.zeros(4, 64, 2, dtype=torch.uint8)}),
        rf"{re.escape(EXPERTS)}down_proj_blocks has unsupported dtype U8",
    ),
    "both": (
        lambda f: change(f, **{f"{EXPERTS}down_proj": torch.zeros(4, 32, 64)}),
        rf"{re.escape(EXPERTS)}down_proj_blocks has unsupported dtype U8",
    ),
    "shape": (
        lambda f: change_json(f / "config.json", num_local_experts=8),
        rf"{re.escape(EXPERTS)}down_proj is \(4, 32, 64\), not \(8, 32, 64\)",
    ),
    "other": (
        lambda f: change_json(f / "config.json", quantization_config={"quant_method": "awq"}),
        "quantization_config: weights quantized by 'awq' are not supported, only 'mxfp4', and 'fp8' .*; get the 16-bit",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_a_one_line_error_and_writes_nothing(tmp_path, capsys, case):
    spoil, message = BAD[case]
    spoil(save(tmp_path / "hf"))
    capsys.readouterr()
    assert main(["convert_from_hf", str(tmp_path / "hf"), str(tmp_path / "m")]) == 2
    shown = capsys.readouterr()
    assert re.search(message, shown.err) and shown.err.count("\n") == 1 and not shown.out
    assert [p.name for p in tmp_path.iterdir()] == ["hf"]


# Prints by how much the peak of anonymous memory rose during the second import, in largest weights.
PEAK = """
import sys, torch
from pathlib import Path
from helpers.peak_memory import rise
from toolkit.checkpoints.hf.import_hf import import_hf
from toolkit.checkpoints.weights import load_weights

torch.set_num_threads(1)
small, large = sys.argv[1:]
import_hf(small, small + "-in")
peak, _, _ = rise(import_hf, large, large + "-in")
print(peak / max(t.nbytes for t in load_weights(Path(large + "-in")).values()))
"""


@pytest.mark.slow
def test_m2_import_of_4_bits_holds_a_small_multiple_of_the_largest_weight(tmp_path):
    large = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 6, "num_local_experts": 64}
    folders = save(tmp_path / "small"), save(tmp_path / "large", **large)
    command = [sys.executable, "-c", PEAK, *folders]
    measured = subprocess.run(command, capture_output=True, text=True, check=True, env=with_path())
    assert float(measured.stdout) < 4
