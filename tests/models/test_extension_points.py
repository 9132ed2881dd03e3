"""What a model of an extension builds on: cross-attention, parts of the model, options of its family."""

import jsonargparse
import pytest
import torch
from helpers.initialize import initialize

from toolkit.errors import UserError
from toolkit.inference.generate import generate
from toolkit.models import families
from toolkit.models.config import ModelConfig, ModelOverrides
from toolkit.models.families import llama
from toolkit.models.gpt import GPT, build_model, model_on_meta
from toolkit.models.kv_cache import KVCache
from toolkit.models.masks import AttentionMask
from toolkit.models.rope import RotaryEmbedding, inverse_frequencies

CONFIG = ModelConfig(block_size=16, vocab_size=60, n_layer=2, n_head=4, n_query_groups=2, n_embd=32)


@pytest.fixture
def model() -> GPT:
    model = GPT(CONFIG)
    initialize(model, seed=1)
    return model.eval()


def rope(T: int) -> RotaryEmbedding:
    return RotaryEmbedding(torch.arange(T), inverse_frequencies(CONFIG))


@pytest.mark.parametrize("is_causal", [True, False])
def test_cross_attention_takes_queries_of_x_and_keys_and_values_of_kv_source(model, is_causal):
    attention, T = model.blocks[0].attn, 7
    x, source = torch.randn(2, T, 32), torch.randn(2, T, 32)
    mask = AttentionMask(T, is_causal=is_causal)
    actual = attention(x, mask, rope(T), None, source)
    q = attention.qkv(x)[..., :32].view(2, T, 4, 8)
    k, v = attention.qkv(source)[..., 32:].view(2, T, 4, 8).split((2, 2), dim=2)
    q, k = rope(T).apply(q), rope(T).apply(k)
    k, v = (part.repeat_interleave(2, dim=2) for part in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * 8**-0.5
    if is_causal:
        scores = scores.masked_fill(~torch.ones(T, T, dtype=torch.bool).tril(), float("-inf"))
    expected = attention.proj(torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v).flatten(2))
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(attention(x, mask, rope(T), None, x), attention(x, mask, rope(T)))
    repeated = x[:1, :1].expand(2, T, 32)  # one query for all positions: only the rotation tells them apart
    torch.testing.assert_close(
        attention(x[:1, :1], mask, rope(T), None, source), attention(repeated, mask, rope(T), None, source)
    )


def test_a_block_normalizes_kv_source_and_keeps_its_residual_stream(model):
    block, mask = model.blocks[0], AttentionMask(5, is_causal=True)
    x, source = torch.randn(1, 5, 32), 10 * torch.randn(1, 5, 32)
    attended = x + block.attn(block.norm_1(x), mask, rope(5), None, block.norm_1(source))
    expected = attended + block.mlp(block.norm_2(attended))
    torch.testing.assert_close(block(x, mask, rope(5), kv_source=source), expected)


def test_a_subclass_may_run_the_model_in_parts(model):
    ids = torch.randint(60, (2, 9))
    x, inputs = model.embed(ids)
    for layers in (range(1), range(1, 2)):
        x, _ = model.run_blocks(x, layers, inputs)
    assert torch.equal(model.logits(x), model(ids))
    assert torch.equal(model.cross_entropy(x, ids), model(ids, ids)[0])


class Other(GPT):
    """The model of a family with a custom class."""


class OtherFamily:
    MODEL = f"{__name__}.Other"
    CONFIGS, ALIASES = llama.CONFIGS, llama.ALIASES


def test_a_family_names_the_class_of_its_models_and_takes_options(monkeypatch):
    monkeypatch.setitem(families.FAMILIES, "other", f"{__name__}.OtherFamily")
    config = ModelConfig(family="other", vocab_size=60, family_options={"a": 1, "b": 2})
    assert type(build_model(config)) is Other and type(model_on_meta(config)) is Other
    assert type(build_model(CONFIG)) is GPT
    parser = jsonargparse.ArgumentParser()
    parser.add_argument("--model_config", type=ModelOverrides, default=ModelOverrides())
    args = parser.instantiate_classes(parser.parse_args(["--model_config.family_options.b", "3"]))
    assert config.override(args.model_config).family_options == {"a": 1, "b": 3}
    assert ModelConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize(
    ("name", "instead"), [("document_bounds", "documents has the"), ("log_probs", "labels may be")]
)
def test_a_parameter_of_forward_that_would_get_nothing_is_an_error(name, instead):
    scope = {"GPT": GPT}
    with pytest.raises(UserError, match=rf"^Old.forward: {name} is never passed; remove it \({instead}"):
        exec(f"class Old(GPT):\n    def forward(self, input_ids, labels=None, *, {name}=None): ...", scope)


def test_families_of_the_core_refuse_options():
    config = ModelConfig(vocab_size=60, family_options={"a": 1})
    with pytest.raises(UserError, match="model_config.family_options .*'llama' has no options"):
        model_on_meta(config)
    assert "family_options" in str(families.export_error(config))


def test_a_kv_cache_knows_the_complete_prompt_and_the_seed(model):
    prompt, cache = torch.randint(60, (6,)), KVCache(CONFIG, 1, 0)
    list(generate(model, prompt, max_new_tokens=2, seed=5, cache=cache))
    assert torch.equal(cache.prompt, prompt[None]) and cache.seed == 5 and cache.state == {}
    cache.truncate(0)
    list(generate(model, prompt[:4], max_new_tokens=1, cache=cache))
    assert cache.prompt.shape == (1, 4) and cache.seed == 0
