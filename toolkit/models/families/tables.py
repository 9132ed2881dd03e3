"""Tables of weight names that serve both directions: ours (LitGPT's) and Hugging Face's.

A family lists its weights as :class:`Map` entries. Each entry pairs some names of ours with some of theirs and holds
the steps that turn our tensors into theirs; every step knows its inverse, so the same entry reads and writes.
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
class Step:
    """A change of layout (ours -> theirs) and its inverse."""

    to_hf: Change
    from_hf: Change


@dataclass(frozen=True)
class Map:
    """Tensors that correspond: ``ours`` and ``theirs`` are names, in the order of the lists of tensors.

    Results may be views of their inputs or the inputs themselves.
    """

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    steps: tuple[Step, ...] = ()

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


def split_rows(*sizes: int) -> Step:
    """One tensor, cut along its first axis into tensors of so many rows."""
    return Step(lambda one: list(one[0].split(sizes)), _concat)


def _concat(parts: list[Tensor]) -> list[Tensor]:
    import torch

    return [torch.cat(parts)]


def transpose() -> Step:
    """(..., out, in) to (..., in, out), each tensor: as GPT-2's Conv1D and gpt-oss's experts have their weights."""

    def swap(tensors: list[Tensor]) -> list[Tensor]:
        return [tensor.mT for tensor in tensors]

    return Step(swap, swap)


def interleave() -> Step:
    """Two tensors to one, along the last axis: an element of the one, then of the other, in turn (gpt-oss)."""

    def to_hf(two: list[Tensor]) -> list[Tensor]:
        import torch

        return [torch.stack(two, dim=-1).flatten(-2)]

    return Step(to_hf, lambda one: [one[0][..., 0::2], one[0][..., 1::2]])


def join_rows(*sizes: int) -> Step:
    """The inverse of :func:`split_rows`."""
    return Step(_concat, lambda one: list(one[0].split(sizes)))


def interleave_groups(n_head: int, groups: int, head_size: int) -> Step:
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

    return Step(to_hf, from_hf)


def interleave_heads(n_head: int, *widths: int) -> Step:
    """All heads of one part, all heads of the next -> head 0's parts, head 1's, ...; the widths are the parts'."""

    def to_hf(one: list[Tensor]) -> list[Tensor]:
        import torch

        parts = one[0].split([n_head * width for width in widths])
        return [torch.cat([part.unflatten(0, (n_head, -1)) for part in parts], dim=1).flatten(0, 1)]

    def from_hf(one: list[Tensor]) -> list[Tensor]:
        parts = one[0].unflatten(0, (n_head, sum(widths))).split(widths, dim=1)
        return _concat([part.flatten(0, 1) for part in parts])

    return Step(to_hf, from_hf)


