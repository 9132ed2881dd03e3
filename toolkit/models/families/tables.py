"""Tables of weight names that serve both directions: ours (LitGPT's) and Hugging Face's.

A family lists its weights as :class:`WeightMapping` entries. Each entry pairs native names with Hugging Face's and
holds the transforms from native tensors to Hugging Face's; each has its inverse, so that one entry reads and writes.
No torch at import: the command line reads the families' configurations only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from toolkit.models.config import ModelConfig

if TYPE_CHECKING:
    from torch import Tensor

Change = Callable[[list["Tensor"]], list["Tensor"]]


@dataclass(frozen=True)
class Transform:
    """A change of layout (ours -> theirs) and its inverse."""

    to_hf: Change
    from_hf: Change


@dataclass(frozen=True)
class WeightMapping:
    """Tensors that correspond: ``ours`` and ``theirs`` are names, in the order of the lists of tensors.

    Results may be views of their inputs or the inputs themselves.
    """

    native: tuple[str, ...]
    hf: tuple[str, ...]
    steps: tuple[Transform, ...] = ()

    def to_hf(self, tensors: list[Tensor]) -> list[Tensor]:
        """Our tensors, in the order of ``ours`` -> theirs, in the order of ``theirs``."""
        for step in self.steps:
            tensors = step.to_hf(tensors)
        return tensors

    def from_hf(self, tensors: list[Tensor]) -> list[Tensor]:
        """The inverse of :meth:`to_hf`."""
        for step in reversed(self.steps):
            tensors = step.from_hf(tensors)
        return tensors


def split_rows(*sizes: int) -> Transform:
    """One tensor, cut along its first axis into tensors of so many rows."""
    return Transform(lambda one: list(one[0].split(sizes)), _concat)


def _concat(parts: list[Tensor]) -> list[Tensor]:
    import torch

    return [torch.cat(parts)]


def transpose() -> Transform:
    """(..., out, in) to (..., in, out), each tensor: as GPT-2's Conv1D and gpt-oss's experts have their weights."""

    def swap(tensors: list[Tensor]) -> list[Tensor]:
        return [tensor.mT for tensor in tensors]

    return Transform(swap, swap)


def interleave() -> Transform:
    """Two tensors to one, along the last axis: an element of the one, then of the other, in turn (gpt-oss)."""

    def to_hf(two: list[Tensor]) -> list[Tensor]:
        import torch

        return [torch.stack(two, dim=-1).flatten(-2)]

    return Transform(to_hf, lambda one: [one[0][..., 0::2], one[0][..., 1::2]])


def join_rows(*sizes: int) -> Transform:
    """The inverse of :func:`split_rows`."""
    return Transform(_concat, lambda one: list(one[0].split(sizes)))


def interleave_groups(n_head: int, groups: int, head_size: int) -> Transform:
    """All queries, all keys, all values -> the queries, the key and the value of group 0, of group 1, ...

    With as many groups as heads, the query, key and value of each head (GPT-NeoX); Falcon has any number.
    """
    queries = n_head // groups

    def to_hf(one: list[Tensor]) -> list[Tensor]:
        import torch

        parts = one[0].split([size * head_size for size in (n_head, groups, groups)])
        heads = [part.reshape(groups, -1, *part.shape[1:]) for part in parts]
        return [torch.cat(heads, dim=1).reshape(one[0].shape)]

    def from_hf(one: list[Tensor]) -> list[Tensor]:
        heads = one[0].reshape(groups, (queries + 2) * head_size, *one[0].shape[1:])
        parts = heads.split([size * head_size for size in (queries, 1, 1)], dim=1)
        return _concat([part.reshape(-1, *one[0].shape[1:]) for part in parts])

    return Transform(to_hf, from_hf)


def interleave_heads(n_head: int, *widths: int) -> Transform:
    """All heads of one part, all heads of the next -> head 0's parts, head 1's, ...; the widths are the parts'."""

    def to_hf(one: list[Tensor]) -> list[Tensor]:
        import torch

        parts = one[0].split([n_head * width for width in widths])
        return [torch.cat([part.unflatten(0, (n_head, -1)) for part in parts], dim=1).flatten(0, 1)]

    def from_hf(one: list[Tensor]) -> list[Tensor]:
        parts = one[0].unflatten(0, (n_head, sum(widths))).split(widths, dim=1)
        return _concat([part.flatten(0, 1) for part in parts])

    return Transform(to_hf, from_hf)


