"""Adapters that peft makes on transformers' experts and routers are imported with equal logits, and exported again."""

import json

import pytest
import torch
from helpers.cases import slow_except
from helpers.compare_runs import differs
from helpers.optional import importorskip_later
from safetensors.torch import load_file, save_file
from toolkit_interop.peft.export_peft import export_peft
from toolkit_interop.peft.import_peft import import_peft

from tests.checkpoints.test_adapters import write_adapted
from toolkit.checkpoints.folder import load_model
from toolkit.errors import UserError
from toolkit.models.lora import add_lora

peft = importorskip_later("peft")
transformers = pytest.importorskip("transformers")

MODELS = [
    "mixtral", "qwen2-moe", "qwen3-moe", "gpt-oss", "deepseek-v2", "deepseek-v3", "glm4-moe",
    "glm4-moe-lite", "olmoe", "ernie4.5-moe", "granitemoe", "gemma4-moe",
]  # fmt: skip
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]


def ids() -> torch.Tensor:
    return torch.randint(0, 96, (2, 24), generator=torch.Generator().manual_seed(1))


def made_by_peft(hf, folder, parameters, **settings):
    """Save random adapters of transformers' model; return peft's logits with and without them."""
    base = transformers.AutoModelForCausalLM.from_pretrained(hf)
    config = peft.LoraConfig(r=3, lora_alpha=7, target_modules=[], target_parameters=parameters, **settings)
    model = peft.get_peft_model(base, config).eval()
    generator = torch.Generator().manual_seed(4)
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            parameter.data = 0.2 * torch.randn(parameter.shape, generator=generator)
    model.save_pretrained(folder)
    with torch.no_grad(), model.disable_adapter():
        plain = model(input_ids=ids()).logits
    with torch.no_grad():
        return model(input_ids=ids()).logits, plain


@pytest.mark.parametrize("model", slow_except(["gpt-oss"], MODELS))
@torch.no_grad()
def test_adapters_of_peft_are_imported_and_exported(model, tiny_models, tmp_path):
    """peft's gate_up_proj has one A for fc_1 and fc_2, which get a copy each; the export has twice the rank."""
    hf, base = tiny_models[model].hf, tiny_models[model].native
    routers = {"gpt-oss": "mlp.router.weight", "granitemoe": "block_sparse_moe.router.weight",
               "gemma4-moe": "router.proj.weight"}  # fmt: skip
    router = routers.get(model, "mlp.gate.weight")
    expected, plain = made_by_peft(hf, tmp_path / "peft", [*EXPERTS, router])
    assert differs(plain, expected) > 1e-2
    native = load_model(base).eval()
    lora, adapters, note = import_peft(tmp_path / "peft", native.config)
    assert lora.parts == ("experts", "router") and lora.r == 3
    assert "each of the 2 parts of gate_up_proj gets a copy" in note and "rank 6" in note
    add_lora(native, lora)
    native.load_state_dict(adapters, strict=False)
    assert differs(native(ids()), expected) < 1e-5

    export_peft(write_adapted(tmp_path / "run", base, native, lora), tmp_path / "again")
    again = transformers.AutoModelForCausalLM.from_pretrained(hf)
    again = peft.PeftModel.from_pretrained(again, tmp_path / "again").eval()
    assert differs(again(input_ids=ids()).logits, expected) < 1e-5
    settings = json.loads((tmp_path / "again" / "adapter_config.json").read_text())
    assert settings["target_parameters"] == sorted([*EXPERTS, router.partition(".")[2]])
    assert settings["rank_pattern"] == {"experts.gate_up_proj": 6}
    assert settings["target_modules"] == [] and settings["lora_dropout"] == 0
    key = r".*\.gate_up_proj"  # as peft writes it for adapters of transformers 4
    settings |= {"rank_pattern": {key: 6}, "alpha_pattern": {key: 14}}
    (tmp_path / "again" / "adapter_config.json").write_text(json.dumps(settings))
    same, again_adapters, note = import_peft(tmp_path / "again", native.config)
    assert same == lora and note is None and again_adapters.keys() == adapters.keys()
    assert all(torch.equal(again_adapters[name], adapters[name]) for name in adapters)


def test_what_cannot_be_imported_is_one_line(tiny_models, tmp_path):
    hf, config = tiny_models["mixtral"].hf, load_model(tiny_models["mixtral"].native).config

    def refused(folder, text: str) -> None:
        with pytest.raises(UserError, match=text) as error:
            import_peft(folder, config)
        assert "\n" not in str(error.value)

    for name in EXPERTS:
        made_by_peft(hf, tmp_path / name, [name])
        refused(tmp_path / name, r"layers.0.mlp.experts: must have adapters on gate_up_proj and down_proj in every")
    patterns = {"rank_pattern": {"gate_up_proj": 6}, "alpha_pattern": {"gate_up_proj": 14}}
    made_by_peft(hf, tmp_path / "dense", EXPERTS, **patterns)
    refused(tmp_path / "dense", "rank_pattern .* not supported")
    other = {"rank_pattern": {"gate_up_proj": 6}, "alpha_pattern": {"gate_up_proj": 7}}
    made_by_peft(hf, tmp_path / "scaling", EXPERTS, **other)
    refused(tmp_path / "scaling", "rank_pattern .* not supported")
    with pytest.raises(UserError, match="adapts experts, and this base has none"):
        import_peft(tmp_path / "dense", load_model(tiny_models["llama"].native).config)
    made_by_peft(hf, tmp_path / "shape", EXPERTS)
    path = tmp_path / "shape" / "adapter_model.safetensors"
    tensors = load_file(path)
    name = "base_model.model.model.layers.1.mlp.experts.base_layer.lora_B.weight"
    save_file(tensors | {name: tensors[name][:-1].contiguous()}, path)
    refused(tmp_path / "shape", r"layers.1.mlp.experts.base_layer.lora_B is \(191, 12\), not \(192, 12\)")
