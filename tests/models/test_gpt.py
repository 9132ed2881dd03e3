import copy

import pytest
import torch
from helpers.cases import slow_except
from torch.utils._python_dispatch import TorchDispatchMode

from toolkit.models import attention
from toolkit.models.block import Block
from toolkit.models.config import ModelConfig
from toolkit.models.families import get_config
from toolkit.models.gpt import GPT
from toolkit.models.kv_cache import KVCache
from toolkit.models.masks import AttentionMask
from toolkit.models.rope import RotaryEmbedding, inverse_frequencies

STYLES = {"llama": "pico-llama", "neox": "pythia-14m", "gpt2": "gpt2"}


def small(style: str, **changes) -> GPT:
    config = get_config(STYLES.get(style, "pico-llama")).to_dict()
    if style == "moe":
        config |= {"mlp_class_name": "LLaMAMoE", "n_expert": 4, "n_expert_per_token": 2, "router_aux_loss_coef": 0.1}
    config |= {"n_layer": 2, "n_embd": 64, "n_head": 4, "head_size": 16, "intermediate_size": 96, "block_size": 40}
    config |= {"vocab_size": 100, "padded_vocab_size": None, "n_query_groups": 2 if style == "llama" else 4}
    model = GPT(ModelConfig(**config | changes))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0.0, 0.15, generator=generator)
    return model


