"""In from Hugging Face: a folder with config.json and safetensors becomes a model folder (laws S1, S4 and M2)."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from toolkit.checkpoints.folder import fitting_weights, model_on_meta, read_model_config, write_model_files
from toolkit.checkpoints.hf import FORMAT_NAMES, to_hf_names
from toolkit.checkpoints.merge import copy_files
from toolkit.checkpoints.scratch import SMALL, empty_on_disk
from toolkit.checkpoints.store import WEIGHTS, require_new_folder, write_folder
from toolkit.checkpoints.weights import require_fit
from toolkit.data.tokenizer import FILE_PATTERNS, Tokenizer
from toolkit.distributed.memory import give_back_freed_memory
from toolkit.errors import UserError
from toolkit.models.config import ModelConfig
from toolkit.models.families import config_from_hf, family_of

CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
_HEAD, _EMBEDDING = "lm_head.weight", "transformer.wte.weight"
_TYPES = {name: dtype for dtype, name in FORMAT_NAMES.items()}
# Causal masks and rotary tables that older versions of transformers saved with GPT-2, GPT-NeoX and Llama.
_BUFFERS = re.compile(r"(.+\.)?(attn|attention)\.(masked_)?bias|(.+\.)?rotary_emb\.inv_freq")


class Stored(NamedTuple):
    """A tensor in a safetensors file, under the name that it has there."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    def read(self) -> Tensor:
        """The tensor, whose bytes come into memory when they are touched and can be given back."""
        return _open(self.file).get_tensor(self.name)


def import_hf(hf_dir: str | Path, out_dir: str | Path, dtype: torch.dtype | None = None) -> list[str]:
    """Write a model folder from a Hugging Face folder, whole or not at all, with about one weight in memory at a time.

    Weights that have to change on the way lie in files without a name beside out_dir until they are written, which
    needs as much free disk as they take.

    Args:
        hf_dir: Holds ``config.json`` and safetensors, in one file or several with an index.
        out_dir: The new folder; one that is there must be empty.
        dtype: Type of the weights; as they are when not given.

    Returns:
        What the user should know of it, in lines.

    Raises:
        UserError: the architecture is not supported; weights are missing, extra or of another shape, each named; the
            index points outside the folder; a file is missing or damaged; out_dir is in use, or the disk is full.
    """
    hf_dir, out_dir = Path(hf_dir).expanduser(), Path(out_dir)
    require_new_folder(out_dir)
    config, notes = _read_config(hf_dir, name=out_dir.resolve().name), []
    tokenizer = Tokenizer.load(hf_dir, flag="hf_dir") if (hf_dir / "tokenizer.json").is_file() else None
    notes += _about_tokenizer(hf_dir, tokenizer, config)
    try:
        found = _with_prefix(_find_weights(hf_dir), config)
        config, more = _settle_head(found, config)
        _require_fit(found, config, hf_dir)
        dtype, and_more = _settle_type(found, dtype)

        def write(folder: Path) -> None:
            weights = _convert(found, config, dtype, beside=out_dir)
            write_model_files(folder, state_dict=weights, config=config, hyperparameters=None, tokenizer=None)
            copy_files(hf_dir, folder, (*FILE_PATTERNS, CONFIG))

        write_folder(out_dir, write, flag="out_dir")
    finally:
        _open.cache_clear()
    return notes + more + and_more


def is_import_of(folder: Path, hf_dir: Path) -> bool:
    """Whether a model folder holds the model of a Hugging Face folder, by all that can be compared in a moment: the
    architecture and the weights of the first block. They may have been rounded to another type on the way.

    Raises:
        UserError: one of the two cannot be read.
    """
    ours, theirs = read_model_config(folder), _read_config(hf_dir, name="theirs")
    if _architecture(ours) != _architecture(theirs):
        return False
    weights = fitting_weights(folder, model_on_meta(ours))
    try:
        found = _with_prefix(_find_weights(hf_dir), theirs)
        _require_fit(found, _settle_head(found, theirs)[0], hf_dir)
        for entry in family_of(ours).weights(ours):
            if entry.ours[0].startswith("transformer.h.0."):
                read = entry.from_hf([found[name].read() for name in entry.theirs])
                if not all(_equal_but_for_rounding(weights[n], t) for n, t in zip(entry.ours, read, strict=True)):
                    return False
    finally:
        _open.cache_clear()
    return True


