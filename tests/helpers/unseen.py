"""Models of random sizes and options that no test lists, by model type: transformers' and toolkit's with equal weights.

To add a model type, write a function from a random generator to transformers' config, and add it to ``MODEL_TYPES``.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from helpers.tiny_models import randomize
from toolkit.checkpoints.folder import load_model
from toolkit.checkpoints.hf.import_hf import import_hf
from toolkit.models import moe
from toolkit.models.gpt import GPT

transformers = pytest.importorskip("transformers")

SEEDS = range(12)
TOKENS = 90  # ids below this are in every vocabulary


@dataclass(frozen=True)
class ModelType:
    """How a model type is tested.

    Args:
        make: Makes transformers' config; contexts must have 64 tokens or more.
        logits: Largest difference of logits from transformers, relative to the largest logit.
        gradients: Largest difference of a tensor's gradient, relative to its norm.
        bf16: Largest typical error in bf16, relative to transformers' error.
        parts: Largest fp32 difference of logits of a row read in parts, or packed with others, from those of the row
            alone, relative to the largest logit.
        curve: Largest relative difference of the losses of 20 steps.
        curve_seeds: Seeds of the models that are trained.
        fast_seeds: Seeds of the models that are tested without the slow tests.
        dtype: Dtype in which logits and gradients are compared.
        exactly: Context in which transformers computes in ``dtype``, where its classes convert to fp32.
        second_form: Context in which transformers computes another form of the same. With it, the error of fp32 logits
            from those in ``dtype`` must be at most twice that of transformers' forms.
        from_pretrained: Loads transformers' model from a folder.
    """

    make: Callable[[Random], Any]
    logits: float = 2e-5
    gradients: float = 3e-4
    bf16: float = 1.5
    parts: float = 2e-5
    curve: float = 2e-5
    curve_seeds: tuple[int, ...] = (0, 7)
    fast_seeds: Sequence[int] = range(3)
    dtype: torch.dtype = torch.float32
    exactly: Callable[[], AbstractContextManager[Any]] = nullcontext
    second_form: Callable[[], AbstractContextManager[Any]] | None = None
    from_pretrained: Callable[..., Any] = transformers.AutoModelForCausalLM.from_pretrained


@dataclass(frozen=True)
class Pair:
    """Two models with equal weights, in fp32; tests may only change their mode."""

    kind: ModelType
    hf: Any
    native: GPT
    hf_dir: Path
    """Folder that transformers wrote."""
    native_dir: Path
    """Checkpoint that :func:`import_hf` made of it."""

    def hf_in(self, dtype: torch.dtype) -> Any:
        """Return transformers' model in another dtype."""
        return self.hf if dtype == torch.float32 else self.kind.from_pretrained(self.hf_dir, dtype=dtype).eval()

    def native_in(self, dtype: torch.dtype) -> GPT:
        """Return toolkit's model in another dtype."""
        return self.native if dtype == torch.float32 else load_model(self.native_dir).to(dtype).eval()


def make_pair(name: str, seed: int, folder: Path) -> Pair:
    """Write a random model of a model type, with transformers, and import it."""
    kind = MODEL_TYPES[name]
    config = kind.make(Random(f"{name} {seed}"))
    assert config.model_type == name
    # toolkit's load-balancing loss is computed per row, transformers' over the batch
    config.router_aux_loss_coef = 0.0
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    randomize(model, seed)
    hf_dir, native_dir = folder / "hf", folder / "native"
    model.save_pretrained(hf_dir)
    import_hf(hf_dir, native_dir)
    return Pair(kind, model, load_model(native_dir).eval(), hf_dir, native_dir)


def decoder(r: Random) -> dict[str, Any]:
    """Return the keys that most decoders share, without RoPE."""
    n_head = r.choice([2, 4, 6])
    return {
        "hidden_size": 8 * r.randint(3, 8),
        "intermediate_size": 8 * r.randint(3, 10),
        "num_hidden_layers": r.randint(2, 4),
        "num_attention_heads": n_head,
        "num_key_value_heads": r.choice([n for n in (1, 2, 3, 4, 6) if n_head % n == 0]),
        "vocab_size": r.randint(TOKENS, 140),
        "max_position_embeddings": r.choice([64, 100]),
        "rms_norm_eps": r.choice([1e-6, 1e-5, 1e-3]),
        "tie_word_embeddings": r.random() < 0.3,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": None,
    }


def rope(r: Random, **options: Any) -> dict[str, Any]:
    """Return ``rope_parameters`` of any type, with further ``options``."""
    theta = r.choice([100.0, 500.0, 10000.0])
    kinds = [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": r.choice([2.0, 4.0])},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 32.0,
         "beta_slow": 1.0},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 32},
    ]  # fmt: skip
    return r.choice(kinds) | {"rope_theta": theta} | options


