"""Adapters of the text model of a model that sees images, to peft and back."""

import pytest
import torch
from helpers.cases import slow_except
from helpers.initialize import add_lora
from helpers.optional import importorskip_later
from helpers.tiny_models import relative_error, token_ids
from toolkit_interop.peft.export_peft import export_peft
from toolkit_interop.peft.import_peft import import_peft

from tests.checkpoints.test_adapters import write_adapted
from tests.models.test_config_json import save_multimodal_model
from tests.models.test_lora import stir
from toolkit.checkpoints.folder import load_model
from toolkit.checkpoints.hf.import_hf import import_hf
from toolkit.models.lora_config import LoRAConfig

transformers, peft = pytest.importorskip("transformers"), importorskip_later("peft")


@torch.no_grad()
@pytest.mark.parametrize("kind", slow_except(["gemma3", "mistral3"], ["gemma3", "mistral3", "gemma4", "qwen3_5"]))
@pytest.mark.parametrize(
    "parts",
    [{}, pytest.param({"key": True, "projection": True, "mlp": True, "head": True}, marks=pytest.mark.slow)],
)
def test_multimodal_adapters_round_trip_through_peft(kind, parts, tmp_path, recwarn):
    reference, ids = save_multimodal_model(tmp_path / "hf", kind), token_ids() % 90
    import_hf(tmp_path / "hf", tmp_path / "base")
    lora, native = LoRAConfig(r=4, **parts), load_model(tmp_path / "base").eval()
    before = native(ids)
    add_lora(native, lora)
    stir(native)
    expected = native(ids)
    assert relative_error(before, expected) > 0.01
    write_adapted(tmp_path / "run", tmp_path / "base", native, lora)
    assert export_peft(tmp_path / "run", tmp_path / "peft").wrapper_type == kind

    reloaded = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "hf")
    assert type(reloaded) is type(reference)
    adapted = peft.PeftModel.from_pretrained(reloaded, tmp_path / "peft").eval()
    assert relative_error(adapted(ids).logits, expected) < 2e-5
    assert not [w for w in recwarn if "adapter keys" in str(w.message)]
    assert not any("vision" in name for name, _ in adapted.named_parameters() if "lora" in name)

    options, adapters, _ = import_peft(tmp_path / "peft", native.config)
    named = dict(native.named_parameters())
    assert options == lora and all(torch.equal(tensor, named[name]) for name, tensor in adapters.items())


def test_text_model_adapters_keep_their_names(tmp_path):
    save_multimodal_model(tmp_path / "hf", "gemma3")
    import_hf(tmp_path / "hf", tmp_path / "base")
    (tmp_path / "base" / "config.json").unlink()
    lora, native = LoRAConfig(r=4), load_model(tmp_path / "base")
    add_lora(native, lora)
    write_adapted(tmp_path / "run", tmp_path / "base", native, lora)
    assert export_peft(tmp_path / "run", tmp_path / "peft").wrapper_type is None