def _architecture(config: ModelConfig) -> dict[str, Any]:
    """What two models have in common if they have the same weights: not the context, nor whether a head is tied."""
    values = family_of(config).to_hf(config)
    return {k: v for k, v in values.items() if k not in ("max_position_embeddings", "tie_word_embeddings")}


def _equal_but_for_rounding(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.to(b.dtype), b) or torch.equal(a, b.to(a.dtype))


def _read_config(hf_dir: Path, name: str) -> ModelConfig:
    if not hf_dir.is_dir():
        raise UserError(f"hf_dir {hf_dir}: no such folder; give the one that holds {CONFIG} and the weights")
    if not (hf_dir / CONFIG).is_file():
        ours = f"; it is a checkpoint folder already ({WEIGHTS} is there)" if (hf_dir / WEIGHTS).exists() else ""
        raise UserError(f"hf_dir {hf_dir}: holds no {CONFIG}{ours or '; give the folder of a Hugging Face model'}")
    values = _read_json(hf_dir / CONFIG)
    if values.get("quantization_config"):
        raise UserError(f"{hf_dir / CONFIG}: quantization_config: quantised weights are not read; get the 16-bit model")
    try:
        config = config_from_hf(values)
    except UserError as error:
        raise UserError(f"hf_dir {hf_dir}: {error}") from error
    return dataclasses.replace(config, name=config.name or name)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not JSON: {' '.join(str(error).split())}; copy or download it again") from error
    if not isinstance(values, dict):
        raise UserError(f"{path}: must hold a JSON object; copy or download it again")
    return values


def _about_tokenizer(hf_dir: Path, tokenizer: Tokenizer | None, config: ModelConfig) -> list[str]:
    if tokenizer is None:
        lone = next((p.name for p in sorted(hf_dir.glob("*.model")) if p.is_file()), None)
        mend = f"write one from {lone} with transformers' AutoTokenizer" if lone else "copy the tokenizer's files"
        return [f"warning: {hf_dir} holds no tokenizer.json: {mend}, or give --tokenizer_dir later on"]
    if tokenizer.vocab_size > config.padded_vocab_size:
        return [
            f"warning: the tokenizer has {tokenizer.vocab_size:,} tokens and the model embeds "
            f"{config.padded_vocab_size:,}: texts with the others cannot be used"
        ]
    return []


def _find_weights(hf_dir: Path) -> dict[str, Stored]:
    """Read what the headers of the weights' files say."""
    where: dict[str, Any] = {}
    if (hf_dir / SINGLE).is_file():
        files = [SINGLE]
    elif (hf_dir / INDEX).is_file():
        where = _read_json(hf_dir / INDEX).get("weight_map")
        if not (isinstance(where, dict) and where and all(isinstance(file, str) for file in where.values())):
            raise UserError(f"{hf_dir / INDEX}: holds no weight_map of names to files; copy or download it again")
        files = sorted(set(where.values()))
        # Law S4. A plain name may still be a link: the hub's cache keeps the contents elsewhere.
        if outside := [file for file in files if not re.fullmatch(r"[^/\\:\0]+\.safetensors", file)]:
            raise UserError(f"{hf_dir / INDEX}: points to {outside[0]!r:.200}, which is no safetensors file beside it")
    else:
        raise UserError(f"hf_dir {hf_dir}: {_instead_of_safetensors(hf_dir)}")
    found: dict[str, Stored] = {}
    for file in files:
        for name, shape, kind in _read_header(hf_dir / file):
            if name in found and where.get(name) != file:
                continue
            if _BUFFERS.fullmatch(name):
                continue
            if kind not in _TYPES:
                raise UserError(f"{hf_dir / file}: {name} is of type {kind}, no weight's; get the 16-bit model")
            found[name] = Stored(hf_dir / file, name, shape, _TYPES[kind])
    return found


def _instead_of_safetensors(hf_dir: Path) -> str:
    if pickled := sorted(p.name for p in hf_dir.glob("pytorch_model*.bin*")):
        return (
            f"holds {pickled[0]}, which can run code when it is read, and no {SINGLE}; get the model's safetensors, or "
            "write them with transformers: AutoModelForCausalLM.from_pretrained(hf_dir).save_pretrained(new_dir)"
        )
    if (hf_dir / "adapter_model.safetensors").exists():
        return "holds an adapter, not a whole model; give the folder of its base model"
    return f"holds neither {SINGLE} nor {INDEX}; give the folder of a Hugging Face model"


