"""Count parameters and FLOPs of a training step, by a stated formula (N8 honest-throughput)."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from toolkit.models.config import ModelConfig
from toolkit.models.head import Score
from toolkit.models.lora_config import TRAINED_SCORE, is_adapter


@dataclass(frozen=True)
class Parameters:
    """Parameter counts.

    Args:
        total: All parameters, including adapters; tied parameters count once.
        trained: Trainable parameters.
        matmul: Parameters used in a matmul for every token, see :func:`matmul_parameters`.
    """

    total: int
    trained: int
    matmul: int


def count_parameters(model: nn.Module) -> Parameters:
    sizes = [(p.numel(), p.requires_grad) for p in model.parameters()]
    trained = sum(size for size, is_trained in sizes if is_trained)
    return Parameters(sum(size for size, _ in sizes), trained, matmul_parameters(model))


def matmul_parameters(model: nn.Module) -> int:
    """Count the weights used in a matmul for every token: linear layers, including the head.

    A tied head counts once; an untied embedding does not count. Of experts, only the active ones per token count.
    """
    return sum(size for size, _ in _matmul_sizes(model))


def _matmul_sizes(model: nn.Module) -> Iterator[tuple[int, bool]]:
    """Return for each weight the elements used per token, and whether it is trainable."""
    for module in model.modules():
        if isinstance(module, nn.Linear) and not isinstance(module, Score):  # read once per text
            yield module.weight.numel(), module.weight.requires_grad
        elif active := getattr(module, "active_experts", None):
            stacks = (p for p in module.parameters() if p.ndim == 3)  # weights and adapters
            yield from ((p.numel() * active // p.size(0), p.requires_grad) for p in stacks)
    yield from (
        (p.numel(), p.requires_grad)
        for name, p in model.named_parameters()
        if is_adapter(name) and p.ndim == 2 and name != TRAINED_SCORE
    )


def flops_per_token(
    model: nn.Module, config: ModelConfig, seq_length: float, *, causal: bool = False, forward_only: bool = False
) -> float:
    """Return FLOPs per token: 6 x matmul parameters + 12 x layers x d x T (PaLM, arXiv 2204.02311, appendix B).

    This counts the forward and backward pass. ``d`` is heads x head size and T the sequence length; if the widths of
    values and keys differ, d is their mean. Each layer counts with its d. Frozen parameters count 4 times instead of 6,
    because they have no gradient. Linear attention counts 18 x value heads x key size x value size per layer instead: a
    token reads the value of its key from the state, writes a value, and reads the value of its query. ``causal`` halves
    the attention term, as in a causal kernel. Recomputation does not count. ``forward_only`` counts a forward pass: a
    third, or half of frozen parameters.
    """
    attention = recurrence = 0.0
    for i in range(config.n_layer):
        layer = config.layer(i)
        if layer.linear_attention is not None and layer.has_linear_attention(i):
            sizes = layer.linear_attention
            recurrence += 18 * sizes["n_value_heads"] * sizes["key_size"] * sizes["value_size"]
        else:
            attention += 6 * layer.n_head * (layer.head_size + layer.value_size) * seq_length
    per_parameter = (2, 2) if forward_only else (4, 6)
    linear = sum(per_parameter[is_trained] * size for size, is_trained in _matmul_sizes(model))
    return linear + (attention * (0.5 if causal else 1.0) + recurrence) / (3 if forward_only else 1)
