"""Weight maps for import and export: native (LitGPT) and Hugging Face names.

A family lists its weights as :class:`WeightMapping` entries. Each entry pairs native and Hugging Face names and lists
the transforms from native to Hugging Face tensors. Transforms are invertible, so one entry serves both import and
export. Importing this module does not import torch, because the command line only needs configurations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from toolkit.models.config import ModelConfig

if TYPE_CHECKING:
    from torch import Tensor

TensorTransform = Callable[[list["Tensor"]], list["Tensor"]]


@dataclass(frozen=True)
class Transform:
    """A layout transform from native to Hugging Face tensors, and its inverse."""

    to_hf: TensorTransform
    from_hf: TensorTransform


@dataclass(frozen=True)
class WeightMapping:
    """Maps native to Hugging Face tensors. Names are in the order of the tensor lists.

    Outputs may alias the inputs.
    """

    native: tuple[str, ...]
    hf: tuple[str, ...]
    transforms: tuple[Transform, ...] = ()

    def to_hf(self, tensors: list[Tensor]) -> list[Tensor]:
        """Convert tensors from native layout (in ``native`` order) to Hugging Face layout (in ``hf`` order)."""
        for transform in self.transforms:
            tensors = transform.to_hf(tensors)
        return tensors

    def from_hf(self, tensors: list[Tensor]) -> list[Tensor]:
        """Convert tensors from Hugging Face to native layout, the inverse of :meth:`to_hf`."""
        for transform in reversed(self.transforms):
            tensors = transform.from_hf(tensors)
        return tensors


WeightMap = list[WeightMapping]
PartMap = Callable[[ModelConfig, str, str], WeightMap]
"""Maps a part of a block by its native and its Hugging Face prefix."""


def split_rows(*sizes: int) -> Transform:
    """Split a tensor along its first axis into tensors with ``sizes`` rows."""
    return Transform(lambda tensors: list(tensors[0].split(sizes)), _concat)


def _concat(parts: list[Tensor], dim: int = 0) -> list[Tensor]:
    import torch

    return [torch.cat(parts, dim)]


def unsqueeze() -> Transform:
    """Add a first axis of size 1 (ERNIE 4.5)."""
    return Transform(lambda tensors: [t.unsqueeze(0) for t in tensors], lambda tensors: [t.squeeze(0) for t in tensors])


def transpose() -> Transform:
    """Transpose each tensor from (..., out, in) to (..., in, out), as in GPT-2's Conv1D and gpt-oss's experts."""

    def swap(tensors: list[Tensor]) -> list[Tensor]:
        return [tensor.mT if tensor.ndim > 1 else tensor for tensor in tensors]  # not a bias

    return Transform(swap, swap)


def interleave() -> Transform:
    """Interleave two tensors elementwise along the last axis (gpt-oss)."""

    def to_hf(tensors: list[Tensor]) -> list[Tensor]:
        import torch

        return [torch.stack(tensors, dim=-1).flatten(-2)]

    return Transform(to_hf, lambda tensors: [tensors[0][..., 0::2], tensors[0][..., 1::2]])


def join_rows(*sizes: int) -> Transform:
    """Concatenate matrices, or stacks of matrices, with ``sizes`` rows."""
    return Transform(lambda tensors: _concat(tensors, -2), lambda tensors: list(tensors[0].split(sizes, -2)))


def interleave_groups(n_head: int, groups: int, head_size: int) -> Transform:
    """Reorder QKV rows from all queries, all keys, all values to queries, key and value per group.

    GPT-NeoX has as many groups as heads; Falcon has any number.
    """
    return interleave_heads(groups, n_head // groups * head_size, head_size, head_size)


def interleave_heads(n_head: int, *widths: int) -> Transform:
    """Reorder rows from part-major to head-major. ``widths`` are the rows per head of each part."""

    def to_hf(tensors: list[Tensor]) -> list[Tensor]:
        import torch

        parts = tensors[0].split([n_head * width for width in widths])
        return [torch.cat([part.unflatten(0, (n_head, -1)) for part in parts], dim=1).flatten(0, 1)]

    def from_hf(tensors: list[Tensor]) -> list[Tensor]:
        parts = tensors[0].unflatten(0, (n_head, sum(widths))).split(widths, dim=1)
        return _concat([part.flatten(0, 1) for part in parts])

    return Transform(to_hf, from_hf)


def join_gates(n_head: int) -> Transform:
    """Join the first two tensors, the rows of gates and queries, into each head's queries and gates (Qwen3-Next)."""

    def to_hf(tensors: list[Tensor]) -> list[Tensor]:
        gates, queries = (tensor.unflatten(0, (n_head, -1)) for tensor in tensors[:2])
        return [_concat([queries, gates], 1)[0].flatten(0, 1), *tensors[2:]]

    def from_hf(tensors: list[Tensor]) -> list[Tensor]:
        queries, gates = tensors[0].unflatten(0, (n_head, 2, -1)).unbind(1)
        return [gates.flatten(0, 1), queries.flatten(0, 1), *tensors[1:]]

    return Transform(to_hf, from_hf)


