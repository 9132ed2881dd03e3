"""In from Hugging Face: a folder with config.json and weights becomes a model folder (S1, S4 and M2)."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from toolkit.checkpoints.export_hf import to_hf_names
from toolkit.checkpoints.finite import nonfinite_tensors, nonfinite_warning
from toolkit.checkpoints.folder import load_compatible_weights, model_on_meta, read_model_config, write_model_files
from toolkit.checkpoints.hf_reader import CONFIG, Weight, close, find_weights, quantised_bits, read_json
from toolkit.checkpoints.hf_tokenizer import converted, lone_sentencepiece
from toolkit.checkpoints.merge import copy_files
from toolkit.checkpoints.scratch import SMALL, empty_on_disk
from toolkit.checkpoints.store import WEIGHTS, require_new_folder, write_model_folder
from toolkit.checkpoints.weights import require_fit
from toolkit.data.tokenizer import FILE_PATTERNS, Tokenizer
from toolkit.distributed.memory import give_back_freed_memory
from toolkit.errors import UserError
from toolkit.models.config import ModelConfig
from toolkit.models.families import config_from_hf, family_of
from toolkit.models.moe import type_of
from toolkit.untrusted import read_yaml

RECORD = "download.yaml"  # what the model was made from: a repository of the hub at a commit, or a folder
_HEAD, _EMBEDDING = "lm_head.weight", "transformer.wte.weight"


def import_hf(hf_dir: str | Path, out_dir: str | Path, dtype: torch.dtype | None = None) -> list[str]:
    """Write a model folder from a Hugging Face folder, whole or not at all, with about one weight in memory at a time.

    Weights that have to change on the way lie in files without a name beside out_dir until they are written, which
    needs as much free disk as they take.

    Args:
        hf_dir: Holds ``config.json`` and safetensors, or pickles that load with weights_only, in one file or several
            with an index.
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
    config, notes = read_hf_config(hf_dir, name=out_dir.resolve().name), _about_code(hf_dir)
    made, notes_of_tokenizer = _look_at_tokenizer(hf_dir, config)
    try:
        found, notes_of_unused = _without_unused(_with_prefix(find_weights(hf_dir), config), config)
        config, notes_of_head = resolve_tied_head(found, config)
        _require_fit(found, config, hf_dir)
        dtype, notes_of_type = resolve_dtype(found, config, dtype)

        def write(folder: Path) -> None:
            weights, nonfinite = _convert(found, config, dtype, beside=out_dir)
            if nonfinite:
                notes.append(nonfinite_warning(nonfinite, out_dir))
            write_model_files(folder, state_dict=weights, config=config, hyperparameters=None, tokenizer=None)
            copy_files(hf_dir, folder, (*FILE_PATTERNS, CONFIG, RECORD))
            if not (folder / RECORD).exists():
                write_record(folder, {"hf_dir": str(hf_dir.resolve())})
            if made is not None:
                (folder / "tokenizer.json").write_bytes(made)

        write_model_folder(out_dir, write, flag="out_dir")
    finally:
        close()
    return notes + notes_of_tokenizer + notes_of_unused + notes_of_head + notes_of_type


def write_record(folder: Path, origin: dict[str, str]) -> None:
    """Write what the model of a folder was made from: repo_id, revision and commit, or hf_dir."""
    (folder / RECORD).write_text(yaml.safe_dump(origin, sort_keys=False, allow_unicode=True), encoding="utf-8")


def read_origin(folder: Path) -> tuple[str, str | None] | None:
    """Return the hub name (with its revision) or the Hugging Face folder that an imported model was made from; None
    where neither is recorded, or that folder is not there any more."""
    try:
        origin = read_yaml(folder / RECORD)
        repo_id, revision, hf_dir = (origin.get(key) for key in ("repo_id", "revision", "hf_dir"))
    except (OSError, ValueError, AttributeError):
        return None
    if isinstance(repo_id, str):
        return repo_id, revision if isinstance(revision, str) and revision != "main" else None
    return (hf_dir, None) if isinstance(hf_dir, str) and Path(hf_dir, CONFIG).is_file() else None


