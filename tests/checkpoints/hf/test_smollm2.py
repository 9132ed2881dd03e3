"""Real weights: SmolLM2-135M-Instruct in and out, computing what transformers computes."""

import argparse
import math
from pathlib import Path

import pytest
import torch
from helpers.smollm2 import gguf_file, smollm2_folder
from safetensors.torch import load_file

from toolkit.checkpoints.folder import load_model
from toolkit.checkpoints.hf.export_hf import export_hf
from toolkit.checkpoints.hf.import_hf import import_hf
from toolkit.data.chat.template import ChatTemplate
from toolkit.data.tokenizer import Tokenizer
from toolkit.inference.generate import generate
from toolkit.inference.sampling import GREEDY
from toolkit.inference.text import stop_tokens

transformers = pytest.importorskip("transformers")

# English, and of no page that changes. transformers' conversion of GGUF leaves out SmolLM2's Digits pre-tokenizer: no
# spaces in front of a digit
TEXT = argparse.__doc__
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """(as on the hub, native, exported again)"""
    hub, native = smollm2_folder(), tmp_path_factory.mktemp("smollm2") / "native"
    assert import_hf(hub, native) == []
    export_hf(native, native.with_name("back"))
    return hub, native, native.with_name("back")


@pytest.fixture(scope="module")
def models(folders):
    """(native, reference), in float32."""
    reference = transformers.AutoModelForCausalLM.from_pretrained(folders[0], dtype=torch.float32)
    return load_model(folders[1], dtype=torch.float32).eval(), reference.eval()


def prompt(folders):
    tokenizer = Tokenizer.load(folders[1])
    return tokenizer, torch.tensor(ChatTemplate.from_tokenizer(tokenizer, None).encode_prompt(QUESTION))


@pytest.mark.slow
@torch.no_grad()
def test_equal_logits(folders, models):
    tokenizer, _ = prompt(folders)
    ids = torch.tensor([tokenizer.encode(TEXT)[:64]])
    native, expected = models[0](ids), models[1](ids).logits
    assert native.shape == expected.shape
    assert float((native - expected).abs().max() / expected.abs().max()) < 1e-5


@pytest.mark.slow
@torch.no_grad()
def test_equal_greedy_text_until_eos(folders, models):
    tokenizer, ids = prompt(folders)
    native = list(generate(models[0], ids, max_new_tokens=40, sampling=GREEDY, eos_ids=stop_tokens(tokenizer)))
    settings = {"max_new_tokens": 40, "do_sample": False, "attention_mask": torch.ones(1, len(ids))}
    reference = models[1].generate(ids[None], **settings)[0, len(ids) :].tolist()
    assert len(native) < 40 and [*native, tokenizer.eos_id] == reference
    assert "Paris" in tokenizer.decode(native)


@pytest.mark.slow
@torch.no_grad()
def test_equal_perplexity_on_real_text(folders, models):
    tokenizer, _ = prompt(folders)
    ids = torch.tensor(tokenizer.encode(TEXT)[:257]).unfold(0, 257, 256)
    loss_sum, count = models[0](ids[:, :-1], ids[:, 1:].contiguous())
    reference = models[1](ids, labels=ids).loss
    assert int(count) == 256
    assert math.exp(loss_sum / count) == pytest.approx(math.exp(reference), rel=1e-5)
    assert 5 < math.exp(reference) < 100, "the model must know the language"


def test_weights_and_tokenizer_round_trip(folders):
    hub, _, back = folders
    before, after = load_file(hub / "model.safetensors"), load_file(back / "model.safetensors")
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    names = ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"]
    for name in [*names, "generation_config.json"]:
        assert (back / name).read_bytes() == (hub / name).read_bytes()


def test_transformers_renders_the_exported_template_to_the_same_tokens(folders):
    hub, native, back = folders
    conversation = [*QUESTION, {"role": "assistant", "content": "Paris: 1, 22, 333."}, *QUESTION]
    expected, again = (
        transformers.AutoTokenizer.from_pretrained(folder).apply_chat_template(
            conversation, add_generation_prompt=True, return_dict=False
        )
        for folder in (hub, back)
    )
    assert expected == again == ChatTemplate.from_tokenizer(Tokenizer.load(native), None).encode_prompt(conversation)


@pytest.mark.slow
def test_folder_matches_transformers():
    """The fixture itself: weights bit for bit, tokens of all kinds of text, and the template."""
    folder, file = smollm2_folder(), gguf_file()
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.bfloat16
    )
    weights, expected = load_file(folder / "model.safetensors"), reference.state_dict()
    assert expected.keys() - weights.keys() == {"lm_head.weight"}  # tied
    assert weights.keys() <= expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights.items())
    native, expected = transformers.AutoConfig.from_pretrained(folder).to_dict(), reference.config.to_dict()
    keys = ["hidden_size", "num_hidden_layers", "num_key_value_heads", "rope_parameters", "max_position_embeddings"]
    assert {name: native[name] for name in keys} == {name: expected[name] for name in keys}
    assert native["rms_norm_eps"] == pytest.approx(expected["rms_norm_eps"])
    tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    texts = [
        TEXT,
        Path(__file__).read_text(),
        "3.14159 in 2024  \t\n\n déjà vu, 漢字 🙂 <|im_start|>user\n12<|im_end|>",
    ]
    for text in texts:
        assert Tokenizer.load(folder).encode(text) == tokenizer(text)["input_ids"]
    assert (folder / "chat_template.jinja").read_text(encoding="utf-8") == tokenizer.chat_template