def interleave_pairs(n_head: int, before: int, rotated: int) -> Transform:
    """The last ``rotated`` rows of each head, after ``before`` others, from halves to pairs (DeepSeek).

    Here row i is rotated together with row i + rotated / 2, there every second row with the next.
    """

    def change(one: list[Tensor], *shape: int) -> list[Tensor]:
        import torch

        plain, turned = one[0].unflatten(0, (n_head, before + rotated)).split((before, rotated), dim=1)
        turned = turned.unflatten(1, shape).transpose(1, 2).flatten(1, 2)
        return [torch.cat([plain, turned], dim=1).flatten(0, 1)]

    return Transform(lambda one: change(one, 2, rotated // 2), lambda one: change(one, rotated // 2, 2))


def stack_experts() -> Transform:
    """One tensor with a leading axis of experts -> one tensor per expert."""

    def from_hf(experts: list[Tensor]) -> list[Tensor]:
        import torch

        return [torch.stack(experts)]

    return Transform(lambda one: list(one[0].unbind()), from_hf)


def experts(config: ModelConfig, native: str, hf: str, projections: dict[str, str]) -> list[WeightMapping]:
    """The experts of one layer: our stacked tensors, and one tensor for each expert there.

    Args:
        config: The architecture.
        ours: Our name of the experts together.
        theirs: Their name of them.
        projections: Our name of a projection: theirs.
    """
    return [
        WeightMapping((f"{native}.{mine}.weight",), tuple(f"{hf}.{e}.{their}.weight" for e in range(config.n_expert)),
            (stack_experts(),))
        for mine, their in projections.items()
    ]  # fmt: skip


def one_to_one(native: str, hf: str, *steps: Transform) -> WeightMapping:
    """One tensor on either side."""
    return WeightMapping((native,), (hf,), steps)


def linear(native: str, hf: str, bias: bool, *weight_steps: Transform) -> list[WeightMapping]:
    """The weight of a linear layer or a norm, and its bias where it has one."""
    maps = [one_to_one(f"{native}.weight", f"{hf}.weight", *weight_steps)]
    return [*maps, one_to_one(f"{native}.bias", f"{hf}.bias")] if bias else maps


def embedding_and_head(config: ModelConfig, embedding: str, head: str) -> list[WeightMapping]:
    """The tensor of a tied head is listed once, under the embedding's names."""
    maps = [one_to_one("transformer.wte.weight", embedding)]
    return maps if config.tie_embeddings else [*maps, one_to_one("lm_head.weight", f"{head}.weight")]


# Of a mixture of experts: our names of a layer's parts under ``mlp``, and theirs.
GATED = {"fc_1": "gate_proj", "fc_2": "up_proj", "proj": "down_proj"}


def qwen_experts(config: ModelConfig, native: str, hf: str) -> list[WeightMapping]:
    """The layer ``theirs`` with experts, under the names that most models have, and with or without a shared expert."""
    maps = linear(f"{native}.mlp.gate", f"{hf}.mlp.gate", False)
    maps += experts(config, f"{native}.mlp.experts", f"{hf}.mlp.experts", GATED)
    if config.shared_expert_intermediate_size is not None:
        for mine, their in GATED.items():
            maps += linear(f"{native}.mlp.shared_expert.{mine}", f"{hf}.mlp.shared_expert.{their}", False)
        maps += linear(f"{native}.mlp.shared_expert_gate", f"{hf}.mlp.shared_expert_gate", False)
    return maps


def _attention(config: ModelConfig, native: str, hf: str, norm_bias: bool, fused: bool) -> list[WeightMapping]:
    q, kv = config.n_head * config.head_size, config.n_query_groups * config.head_size
    maps: list[WeightMapping] = []
    for kind in ("weight", "bias") if config.bias or config.attn_bias else ("weight",):
        if fused:
            maps.append(one_to_one(f"{native}.attn.qkv.{kind}", f"{hf}.self_attn.qkv_proj.{kind}"))
        else:
            projections = tuple(f"{hf}.self_attn.{p}_proj.{kind}" for p in "qkv")
            maps.append(WeightMapping((f"{native}.attn.qkv.{kind}",), projections, (split_rows(q, kv, kv),)))
    if config.norm_qk:
        for p, heads in (("q", config.n_head), ("k", config.n_query_groups)):
            mine, their = f"{native}.attn.norm_{p}", f"{hf}.self_attn.{p}_norm"
            if config.norm_qk_type == "per_head":  # StableLM
                names = tuple(f"{hf}.self_attn.{p}_layernorm.norms.{i}.weight" for i in range(heads))
                maps.append(WeightMapping((f"{mine}.weight",), names, (split_rows(*[config.head_size] * heads),)))
            else:
                maps += linear(mine, their, norm_bias)
    maps += linear(f"{native}.attn.proj", f"{hf}.self_attn.o_proj", config.bias)
    return maps


def decoder_weights(
    config: ModelConfig,
    *,
    fused: bool = False,
    moe: Callable[[ModelConfig, str, str], list[WeightMapping]] = qwen_experts,
    attention: Callable[[ModelConfig, str, str], list[WeightMapping]] | None = None,
) -> list[WeightMapping]:
    """The table of a model with Llama's names: what has the parts of a Llama and more, or less.

    Args:
        config: The architecture.
        moe: The entries of a layer with experts, from the config and the layer's name here and there.
        attention: The entries of a layer's projections, likewise; those of queries, keys, values and output if not
            given.
        fused: Queries, keys and values are one tensor there as here, and gate and up projection are one (Phi-3).
    """
    norm_bias = config.norm_class_name == "LayerNorm"
    maps = embedding_and_head(config, "model.embed_tokens.weight", "lm_head")
    for i in range(config.n_layer):
        native, hf = f"transformer.h.{i}", f"model.layers.{i}"
        norms = {"norm_1": "input_layernorm", "norm_2": "post_attention_layernorm"}
        if config.post_attention_norm:
            norms |= {"post_attention_norm": "post_attention_layernorm", "norm_2": "pre_feedforward_layernorm"}
        if config.post_mlp_norm:
            norms["post_mlp_norm"] = "post_feedforward_layernorm"
        has = {"norm_1": config.norm_1, "norm_2": config.norm_2 and not config.shared_attention_norm}
        for name, their_name in norms.items():
            if has.get(name, True) and config.norm_affine:
                maps += linear(f"{native}.{name}", f"{hf}.{their_name}", norm_bias)
        maps += attention(config, native, hf) if attention else _attention(config, native, hf, norm_bias, fused)
        if config.has_experts(i):
            maps += moe(config, native, hf)
            continue
        if fused:
            gate_up = f"{native}.mlp.fc_1.weight", f"{native}.mlp.fc_2.weight"
            step = join_rows(config.intermediate_size, config.intermediate_size)
            maps.append(WeightMapping(gate_up, (f"{hf}.mlp.gate_up_proj.weight",), (step,)))
        else:
            maps += linear(f"{native}.mlp.fc_1", f"{hf}.mlp.gate_proj", config.bias)
            maps += linear(f"{native}.mlp.fc_2", f"{hf}.mlp.up_proj", config.bias)
        maps += linear(f"{native}.mlp.proj", f"{hf}.mlp.down_proj", config.bias)
    return maps + (linear("transformer.ln_f", "model.norm", norm_bias) if config.norm_affine else [])