def is_import_of(folder: Path, hf_dir: Path) -> bool:
    """Whether a model folder holds the model of a Hugging Face folder, by all that can be compared in a moment: the
    architecture and the weights of the first block. They may have been rounded to another type on the way.

    Raises:
        UserError: one of the two cannot be read.
    """
    ours, theirs = read_model_config(folder), read_hf_config(hf_dir, name="theirs")
    if _architecture(ours) != _architecture(theirs):
        return False
    weights = load_compatible_weights(folder, model_on_meta(ours))
    try:
        found, _ = _without_unused(_with_prefix(find_weights(hf_dir), theirs), theirs)
        _require_fit(found, resolve_tied_head(found, theirs)[0], hf_dir)
        for entry in family_of(ours).weights(ours):
            if entry.native[0].startswith("transformer.h.0."):
                read = entry.from_hf([found[name].read() for name in entry.hf])
                if not all(_equal_but_for_rounding(weights[n], t) for n, t in zip(entry.native, read, strict=True)):
                    return False
    finally:
        close()
    return True


def _architecture(config: ModelConfig) -> dict[str, Any]:
    """What two models have in common if they have the same weights: not the context, nor whether a head is tied."""
    values = family_of(config).to_hf(config)
    return {k: v for k, v in values.items() if k not in ("max_position_embeddings", "tie_word_embeddings")}


def _equal_but_for_rounding(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.to(b.dtype), b) or torch.equal(a, b.to(a.dtype))


def read_hf_config(hf_dir: Path, name: str) -> ModelConfig:
    """Read the architecture of a Hugging Face folder; ``name`` is the model's where its config.json has none.

    Raises:
        UserError: there is no config.json, or it is broken, or its architecture is not supported.
    """
    if not hf_dir.is_dir():
        raise UserError(f"hf_dir {hf_dir}: no such folder; give the one that holds {CONFIG} and the weights")
    if not (hf_dir / CONFIG).is_file():
        ours = f"; it is a checkpoint folder already ({WEIGHTS} is there)" if (hf_dir / WEIGHTS).exists() else ""
        raise UserError(f"hf_dir {hf_dir}: holds no {CONFIG}{ours or '; give the folder of a Hugging Face model'}")
    values = read_json(hf_dir / CONFIG)
    if (quantization := values.get("quantization_config")) and quantised_bits(values) is None:
        method = quantization.get("quant_method", quantization) if isinstance(quantization, dict) else quantization
        raise UserError(
            f"{hf_dir / CONFIG}: quantization_config: weights quantised by {method!r} are not read, only 'mxfp4', and "
            "'fp8' with a weight_block_size; get the 16-bit model, or write one with transformers: load it, "
            "dequantize(), save_pretrained()"
        )
    try:
        config = config_from_hf(values)
    except UserError as error:
        raise UserError(f"hf_dir {hf_dir}: {error}") from error
    return dataclasses.replace(config, name=config.name or name)


def _about_code(hf_dir: Path) -> list[str]:
    values = read_json(hf_dir / CONFIG)
    if not values.get("auto_map"):
        return []
    plain = f"the architecture is taken as plain {values.get('model_type')}"
    return [f"warning: {CONFIG} names code of its own (auto_map), which is not run; {plain}"]


def _look_at_tokenizer(hf_dir: Path, config: ModelConfig) -> tuple[bytes | None, list[str]]:
    """A tokenizer.json made of a SentencePiece model, where there is only that, and what the user should know of it."""
    hint = "copy one with what belongs to it beside the weights; training and evaluate also take --tokenizer_dir"
    if (hf_dir / "tokenizer.json").is_file():
        return None, _about_size(Tokenizer.load(hf_dir, flag="hf_dir"), config)
    model = lone_sentencepiece(hf_dir)
    if model is None:
        return None, [f"warning: {hf_dir} holds no tokenizer.json: {hint}"]
    try:
        made = converted(model)
        about_size = _about_size(Tokenizer({"tokenizer.json": made}, model.name), config)
    except ValueError as error:
        return None, [f"warning: {hf_dir} holds no tokenizer.json, and {model.name} was not made one: {error}; {hint}"]
    return made, [f"tokenizer.json was made of {model.name}; the two encode alike what was tried", *about_size]


