"""Tables of weight names that serve both directions: ours (LitGPT's) and Hugging Face's.

A family lists its weights as :class:`Map` entries. Each entry pairs some names of ours with some of theirs and holds
the steps that turn our tensors into theirs; every step knows its inverse, so the same entry reads and writes.
No torch at import: the command line reads the families' configurations only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from toolkit.errors import UserError
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
    """(out, in) to (in, out): GPT-2's Conv1D keeps its weights the other way round than nn.Linear."""

    def swap(one: list[Tensor]) -> list[Tensor]:
        return [one[0].t().contiguous()]

    return Step(swap, swap)


def interleave_heads(n_head: int, head_size: int) -> Step:
    """All queries, all keys, all values -> query, key and value of head 0, of head 1, ... (GPT-NeoX)."""

    def swap(first: int, second: int) -> Change:
        def change(one: list[Tensor]) -> list[Tensor]:
            rest = one[0].shape[1:]
            parts = one[0].reshape(first, second, head_size, *rest)
            return [parts.transpose(0, 1).reshape(3 * n_head * head_size, *rest)]

        return change

    return Step(swap(3, n_head), swap(n_head, 3))


def same(ours: str, theirs: str, *steps: Step) -> Map:
    """One tensor on either side."""
    return Map((ours,), (theirs,), steps)


def linear(ours: str, theirs: str, bias: bool, *weight_steps: Step) -> list[Map]:
    """The weight of a linear layer or a norm, and its bias where it has one."""
    maps = [same(f"{ours}.weight", f"{theirs}.weight", *weight_steps)]
    return [*maps, same(f"{ours}.bias", f"{theirs}.bias")] if bias else maps


def require(config: ModelConfig, **expected: Any) -> None:
    """Refuse a config whose facts a family's Hugging Face class cannot express.

    Raises:
        UserError: Names the field, its value and the value that the family has.
    """
    for name, value in expected.items():
        if (actual := getattr(config, name)) != value:
            raise UserError(
                f"--model_config.{name} {actual}: the Hugging Face model type {config.family!r} only has {value}; "
                f"such a model cannot be exported"
            )


def require_hf(config_json: dict[str, Any], **allowed: tuple[Any, ...]) -> None:
    """Refuse a ``config.json`` with a value, where it has the key, that the family's models here cannot compute."""
    for key, values in allowed.items():
        if key in config_json and config_json[key] not in values:
            raise UserError(
                f"config.json: {key} {config_json[key]!r}: of a {config_json.get('model_type')!r} model, "
                f"this version computes only {' or '.join(repr(v) for v in values)}"
            )


def model_name(config_json: dict[str, Any]) -> str:
    """The last part of where the model came from, or nothing."""
    return str(config_json.get("_name_or_path") or "").rstrip("/").rpartition("/")[2]


def embedding_and_head(config: ModelConfig, embedding: str, head: str) -> list[Map]:
    """The tensor of a tied head is listed once, under the embedding's names."""
    maps = [same("transformer.wte.weight", embedding)]
    return maps if config.tie_embeddings else [*maps, same("lm_head.weight", f"{head}.weight")]


def read_rope(config_json: dict[str, Any], *, theta: str = "rope_theta", share: str, default_share: float) -> dict:
    """Return the rotary fields of a ModelConfig, from the old form or transformers 5's ``rope_parameters``.

    Args:
        config_json: The content of ``config.json``.
        theta: The old form's key of the base.
        share: The old form's key of the rotated share of a head.
        default_share: The rotated share where none is given.

    Raises:
        UserError: A rotary scaling other than Llama 3's.
    """
    rope = config_json.get("rope_parameters") or {}
    scaling = rope or config_json.get("rope_scaling") or {}
    fields = {
        "rope_base": float(rope.get("rope_theta") or config_json.get(theta) or 10000.0),
        "rotary_percentage": float(rope.get("partial_rotary_factor") or config_json.get(share) or default_share),
    }
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return fields
    if kind != "llama3":
        raise UserError(f"config.json: rope_type {kind!r} is not supported; only 'default' or 'llama3'")
    names = _LLAMA3_NAMES.items()
    return {**fields, "rope_adjustments": {ours: scaling[theirs] for ours, theirs in names}}


def write_rope_scaling(config: ModelConfig) -> dict[str, Any] | None:
    """Return ``rope_scaling``, the form that transformers 4 and 5 both read."""
    if config.rope_adjustments is None:
        return None
    return {"rope_type": "llama3"} | {theirs: config.rope_adjustments[ours] for ours, theirs in _LLAMA3_NAMES.items()}


_LLAMA3_NAMES = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_seq_len": "original_max_position_embeddings",
}