def interleave_pairs(n_head: int, before: int, rotated: int, after: int = 0) -> Transform:
    """Reorder each head's rotated rows from half-split to adjacent pairs (DeepSeek).

    A head has ``before`` other rows, then ``rotated`` rows, then ``after`` other rows. The native layout rotates row i
    with row i + rotated / 2; Hugging Face's layout rotates adjacent rows. Rows after the last head do not change.
    """
    sizes = (before, rotated, after)

    def change(tensors: list[Tensor], *shape: int) -> list[Tensor]:
        import torch

        heads, rest = tensors[0].tensor_split([n_head * sum(sizes)])
        first, rope, last = heads.unflatten(0, (n_head, sum(sizes))).split(sizes, dim=1)
        rope = rope.unflatten(1, shape).transpose(1, 2).flatten(1, 2)
        return [torch.cat([torch.cat([first, rope, last], dim=1).flatten(0, 1), rest])]

    return Transform(lambda tensors: change(tensors, 2, rotated // 2), lambda tensors: change(tensors, rotated // 2, 2))


def stack_experts() -> Transform:
    """Unstack a tensor with a leading expert axis into one tensor per expert."""

    def from_hf(experts: list[Tensor]) -> list[Tensor]:
        import torch

        return [torch.stack(experts)]

    return Transform(lambda tensors: list(tensors[0].unbind()), from_hf)


def one_to_one(native: str, hf: str, *transforms: Transform) -> WeightMapping:
    """Map one native tensor to one Hugging Face tensor."""
    return WeightMapping((native,), (hf,), transforms)


def linear(native: str, hf: str, bias: bool, *transforms: Transform) -> WeightMap:
    """Map the weight and optional bias of a linear layer or norm."""
    kinds = ("weight", "bias") if bias else ("weight",)
    return [one_to_one(f"{native}.{kind}", f"{hf}.{kind}", *transforms) for kind in kinds]


def layers(
    config: ModelConfig, native: str, hf: str, names: dict[str, str], transforms: dict[str, Transform] | None = None
) -> WeightMap:
    """Map linear layers and norms below two prefixes, with the biases of the config.

    ``names`` are the Hugging Face names and ``transforms`` the transforms, by native name.
    """
    maps = []
    for name, hf_name in names.items():
        bias = _has_norm_bias(config) if "norm" in name else config.bias
        transform = (transforms or {}).get(name)
        maps += linear(f"{native}.{name}", f"{hf}.{hf_name}", bias, *([] if transform is None else [transform]))
    return maps


def embedding_and_head(config: ModelConfig, embedding: str, head: str) -> WeightMap:
    """Map embedding and LM head. Tied weights are mapped once, under the embedding's names."""
    maps = [one_to_one("transformer.wte.weight", embedding)]
    return maps if config.tie_embeddings else maps + linear("lm_head", head, config.lm_head_bias)


# Native and Hugging Face names of the projections of a gated MLP.
GATED = {"fc_1": "gate_proj", "fc_2": "up_proj", "proj": "down_proj"}


def experts(
    config: ModelConfig,
    native: str,
    hf: str,
    *,
    layer: str = "mlp",
    names: dict[str, str] = GATED,
    shared: str = "shared_expert",
    correction: str = "",
    correction_transforms: tuple[Transform, ...] = (),
) -> WeightMap:
    """Map an MoE layer. Native experts are stacked; Hugging Face has tensors for each.

    Args:
        config: The architecture.
        native, hf: Name prefixes of the block.
        layer: Hugging Face's name of the layer.
        names: Hugging Face's names of an expert's projections, by native name.
        shared: Hugging Face's name of the shared expert.
        correction: Hugging Face's name of the router's correction bias, if it has one.
        correction_transforms: Transforms of the correction bias.
    """
    native, hf = f"{native}.mlp", f"{hf}.{layer}"
    maps = linear(f"{native}.gate", f"{hf}.gate", False)
    if config.router_scores != "softmax":
        maps.append(one_to_one(f"{native}.correction", f"{hf}.{correction}", *correction_transforms))
    for name, hf_name in names.items():
        each = tuple(f"{hf}.experts.{e}.{hf_name}.weight" for e in range(config.n_expert))
        maps.append(WeightMapping((f"{native}.experts.{name}.weight",), each, (stack_experts(),)))
    if config.shared_expert_intermediate_size is not None:
        maps += layers(config, f"{native}.shared_expert", f"{hf}.{shared}", GATED)
        if config.shared_expert_gate:
            maps += linear(f"{native}.shared_expert_gate", f"{hf}.shared_expert_gate", False)
    return maps


def queries_keys_values(config: ModelConfig, native: str, hf: str, rope_pairs: bool = False) -> WeightMap:
    """Map a layer's fused QKV projection to separate projections with the most common names.

    ``rope_pairs``: see :func:`decoder_weights`.
    """
    q, kv = config.n_head * config.head_size, config.n_query_groups * config.head_size
    rotated, heads = config.rope_n_elem, config.n_head + config.n_query_groups
    pairs = (interleave_pairs(heads, 0, rotated, config.head_size - rotated),) if rope_pairs else ()
    split = (split_rows(q, q, kv, kv), join_gates(config.n_head)) if config.attention_gate else (split_rows(q, kv, kv),)
    return [
        WeightMapping(
            (f"{native}.attn.qkv.{kind}",),
            tuple(f"{hf}.self_attn.{p}_proj.{kind}" for p in "qkv"),
            (*pairs, *split),
        )
        for kind in (("weight", "bias") if config.bias or config.attn_bias else ("weight",))
    ]


def _attention(
    config: ModelConfig, native: str, hf: str, names: dict[str, str], fused: bool, rope_pairs: bool
) -> WeightMap:
    if fused:
        maps = linear(f"{native}.attn.qkv", f"{hf}.self_attn.qkv_proj", config.bias or config.attn_bias)
    else:
        maps = queries_keys_values(config, native, hf, rope_pairs)
    if config.norm_qk:
        for p, heads in (("q", config.n_head), ("k", config.n_query_groups)):
            native_part, hf_part = f"{native}.attn.norm_{p}", f"{hf}.self_attn.{names[f'norm_{p}']}"
            if config.norm_qk_type == "per_head":  # StableLM
                each = tuple(f"{hf}.self_attn.{p}_layernorm.norms.{i}.weight" for i in range(heads))
                maps.append(WeightMapping((f"{native_part}.weight",), each, (split_rows(*[config.head_size] * heads),)))
            else:
                maps += linear(native_part, hf_part, _has_norm_bias(config))
    output = f"{hf}.self_attn.{names['proj']}"
    return maps + linear(f"{native}.attn.proj", output, config.bias or config.attn_proj_bias)


def _has_norm_bias(config: ModelConfig) -> bool:
    return config.norm_class_name == "LayerNorm" and config.norm_bias


def dense_mlp(config: ModelConfig, native: str, hf: str, names: dict[str, str] = GATED) -> WeightMap:
    """Map a dense MLP. ``names`` are Hugging Face's names of its projections, by native name."""
    return layers(config, f"{native}.mlp", f"{hf}.mlp", names)


def fused_mlp(config: ModelConfig, native: str, hf: str) -> WeightMap:
    """Map a gated MLP to one whose gate and up projections are fused (Phi-3, GLM-4). Without biases."""
    return fused_gate_up(config, f"{native}.mlp", f"{hf}.mlp.gate_up_proj", f"{hf}.mlp.down_proj")


def fused_gate_up(config: ModelConfig, native: str, gate_up: str, down: str) -> WeightMap:
    """Map the weights of an MLP, or of stacked experts, to a fused gate and up projection and a down projection."""
    names, join = (f"{native}.fc_1.weight", f"{native}.fc_2.weight"), join_rows(*[config.expert_size] * 2)
    return [WeightMapping(names, (f"{gate_up}.weight",), (join,)), *linear(f"{native}.proj", down, False)]


def decoder_weights(
    config: ModelConfig,
    *,
    fused: bool = False,
    rope_pairs: bool = False,
    names: dict[str, str] | None = None,
    mlp: PartMap = dense_mlp,
    moe: PartMap = experts,
    attention: PartMap | None = None,
    linear_attention: PartMap | None = None,
) -> WeightMap:
    """Return the weight map of a model with Llama's weight names. Parts may be missing or added.

    Args:
        config: The architecture.
        moe: Function that maps an MoE layer, given the config and the layer's native and Hugging Face prefixes.
        mlp: Same, for a dense MLP. Default: gate, up and down projections.
        attention: Same, for attention. Default: query, key, value and output projections.
        linear_attention: Same, for linear attention.
        fused: Hugging Face also fuses the QKV projections (Phi-3).
        rope_pairs: Hugging Face rotates adjacent rows of queries and keys (GLM-4), see :func:`interleave_pairs`.
        names: Hugging Face's names of norms and of attention's output projection that differ, by native name.
    """
    norm_bias = _has_norm_bias(config)
    before_mlp = "pre_feedforward_layernorm" if config.post_attention_norm else "post_attention_layernorm"
    defaults = {"norm_1": "input_layernorm", "norm_2": before_mlp, "norm_q": "q_norm", "norm_k": "k_norm"}
    defaults |= {"post_attention_norm": "post_attention_layernorm", "post_mlp_norm": "post_feedforward_layernorm"}
    names = defaults | {"proj": "o_proj", "ln_f": "norm"} | (names or {})
    has_norm = {
        "norm_1": config.norm_1, "norm_2": config.norm_2 and not config.shared_attention_norm,
        "post_attention_norm": config.post_attention_norm, "post_mlp_norm": config.post_mlp_norm,
    }  # fmt: skip
    maps = embedding_and_head(config, "model.embed_tokens.weight", "lm_head")
    for i in range(config.n_layer):
        native, hf = f"transformer.h.{i}", f"model.layers.{i}"
        for name, is_present in has_norm.items():
            if is_present and config.norm_affine:
                maps += linear(f"{native}.{name}", f"{hf}.{names[name]}", norm_bias)
        if linear_attention is not None and config.has_linear_attention(i):
            maps += linear_attention(config, native, hf)
        elif attention is not None:
            maps += attention(config, native, hf)
        else:
            maps += _attention(config, native, hf, names, fused, rope_pairs)
        maps += (moe if config.has_experts(i) else mlp)(config, native, hf)
    return maps + (linear("transformer.ln_f", f"model.{names['ln_f']}", norm_bias) if config.norm_affine else [])