def interleave_pairs(n_head: int, before: int, rotated: int) -> Step:
    """The last ``rotated`` rows of each head, after ``before`` others, from halves to pairs (DeepSeek).

    Here row i is rotated together with row i + rotated / 2, there every second row with the next.
    """

    def change(one: list[Tensor], *shape: int) -> list[Tensor]:
        import torch

        plain, turned = one[0].unflatten(0, (n_head, before + rotated)).split((before, rotated), dim=1)
        turned = turned.unflatten(1, shape).transpose(1, 2).flatten(1, 2)
        return [torch.cat([plain, turned], dim=1).flatten(0, 1)]

    return Step(lambda one: change(one, 2, rotated // 2), lambda one: change(one, rotated // 2, 2))


def stack_experts() -> Step:
    """One tensor with a leading axis of experts -> one tensor per expert."""

    def from_hf(experts: list[Tensor]) -> list[Tensor]:
        import torch

        return [torch.stack(experts)]

    return Step(lambda one: list(one[0].unbind()), from_hf)


def experts(config: ModelConfig, ours: str, theirs: str, projections: dict[str, str]) -> list[Map]:
    """The experts of one layer: our stacked tensors, and one tensor for each expert there.

    Args:
        config: The architecture.
        ours: Our name of the experts together.
        theirs: Their name of them.
        projections: Our name of a projection: theirs.
    """
    return [
        Map((f"{ours}.{mine}.weight",), tuple(f"{theirs}.{e}.{their}.weight" for e in range(config.n_expert)),
            (stack_experts(),))
        for mine, their in projections.items()
    ]  # fmt: skip


def same(ours: str, theirs: str, *steps: Step) -> Map:
    """One tensor on either side."""
    return Map((ours,), (theirs,), steps)


def linear(ours: str, theirs: str, bias: bool, *weight_steps: Step) -> list[Map]:
    """The weight of a linear layer or a norm, and its bias where it has one."""
    maps = [same(f"{ours}.weight", f"{theirs}.weight", *weight_steps)]
    return [*maps, same(f"{ours}.bias", f"{theirs}.bias")] if bias else maps


def embedding_and_head(config: ModelConfig, embedding: str, head: str) -> list[Map]:
    """The tensor of a tied head is listed once, under the embedding's names."""
    maps = [same("transformer.wte.weight", embedding)]
    return maps if config.tie_embeddings else [*maps, same("lm_head.weight", f"{head}.weight")]


# Of a mixture of experts: our names of a layer's parts under ``mlp``, and theirs.
GATED = {"fc_1": "gate_proj", "fc_2": "up_proj", "proj": "down_proj"}


def qwen_experts(config: ModelConfig, ours: str, theirs: str) -> list[Map]:
    """The layer ``theirs`` with experts, under the names that most models have, and with or without a shared expert."""
    maps = linear(f"{ours}.mlp.gate", f"{theirs}.mlp.gate", False)
    maps += experts(config, f"{ours}.mlp.experts", f"{theirs}.mlp.experts", GATED)
    if config.shared_expert_intermediate_size is not None:
        for mine, their in GATED.items():
            maps += linear(f"{ours}.mlp.shared_expert.{mine}", f"{theirs}.mlp.shared_expert.{their}", False)
        maps += linear(f"{ours}.mlp.shared_expert_gate", f"{theirs}.mlp.shared_expert_gate", False)
    return maps


def _attention(config: ModelConfig, ours: str, theirs: str, norm_bias: bool, fused: bool) -> list[Map]:
    q, kv = config.n_head * config.head_size, config.n_query_groups * config.head_size
    maps: list[Map] = []
    for kind in ("weight", "bias") if config.bias or config.attn_bias else ("weight",):
        if fused:
            maps.append(same(f"{ours}.attn.qkv.{kind}", f"{theirs}.self_attn.qkv_proj.{kind}"))
        else:
            projections = tuple(f"{theirs}.self_attn.{p}_proj.{kind}" for p in "qkv")
            maps.append(Map((f"{ours}.attn.qkv.{kind}",), projections, (split_rows(q, kv, kv),)))
    if config.norm_qk:
        for p, heads in (("q", config.n_head), ("k", config.n_query_groups)):
            mine, their = f"{ours}.attn.norm_{p}", f"{theirs}.self_attn.{p}_norm"
            if config.norm_qk_type == "per_head":  # StableLM
                names = tuple(f"{theirs}.self_attn.{p}_layernorm.norms.{i}.weight" for i in range(heads))
                maps.append(Map((f"{mine}.weight",), names, (split_rows(*[config.head_size] * heads),)))
            else:
                maps += linear(mine, their, norm_bias)
    maps += linear(f"{ours}.attn.proj", f"{theirs}.self_attn.o_proj", config.bias)
    return maps


def decoder_weights(
    config: ModelConfig,
    *,
    fused: bool = False,
    moe: Callable[[ModelConfig, str, str], list[Map]] = qwen_experts,
    attention: Callable[[ModelConfig, str, str], list[Map]] | None = None,
) -> list[Map]:
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
        ours, theirs = f"transformer.h.{i}", f"model.layers.{i}"
        norms = {"norm_1": "input_layernorm", "norm_2": "post_attention_layernorm"}
        if config.post_attention_norm:
            norms |= {"post_attention_norm": "post_attention_layernorm", "norm_2": "pre_feedforward_layernorm"}
        if config.post_mlp_norm:
            norms["post_mlp_norm"] = "post_feedforward_layernorm"
        has = {"norm_1": config.norm_1, "norm_2": config.norm_2 and not config.shared_attention_norm}
        for name, their_name in norms.items():
            if has.get(name, True) and config.norm_affine:
                maps += linear(f"{ours}.{name}", f"{theirs}.{their_name}", norm_bias)
        maps += attention(config, ours, theirs) if attention else _attention(config, ours, theirs, norm_bias, fused)
        if config.has_experts(i):
            maps += moe(config, ours, theirs)
            continue
        if fused:
            gate_up = f"{ours}.mlp.fc_1.weight", f"{ours}.mlp.fc_2.weight"
            step = join_rows(config.intermediate_size, config.intermediate_size)
            maps.append(Map(gate_up, (f"{theirs}.mlp.gate_up_proj.weight",), (step,)))
        else:
            maps += linear(f"{ours}.mlp.fc_1", f"{theirs}.mlp.gate_proj", config.bias)
            maps += linear(f"{ours}.mlp.fc_2", f"{theirs}.mlp.up_proj", config.bias)
        maps += linear(f"{ours}.mlp.proj", f"{theirs}.mlp.down_proj", config.bias)
    return maps + (linear("transformer.ln_f", "model.norm", norm_bias) if config.norm_affine else [])