def _read_header(path: Path) -> Iterable[tuple[str, tuple[int, ...], str]]:
    opened = _open(path)
    for name in opened.keys():  # noqa: SIM118 (not a dictionary)
        part = opened.get_slice(name)
        yield name, tuple(part.get_shape()), part.get_dtype()


@functools.cache
def _open(path: Path) -> Any:
    try:
        with open(path, "rb") as file:
            if file.read(24).startswith(b"version https://git-lfs"):
                raise UserError(f"{path}: only stands for the weights; run `git lfs pull` in its folder")
        return safe_open(path, "pt")
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}; copy or download it again") from error
    except SafetensorError as error:
        raise UserError(f"{path}: the file is damaged or cut short ({error}); copy or download it again") from error


def _with_prefix(found: dict[str, Stored], config: ModelConfig) -> dict[str, Stored]:
    """Name weights that were saved without the head's module around them (openai-community/gpt2) as all others are."""
    wanted = {name for entry in family_of(config).weights(config) for name in entry.theirs}
    prefix = next(iter(_their_name(config, _EMBEDDING).split(".")))
    renamed = {}
    for name, stored in found.items():
        longer = f"{prefix}.{name}"
        renamed[longer if longer in wanted and longer not in found else name] = stored
    return renamed


def _their_name(config: ModelConfig, ours: str) -> str:
    config = dataclasses.replace(config, tie_embeddings=False)  # or the head has no name
    return next(entry.theirs[0] for entry in family_of(config).weights(config) if entry.ours == (ours,))


def _settle_head(found: dict[str, Stored], config: ModelConfig) -> tuple[ModelConfig, list[str]]:
    """Keep one tensor of a tied head and embedding, whichever are there (law N10).

    Where both are there and differ, they stay two, as in transformers 5 (4 would drop the head).
    """
    if not config.tie_embeddings:
        return config, []
    head, embedding = _their_name(config, _HEAD), _their_name(config, _EMBEDDING)
    if head not in found:
        return config, []
    if embedding in found and not _equal(found[head], found[embedding]):
        note = f"warning: {CONFIG} ties {head} and {embedding}, but the two differ: they are kept as two"
        return dataclasses.replace(config, tie_embeddings=False), [note]
    found.setdefault(embedding, found[head])
    del found[head]
    return config, []


def _equal(a: Stored, b: Stored) -> bool:
    return (a.shape, a.dtype) == (b.shape, b.dtype) and torch.equal(a.read(), b.read())


def _require_fit(found: dict[str, Stored], config: ModelConfig, hf_dir: Path) -> None:
    wanted = dict(to_hf_names(family_of(config).weights(config), model_on_meta(config).state_dict()))
    stored = {name: torch.empty(one.shape, dtype=one.dtype, device="meta") for name, one in found.items()}
    require_fit(stored, wanted, hf_dir, CONFIG)


def _settle_type(found: dict[str, Stored], dtype: torch.dtype | None) -> tuple[torch.dtype, list[str]]:
    """The type of all weights: the one asked for, else theirs; of several, the one that holds them all."""
    types = {stored.dtype for stored in found.values()}
    if dtype is not None:
        return dtype, []
    widest = functools.reduce(torch.promote_types, types)
    if len(types) == 1:
        return widest, []
    names = " and ".join(sorted(str(t).removeprefix("torch.") for t in types))
    return widest, [f"the weights are of types {names}: all are written as {str(widest).removeprefix('torch.')}"]


def _convert(found: dict[str, Stored], config: ModelConfig, dtype: torch.dtype, beside: Path) -> dict[str, Tensor]:
    """The weights under our names, each in a file: theirs where nothing changes, else one without a name."""
    weights: dict[str, Tensor] = {}
    for entry in family_of(config).weights(config):
        theirs = [found[name].read() for name in entry.theirs]
        for name, tensor in zip(entry.ours, entry.from_hf(theirs), strict=True):
            if tensor.dtype != dtype or all(tensor is not one for one in theirs):
                tensor = empty_on_disk(tensor.shape, dtype, beside).copy_(tensor)
            weights[name] = tensor
            if tensor.numel() >= SMALL:
                give_back_freed_memory()
    if config.tie_embeddings:
        weights[_HEAD] = weights[_EMBEDDING]
    return weights