def ids(batch: int = 2, length: int = 24) -> torch.Tensor:
    return torch.randint(0, 100, (batch, length), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
@pytest.mark.parametrize("pieces", [(24,), (1,) * 24, (10, 1, 1, 12), (1, 23)])
@pytest.mark.parametrize("style", STYLES)
def test_cached_forward_equals_uncached(style, pieces):
    model, x = small(style), ids()
    cache = KVCache(model.config, 2, 24)
    outputs = [model(part, kv_cache=cache) for part in x.split(pieces, dim=1)]
    torch.testing.assert_close(torch.cat(outputs, dim=1), model(x), rtol=1e-4, atol=1e-5)
    assert cache.length == 24


@torch.no_grad()
@pytest.mark.parametrize("style", STYLES)
def test_attention_is_causal(style):
    model, x = small(style), ids()
    changed = x.clone()
    changed[:, 10] = (changed[:, 10] + 1) % 100
    a, b = model(x), model(changed)
    assert torch.equal(a[:, :10], b[:, :10])
    assert not torch.allclose(a[:, 10:], b[:, 10:], atol=1e-3)


@torch.no_grad()
@pytest.mark.parametrize("style", STYLES)
def test_positions_default_to_arange_and_can_be_per_row(style):
    model, x = small(style), ids()
    expected = model(x)
    torch.testing.assert_close(model(x, positions=torch.arange(24)), expected)
    torch.testing.assert_close(model(x, positions=torch.arange(24).expand(2, -1)), expected)
    doubled = model(x, positions=2 * torch.arange(24) % 40)
    assert not torch.allclose(doubled, expected, atol=1e-3)


def test_sequence_beyond_block_size_is_rejected():
    model = small("llama")
    with pytest.raises(ValueError, match="sequence length 41 exceeds .* 40"):
        model(ids(1, 41))
    cache = KVCache(model.config, 1, 41)
    model(ids(1, 40), kv_cache=cache)
    with pytest.raises(ValueError, match="sequence length 41"):
        model(ids(1, 1), kv_cache=cache)


def test_n8_rotary_tables_stay_fp32_and_out_of_the_state_dict():
    model = small("llama")
    expected = inverse_frequencies(model.config)
    with torch.no_grad():
        model(ids())
    model.bfloat16()
    assert not list(model.buffers()) and all("inv" not in name for name in model.state_dict())
    rotations = []
    model.transformer.h[0].register_forward_pre_hook(lambda _, args: rotations.append(args[2]))
    assert model(ids()).dtype == torch.bfloat16
    assert rotations[0].cos.dtype == rotations[0].sin.dtype == torch.float32
    angles = torch.outer(torch.arange(24.0), expected)
    torch.testing.assert_close(rotations[0].cos[:, 0, : expected.numel()], angles.cos())


def test_n8_rotary_embedding_is_not_cast_by_fsdp():
    from torch.distributed.utils import _apply_to_tensors
    from torch.utils._pytree import tree_map_only

    rotation = RotaryEmbedding(torch.arange(8), torch.ones(4))
    for cast in (
        lambda args: _apply_to_tensors(torch.Tensor.bfloat16, args),
        lambda args: tree_map_only(torch.Tensor, torch.Tensor.bfloat16, args),
    ):
        x, same = cast((torch.ones(2), {0: rotation}))
        assert x.dtype == torch.bfloat16 and same[0].cos.dtype == torch.float32


def test_rope_rotates_half_split_pairs_and_keeps_the_rest():
    x = torch.randn(1, 8, 2, 12)
    inverse = torch.tensor([1.0, 0.1, 0.01, 0.001])
    out = RotaryEmbedding(torch.arange(8), inverse).apply(x)
    a, b = torch.view_as_real(
        torch.complex(x[..., :4], x[..., 4:8])
        * torch.polar(torch.ones(8, 1, 4), torch.outer(torch.arange(8.0), inverse)[:, None])
    ).unbind(-1)
    torch.testing.assert_close(out, torch.cat((a, b, x[..., 8:]), dim=-1))


@pytest.mark.parametrize("style", slow_except(["llama"], [*STYLES, "moe"]))
def test_blocks_compile_without_graph_break(style):
    model, x = small(style), ids()
    compiled = copy.deepcopy(model)
    for block in compiled.transformer.h:
        block.compile(backend="aot_eager", fullgraph=True)
        assert type(block) is Block
    assert list(compiled.state_dict()) == list(model.state_dict())
    for length in (24, 24):
        losses = []
        for m in (model, compiled):
            m.zero_grad()
            loss, _ = m(x[:, :length], x[:, :length])
            loss.backward()
            losses.append(loss.detach())
        torch.testing.assert_close(*losses, rtol=1e-6, atol=0)
    for (name, p), q in zip(model.named_parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, rtol=1e-3, atol=1e-4, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("style", [*STYLES, "moe"])
def test_blocks_compile_without_graph_break_on_cuda(style):
    """With the oldest torch too, whose compiler does not know all functions that a newer one knows."""
    model, x = small(style).cuda(), ids().cuda()
    for block in model.transformer.h:
        block.compile(backend="aot_eager", fullgraph=True)
    with torch.autocast("cuda", torch.bfloat16):
        loss, _ = model(x, x)
    loss.backward()
    assert loss.isfinite()


def test_weight_names_match_litgpt():
    names = set(small("llama").state_dict())
    assert names >= {"lm_head.weight", "transformer.wte.weight", "transformer.ln_f.weight"}
    block = {n.removeprefix("transformer.h.1.") for n in names if n.startswith("transformer.h.1.")}
    mlp = {"mlp.fc_1.weight", "mlp.fc_2.weight", "mlp.proj.weight"}
    assert block == {"norm_1.weight", "norm_2.weight", "attn.qkv.weight", "attn.proj.weight", *mlp}
    assert {"transformer.h.0.mlp.fc.weight", "transformer.h.0.mlp.fc.bias"} <= set(small("neox").state_dict())
    assert "transformer.wpe.weight" in small("gpt2").state_dict()


@pytest.mark.parametrize("style", STYLES)
def test_n9_packed_documents_are_isolated(style):
    """Losses and gradients of each document are those it has alone, for any neighbors."""
    model = small(style)
    a, b = ids(1, 14), ids(1, 25)[:, 14:]
    positions = torch.cat((torch.arange(14), torch.arange(11)))[None]
    documents = torch.tensor([[0] * 14 + [1] * 11])
    packed = model(torch.cat((a, b), dim=1), positions=positions, documents=documents)
    torch.testing.assert_close(packed[:, :14], model(a), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(packed[:, 14:], model(b), rtol=1e-4, atol=1e-5)
    other = model(torch.cat((a.flip(1), b), dim=1), positions=positions, documents=documents)
    assert torch.equal(other[:, 14:], packed[:, 14:]) and not torch.equal(other[:, :14], packed[:, :14])


def longrope() -> GPT:
    factors = {"short_factor": [1.0] * 8, "long_factor": [4.0 + i for i in range(8)]}
    adjustments = {**factors, "original_max_seq_len": 12, "attention_factor": 1.2}
    torch.manual_seed(0)
    model = GPT(ModelConfig(vocab_size=50, block_size=40, n_head=2, n_embd=32, rope_adjustments=adjustments))
    torch.nn.init.normal_(model.transformer.h[0].attn.qkv.weight, std=0.5)
    return model


def test_n2_rope_of_short_rows_does_not_depend_on_long_rows():
    """Longrope: rows of 8, 12, 13 and 30 tokens have the same losses padded together as alone."""
    model, lengths = longrope(), (8, 12, 13, 30)
    ids = torch.randint(0, 50, (4, 30))
    labels = torch.where(torch.arange(30) < torch.tensor(lengths)[:, None], ids, -100)
    together = [model(ids[i : i + 1], labels[i : i + 1])[0] for i in range(4)]
    alone = [model(ids[i : i + 1, :n], labels[i : i + 1, :n])[0] for i, n in enumerate(lengths)]
    torch.testing.assert_close(together, alone)
    torch.testing.assert_close(model(ids, labels)[0], sum(alone))
    assert not torch.allclose(model(ids)[2, :12], model(ids[2:3, :12])[0])  # longer rows have other results


def test_uniform_length_does_not_change_results():
    window = small("llama", sliding_window_size=16, sliding_window_indices=[1, 0])
    for model, length in ((window, 10), (window, 24), (longrope(), 10), (longrope(), 24)):
        x = ids(length=length) % 50
        expected = model(x, x)[0]
        model.execute_with(uniform_length=40)
        torch.testing.assert_close(model(x, x)[0], expected)
        model.execute_with(uniform_length=0)


def test_n9_rope_of_packed_documents_uses_document_length():
    model, ids = longrope(), torch.randint(0, 50, (1, 38))
    lengths, labels = (10, 20, 8), ids.clone()
    labels[:, 23:30] = -100  # 13 tokens of the second document are supervised, 8 of the third
    documents = torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)])[None]
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    parts = zip(ids.split(lengths, dim=1), labels.split(lengths, dim=1), strict=True)
    alone = sum(model(a, b)[0] for a, b in parts)
    torch.testing.assert_close(model(ids, labels, positions=positions, documents=documents)[0], alone)