def _about_size(tokenizer: Tokenizer, config: ModelConfig) -> list[str]:
    if tokenizer.vocab_size <= config.padded_vocab_size:
        return []
    return [
        f"warning: the tokenizer has {tokenizer.vocab_size:,} tokens and the model embeds "
        f"{config.padded_vocab_size:,}: texts with the others cannot be used"
    ]


def _with_prefix(found: dict[str, Weight], config: ModelConfig) -> dict[str, Weight]:
    """Name weights as all others are that were saved without the head's module around them (openai-community/gpt2), or
    with a model around theirs that sees images, too (google/gemma-3-4b-it)."""
    wanted = {name for entry in family_of(config).weights(config) for name in entry.hf}
    prefix = _their_name(config, _EMBEDDING).split(".")[0]
    renamed = {}
    for name, stored in found.items():
        others = f"{prefix}.{name}", name.replace("language_model.", "", 1)
        renamed[next((other for other in others if other in wanted and other not in found), name)] = stored
    return renamed


def _without_unused(found: dict[str, Weight], config: ModelConfig) -> tuple[dict[str, Weight], list[str]]:
    is_unused = getattr(family_of(config), "is_unused", None)
    unused = [name for name in found if is_unused is not None and is_unused(name, config)]
    note = f"left out: {len(unused)} weights that are no part of the model, {unused[0]} ..." if unused else None
    left = set(unused)
    return {name: stored for name, stored in found.items() if name not in left}, [note] if note else []


def _their_name(config: ModelConfig, ours: str) -> str:
    config = dataclasses.replace(config, tie_embeddings=False)  # or the head has no name
    return next(entry.hf[0] for entry in family_of(config).weights(config) if entry.native == (ours,))


def resolve_tied_head(found: dict[str, Weight], config: ModelConfig) -> tuple[ModelConfig, list[str]]:
    """Keep one tensor of a tied head and embedding, whichever are there (N10).

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


def _equal(a: Weight, b: Weight) -> bool:
    return (a.shape, a.dtype) == (b.shape, b.dtype) and torch.equal(a.read(), b.read())


def _require_fit(found: dict[str, Weight], config: ModelConfig, hf_dir: Path) -> None:
    wanted = dict(to_hf_names(family_of(config).weights(config), model_on_meta(config).state_dict()))
    stored = {name: torch.empty(one.shape, dtype=one.dtype, device="meta") for name, one in found.items()}
    require_fit(stored, wanted, hf_dir, CONFIG)


def resolve_dtype(
    found: dict[str, Weight], config: ModelConfig, dtype: torch.dtype | None
) -> tuple[torch.dtype, list[str]]:
    """The type of all weights: the one asked for, else theirs; of several, the one that holds them all."""
    entries = family_of(config).weights(config)
    settled = {name for entry in entries if type_of(entry.native[0], None) is not None for name in entry.hf}
    types = {stored.dtype for name, stored in found.items() if name not in settled}
    if dtype is not None:
        return dtype, []
    widest = functools.reduce(torch.promote_types, types)
    if len(types) == 1:
        return widest, []
    names = " and ".join(sorted(str(t).removeprefix("torch.") for t in types))
    return widest, [f"the weights are of types {names}: all are written as {str(widest).removeprefix('torch.')}"]


def _convert(
    found: dict[str, Weight], config: ModelConfig, dtype: torch.dtype, beside: Path
) -> tuple[dict[str, Tensor], list[str]]:
    """The weights under our names, each in a file: theirs where nothing changes, else one without a name.

    And the names of those that contain NaN or Inf.
    """
    weights: dict[str, Tensor] = {}
    nonfinite: list[str] = []
    for entry in family_of(config).weights(config):
        theirs = [found[name].read() for name in entry.hf]
        for name, tensor in zip(entry.native, entry.from_hf(theirs), strict=True):
            wanted = type_of(name, dtype)
            if tensor.dtype != wanted or all(tensor is not one for one in theirs):
                tensor = empty_on_disk(tensor.shape, wanted, beside).copy_(tensor)
            weights[name] = tensor
            nonfinite += nonfinite_tensors({name: tensor})
            if tensor.numel() >= SMALL:
                give_back_freed_memory()
        del theirs  # what has been dequantised is in memory
    if config.tie_embeddings:
        weights[_HEAD] = weights[_EMBEDDING]
    return weights, nonfinite
