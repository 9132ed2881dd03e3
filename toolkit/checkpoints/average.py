"""Average the weights of several checkpoints of one model, a few tensors in memory at a time (M2)."""

import filecmp
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from toolkit.checkpoints.find import CONFIG, HYPERPARAMETERS
from toolkit.checkpoints.finite import write_weights
from toolkit.checkpoints.folder import load_compatible_weights, read_model_config, write_model_config
from toolkit.checkpoints.merge import copy_files
from toolkit.checkpoints.scratch import mmap_copy
from toolkit.checkpoints.store import MTP, WEIGHTS, require_new_folder, write_model_folder
from toolkit.data.tokenizer import FILE_PATTERNS
from toolkit.errors import UserError
from toolkit.models.config import Fields
from toolkit.models.gpt import model_on_meta

_TOKENIZER = ("tokenizer.json", "tokenizer.model")


def average(folders: Sequence[Path], out_dir: Path) -> None:
    """Write a model folder with the mean of the folders' weights, summed in fp64 and rounded once to their dtype.

    Other files are copies of the first folder's.

    Raises:
        UserError: The folders differ in architecture, tokenizer or dtype, or hold adapters.
    """
    require_new_folder(out_dir)
    config = read_model_config(folders[0])
    for folder in folders[1:]:
        _require_same_model(folders[0], folder)
    sources = [load_compatible_weights(folder, model_on_meta(config)) for folder in folders]
    for folder, weights in zip(folders, sources, strict=True):
        for name, tensor in weights.items():
            if tensor.dtype != sources[0][name].dtype:
                dtypes = f"{name} is {tensor.dtype}, but {sources[0][name].dtype} in {folders[0]}"
                raise UserError(f"--checkpoint_dirs {folder}: {dtypes}; give checkpoints of one dtype")

    def write(tmp: Path) -> None:
        names = [name for name in sources[0] if not (config.tie_embeddings and name == "lm_head.weight")]
        means = ((name, _mean([source[name] for source in sources], tmp / WEIGHTS)) for name in names)
        write_weights(means, tmp / WEIGHTS, out_dir, config.tie_embeddings)
        write_model_config(config, tmp / CONFIG)
        copy_files(folders[0], tmp, (*FILE_PATTERNS, HYPERPARAMETERS, MTP))

    write_model_folder(out_dir, write)


def _mean(tensors: list[Tensor], path: Path) -> Tensor:
    """Return the mean in a memory-mapped temporary file next to ``path``: torch.save needs all tensors at once."""
    total = tensors[0].to(torch.float64, copy=True)
    for tensor in tensors[1:]:
        total += tensor
    return mmap_copy(total.div_(len(tensors)), path, tensors[0].dtype)


def _require_same_model(first: Path, folder: Path) -> None:
    """Raise UserError if the folders differ in architecture or tokenizer."""
    expected, values = (read_model_config(path).to_dict() for path in (first, folder))
    for key in sorted(expected.keys() | values.keys()):
        if expected.get(key) != values.get(key):
            difference = f"{key} is {values.get(key)}, but {expected.get(key)} in {first}"
            if key == "qat":
                difference = f"was trained {_qat_flags(values)}, but {first} {_qat_flags(expected)}"
            raise UserError(f"--checkpoint_dirs {folder}: {difference}; give checkpoints of one model")
    for name in _TOKENIZER:
        a, b = (path / name for path in (first, folder))
        if a.is_file() != b.is_file() or (a.is_file() and not filecmp.cmp(a, b, shallow=False)):
            raise UserError(f"--checkpoint_dirs {folder}: {name} differs from {first}'s; give checkpoints of one model")


def _qat_flags(values: Fields) -> str:
    flags = "with --qat.weights {weights} --qat.group_size {group_size} in {dtype}"
    return flags.format(**values["qat"]) if "qat" in values else "without --qat.weights"