@pytest.mark.parametrize("masked", [False, True])
@torch.no_grad()
def test_repeated_keys_and_values_match_gqa(masked, monkeypatch):
    """The fallback where no fused kernel supports GQA."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, n, 9, 16, generator=generator) for n in (6, 2, 2))
    mask = torch.rand(2, 1, 9, 9, generator=generator) > 0.3 if masked else None
    expected = attention.fused_attention(q, k, v, mask, not masked, 0.3)
    monkeypatch.setattr(attention, "sdpa_supports_gqa", lambda q, mask: False)
    torch.testing.assert_close(attention.fused_attention(q, k, v, mask, not masked, 0.3), expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("masked", [False, True])
def test_gqa_never_materializes_all_scores(masked, dtype):
    """4,096 tokens, 8 heads, batch size 2: all scores would be 1 GiB in fp32."""
    q, k, v = (torch.randn(2, n, 4096, 64, device="cuda", dtype=dtype, requires_grad=True) for n in (8, 2, 2))
    mask = torch.ones(4096, 4096, dtype=torch.bool, device="cuda").tril() if masked else None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    attention.fused_attention(q, k, v, mask, not masked, 0.125).sum().backward()
    assert torch.cuda.max_memory_allocated() - before < 0.4e9


class _Operators(TorchDispatchMode):
    """The names of the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


def test_no_gradient_is_the_gradient_of_a_slice():
    """It would be copied into zeros: two more kernels, of a whole tensor each."""
    latent = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 24}
    changes = {"n_query_groups": 4, "head_size": 24, "latent_attention": latent}
    for model in (small("gpt2"), small("llama"), small("neox"), small("llama", **changes)):
        loss, _ = model(ids(), labels=ids())
        with _Operators() as operators:
            loss.backward()
        assert "mm.default" in operators.names and "slice_backward.default" not in operators.names


def test_queries_keys_and_values_have_one_gradient_that_is_copied_once():
    """RoPE needs queries and keys as one tensor, whose gradient is another copy; at position 0 it changes no bit."""
    attn, results = small("gpt2").blocks[0].attn, []
    x = torch.randn(2, 24, 64, generator=torch.Generator().manual_seed(2), requires_grad=True)
    rope = RotaryEmbedding(torch.zeros(24, dtype=torch.int64), inverse_frequencies(small("llama").config))
    for rotation, copies in ((None, 1), (rope, 2)):
        y = attn(x, AttentionMask(24, is_causal=True), rotation)
        with _Operators() as operators:
            gradients = torch.autograd.grad(y.square().sum(), [x, *attn.parameters()])
        assert operators.names.count("cat.default") == copies
        results.append((y, *gradients))
    assert all(map(torch.equal, *results))