def experts(r: Random, n: str, k: str) -> dict[str, Any]:
    """Return the sizes of experts. ``n`` and ``k`` are the keys of their number, and of those per token."""
    count = r.choice([4, 6, 8])
    return {n: count, k: r.randint(1, count // 2), "moe_intermediate_size": 8 * r.randint(1, 5)}


def groups(r: Random, n_expert: int, k: int) -> dict[str, int]:
    """Return the groups of DeepSeek-V3's routing, each with two experts or more."""
    n = r.choice([n for n in (1, 2, 3, 4) if n_expert % n == 0 and n_expert // n >= 2])
    return {"n_group": n, "topk_group": r.choice([i for i in range(1, n + 1) if i * n_expert // n >= k])}


def qwen3_moe(r: Random) -> Any:
    return transformers.Qwen3MoeConfig(
        **decoder(r),
        **experts(r, "num_experts", "num_experts_per_tok"),
        head_dim=r.choice([8, 16, 24]),
        norm_topk_prob=r.random() < 0.5,
        mlp_only_layers=r.choice([[], [0], [1]]),
        rope_parameters=rope(r),
    )


def deepseek_experts(r: Random) -> dict[str, Any]:
    """Return the keys of DeepSeek-V3's experts."""
    sizes = experts(r, "n_routed_experts", "num_experts_per_tok")
    return {
        **sizes,
        **groups(r, sizes["n_routed_experts"], sizes["num_experts_per_tok"]),
        "n_shared_experts": r.randint(1, 2),
        "norm_topk_prob": r.random() < 0.5,
        "routed_scaling_factor": r.choice([1.0, 1.8, 2.5]),
    }


def latent_attention(r: Random) -> dict[str, Any]:
    """Return the keys of DeepSeek-V3's attention."""
    scaling = r.choice([{"rope_type": "default"}, {"rope_type": "yarn", "factor": 4.0,
        "original_max_position_embeddings": 16, "mscale": 1.0, "mscale_all_dim": r.choice([0.7, 1.0])}])  # fmt: skip
    return {
        **(sizes := decoder(r)),
        "num_key_value_heads": sizes["num_attention_heads"],
        "q_lora_rank": r.choice([None, 24]),
        "kv_lora_rank": r.choice([8, 16]),
        "qk_nope_head_dim": r.choice([8, 12]),
        "qk_rope_head_dim": r.choice([4, 8]),
        "v_head_dim": r.choice([8, 20]),
        "rope_parameters": scaling | {"rope_theta": 500.0},
    }


def deepseek_v3(r: Random) -> Any:
    return transformers.DeepseekV3Config(
        **latent_attention(r), **deepseek_experts(r), first_k_dense_replace=r.randint(0, 2)
    )


def glm4_moe(r: Random) -> Any:
    return transformers.Glm4MoeConfig(
        **decoder(r),
        **deepseek_experts(r),
        head_dim=r.choice([8, 16, 24]),
        attention_bias=r.random() < 0.5,
        use_qk_norm=r.random() < 0.5,
        first_k_dense_replace=r.randint(0, 2),
        rope_parameters=rope(r, partial_rotary_factor=r.choice([0.25, 0.5, 1.0])),
    )


def glm4_moe_lite(r: Random) -> Any:
    sizes = latent_attention(r)
    types = ["sparse", *(r.choice(["dense", "sparse"]) for _ in range(sizes["num_hidden_layers"] - 1))]
    r.shuffle(types)
    return transformers.Glm4MoeLiteConfig(**sizes, **deepseek_experts(r), mlp_layer_types=types)


# without it, transformers cannot compute shared keys and values without per-layer inputs
_WHOLE = {"output_hidden_states": True}


def gemma4_text(r: Random) -> Any:
    sizes, routed = decoder(r), experts(r, "num_experts", "top_k_experts") if r.random() < 0.5 else {}
    sizes["num_hidden_layers"] = n_layer = r.randint(4, 6)
    types = [r.choice(["sliding_attention", "full_attention"]) for _ in range(n_layer - 3)]
    types = ["full_attention", "sliding_attention", *types, "full_attention"]
    full = {"rope_type": "proportional", "partial_rotary_factor": r.choice([0.25, 0.5, 1.0]), "rope_theta": 500.0}
    sliding = {"rope_type": "default", "rope_theta": r.choice([100.0, 10000.0])}
    return transformers.Gemma4TextConfig(
        **sizes,
        **routed,
        layer_types=types,
        rope_parameters={"full_attention": full, "sliding_attention": sliding},
        sliding_window=r.choice([5, 16]),
        head_dim=r.choice([8, 12]),
        global_head_dim=r.choice([8, 16, 24]),
        attention_k_eq_v=r.random() < 0.5,
        num_global_key_value_heads=r.choice([None, 1, 2]),
        attention_bias=r.random() < 0.2,
        num_kv_shared_layers=r.choice([0, 1, n_layer - 2]),
        use_double_wide_mlp=r.random() < 0.5,
        hidden_size_per_layer_input=r.choice([0, 8, 16]),
        vocab_size_per_layer_input=sizes["vocab_size"] + r.choice([0, 8]),
        final_logit_softcapping=r.choice([None, 15.0]),
        use_bidirectional_attention=r.choice([None, "vision"]),
        enable_moe_block=bool(routed),
        **_WHOLE,
    )


def linear_attention(r: Random) -> dict[str, Any]:
    """Return the keys of a decoder whose layers have linear attention or attention, at least one each."""
    sizes, heads = decoder(r), r.choice([1, 2, 3])
    types = [r.choice(["linear_attention", "full_attention"]) for _ in range(sizes["num_hidden_layers"] - 2)]
    r.shuffle(types := ["linear_attention", "full_attention", *types])
    return {
        **sizes,
        "layer_types": types,
        "head_dim": r.choice([8, 16, 24]),
        "attention_bias": r.random() < 0.3,
        "linear_num_key_heads": heads,
        "linear_num_value_heads": heads * r.choice([1, 2, 3]),
        "linear_key_head_dim": r.choice([8, 12, 16]),
        "linear_value_head_dim": r.choice([8, 12, 24]),
        "linear_conv_kernel_dim": r.choice([2, 3, 4]),
    }


def qwen_experts(r: Random) -> dict[str, Any]:
    return experts(r, "num_experts", "num_experts_per_tok") | {
        "shared_expert_intermediate_size": 8 * r.randint(1, 5),
        "experts_implementation": "eager",
    }


def qwen3_next(r: Random) -> Any:
    return transformers.Qwen3NextConfig(
        **linear_attention(r),
        **qwen_experts(r),
        norm_topk_prob=r.random() < 0.5,
        decoder_sparse_step=r.choice([1, 1, 2]),
        mlp_only_layers=r.choice([[], [0]]),
        rope_parameters=rope(r, partial_rotary_factor=r.choice([0.25, 0.5, 1.0])),
    )


def mrope(r: Random) -> dict[str, Any]:
    sections = {"mrope_section": r.choice([[1, 1, 0], [2, 1, 1]]), "mrope_interleaved": True}
    return rope(r, partial_rotary_factor=r.choice([0.25, 0.5, 1.0]), **r.choice([sections, {}]))


def qwen3_5_text(r: Random) -> Any:
    return transformers.Qwen3_5TextConfig(**linear_attention(r), rope_parameters=mrope(r))


def qwen3_5_moe_text(r: Random) -> Any:
    return transformers.Qwen3_5MoeTextConfig(**linear_attention(r), **qwen_experts(r), rope_parameters=mrope(r))


class InFp64(TorchFunctionMode):
    """Replaces fp32, which transformers' classes and toolkit's norms and RoPE ask for, by fp64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args = [torch.float64 if arg is torch.float32 else arg for arg in args]
        kwargs = {name: torch.float64 if arg is torch.float32 else arg for name, arg in (kwargs or {}).items()}
        return (torch.Tensor.double if func is torch.Tensor.float else func)(*args, **kwargs)


def product_per_row(x: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    experts = torch.searchsorted(ends, torch.arange(len(x), dtype=ends.dtype), right=True)
    return torch.bmm(x.unsqueeze(1), weights.index_select(0, experts)).squeeze(1)


@contextmanager
def in_fp64() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch, InFp64():
        patch.setattr(moe, "grouped_product", product_per_row)  # torch has no grouped product in fp64
        yield


@contextmanager
def recurrent_delta_rule() -> Iterator[None]:
    """Let transformers compute the delta rule token by token instead of in chunks."""
    with pytest.MonkeyPatch.context() as patch:
        for kind in ("qwen3_next", "qwen3_5", "qwen3_5_moe"):
            module = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
            patch.setattr(module, "torch_chunk_gated_delta_rule", module.torch_recurrent_gated_delta_rule)
        yield


DELTA_NET = {
    "logits": 1e-10, "gradients": 1e-8, "dtype": torch.float64, "exactly": in_fp64,
    "second_form": recurrent_delta_rule,
    # has fp64
    "from_pretrained": partial(transformers.AutoModelForCausalLM.from_pretrained, experts_implementation="eager"),
}  # fmt: skip
MODEL_TYPES = {
    "deepseek_v3": ModelType(deepseek_v3, fast_seeds=()),
    "gemma4_text": ModelType(
        gemma4_text,
        curve_seeds=(0, 2),  # a change of 7's weights by 1e-7 moves transformers' losses by 3 %
        from_pretrained=partial(transformers.AutoModelForCausalLM.from_pretrained, **_WHOLE),
    ),
    "glm4_moe": ModelType(glm4_moe),
    "glm4_moe_lite": ModelType(glm4_moe_lite),
    "qwen3_5_moe_text": ModelType(qwen3_5_moe_text, **DELTA_NET),
    "qwen3_5_text": ModelType(qwen3_5_text, **DELTA_NET),
    "qwen3_moe": ModelType(qwen3_moe, fast_seeds=()),
    "qwen3_next": ModelType(
        qwen3_next,
        curve_seeds=(2, 5),  # a change of 0's weights by 1e-7 moves transformers' losses by 3 %
        **DELTA_NET,
    ),
}
