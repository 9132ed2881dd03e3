"""Merge LoRA adapters into the unquantized base weights: computed in fp32, rounded once."""

import shutil
from collections.abc import Container, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from toolkit.checkpoints.adapters import AdapterInfo, is_adapter_dir, load_adapters, read_adapter
from toolkit.checkpoints.find import CONFIG, HYPERPARAMETERS
from toolkit.checkpoints.finite import write_weights
from toolkit.checkpoints.folder import (
    load_compatible_weights,
    load_model,
    read_adapted_config,
    read_model_config,
    write_model_config,
)
from toolkit.checkpoints.manifest import read_manifest
from toolkit.checkpoints.scratch import mmap_copy
from toolkit.checkpoints.store import MTP, WEIGHTS, require_new_folder, write_file, write_model_folder
from toolkit.checkpoints.weights import exact_dtype, resolve_weight_dtype
from toolkit.data.tokenizer import FILE_PATTERNS
from toolkit.errors import UserError
from toolkit.io.atomic import link_or_copy
from toolkit.io.paths import require_inside
from toolkit.models.config import ModelConfig
from toolkit.models.lora import SCORE, TRAINED_SCORE, adapted_on_meta
from toolkit.models.lora_layers import AdaptedLayer


class MergedWeights(Mapping[str, Tensor]):
    """A lazy mapping of merged weights. Each weight is computed on access (M2).

    Args:
        folder: Adapter checkpoint.
        base_checkpoint_dir: See :func:`toolkit.checkpoints.adapters.read_adapter`.
        dtype: Dtype of the merged weights; by default the base weight's, or what quantized weights need.

    ``config`` is the merged model's architecture: untied if the head has adapters.
    """

    def __init__(
        self, folder: Path, base_checkpoint_dir: str | Path | None = None, dtype: torch.dtype | None = None
    ) -> None:
        self.info: AdapterInfo = read_adapter(folder, base_checkpoint_dir)
        self.config = read_adapted_config(folder, self.info.base)
        model = adapted_on_meta(self.config, self.info.lora)
        self._weights = load_compatible_weights(self.info.base, model)
        self._dtype = dtype or exact_dtype(self._weights, self.config)
        adapters = load_adapters(folder, model)
        if self.config.head is not None:
            self._weights[SCORE] = adapters[TRAINED_SCORE]
        model.load_state_dict(adapters, strict=False, assign=True)
        self._layers = {
            f"{name}.weight": part for name, part in model.named_modules() if isinstance(part, AdaptedLayer)
        }
        if self.info.lora.head:
            self.config = replace(self.config, tie_embeddings=False)

    @torch.no_grad()
    def __getitem__(self, name: str) -> Tensor:
        weight = self._weights[name]
        merged = self._layers[name].merged(weight) if name in self._layers else weight
        stored = self._weights["transformer.wte.weight"] if name == SCORE else weight  # the adapters' head is fp32
        return merged.to(resolve_weight_dtype(name, self._dtype) or stored.dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


def merge_in_place(
    folder: Path, base_checkpoint_dir: str | Path | None = None, dtype: torch.dtype | None = None
) -> MergedWeights:
    """Write the merged weights atomically into the adapters' folder.

    ``base_checkpoint_dir``, ``dtype``: see :class:`MergedWeights`.
    """
    files = read_manifest(folder)
    is_listed = files is None or WEIGHTS in files  # otherwise, an earlier merge was killed
    if is_adapter_dir(folder) and (folder / WEIGHTS).exists() and is_listed:
        raise UserError(
            f"checkpoint_dir {folder}: already holds merged weights ({WEIGHTS}); use --out_dir for another folder"
        )
    merged = MergedWeights(folder, base_checkpoint_dir, dtype)
    if merged.config != read_model_config(folder):
        # Written before the weights: until these exist, loading uses the base folder's config.
        write_file(folder / CONFIG, lambda tmp: write_model_config(merged.config, tmp), flag="checkpoint_dir")
    if (file := merged.info.base / MTP).is_file() and merged.config.head is None:
        write_file(folder / MTP, lambda tmp: link_or_copy(file, tmp), flag="checkpoint_dir")
    write_file(folder / WEIGHTS, lambda tmp: _write_weights(merged, tmp, folder), flag="checkpoint_dir")
    return merged


def merge_to(
    folder: Path, out_dir: Path, base_checkpoint_dir: str | Path | None = None, dtype: torch.dtype | None = None
) -> MergedWeights:
    """Write a new model folder with merged weights, architecture, tokenizer and generation files.

    ``base_checkpoint_dir``, ``dtype``: see :class:`MergedWeights`.
    """
    require_new_folder(out_dir)
    merged = MergedWeights(folder, base_checkpoint_dir, dtype)

    def write(tmp: Path) -> None:
        _write_weights(merged, tmp / WEIGHTS, out_dir)
        write_model_config(merged.config, tmp / CONFIG)
        copy_files(folder, tmp, (*FILE_PATTERNS, HYPERPARAMETERS))
        if merged.config.head is None:
            copy_files(merged.info.base, tmp, (MTP,))

    write_model_folder(out_dir, write)
    return merged


def copy_files(source: Path, target: Path, patterns: tuple[str, ...], exclude: Container[Path] = ()) -> None:
    """Copy files that match one of the patterns, with their relative paths, except those in ``exclude``.

    MTP weights, which can have several GB, are hard links where the file system allows it.
    """
    for file in sorted({match for pattern in patterns for match in source.glob(pattern)}):
        if any(path in exclude for path in (file, *file.parents)):
            continue
        require_inside(file, source)
        if file.is_file():
            copy = target / file.relative_to(source)
            copy.parent.mkdir(parents=True, exist_ok=True)
            (link_or_copy if file.name == MTP else shutil.copyfile)(file, copy)


@torch.no_grad()
def logit_difference(folder: Path, merged_dir: Path, base_checkpoint_dir: str | Path | None = None) -> float:
    """Return the largest fp32 logit difference between merged and unmerged adapters, relative to the largest logit.

    It measures the rounding error of the merge.
    """
    exact = load_model(folder, "cpu", torch.float32, base_checkpoint_dir, ignores_merged=True)
    tokens = random_tokens(exact.config)
    expected = exact.eval()(tokens)
    del exact
    return relative_difference(load_model(merged_dir, dtype=torch.float32).eval()(tokens), expected)


def random_tokens(config: ModelConfig) -> Tensor:
    """Return reproducible random token ids, (2, min(block_size, 64)), for comparing two models."""
    shape, generator = (2, min(config.block_size, 64)), torch.Generator().manual_seed(0)
    return torch.randint(config.vocab_size or config.padded_vocab_size or 1, shape, generator=generator)


def relative_difference(logits: Tensor, expected: Tensor) -> float:
    """Return the maximum of ``|logits - expected|``, divided by the maximum of ``|expected|``."""
    return float((logits - expected).abs().max() / expected.abs().max())


def _write_weights(merged: MergedWeights, path: Path, folder: Path) -> None:
    """Write merged weights. torch.save needs all tensors at once, so merged ones are buffered in temporary files."""
    buffered = ((k, v if v is merged._weights[k] else mmap_copy(v, path)) for k, v in merged.items())
    write_weights(buffered, path, folder, merged.config.tie_embeddings)
