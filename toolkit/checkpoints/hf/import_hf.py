"""Import from Hugging Face: convert a folder with config.json and weights to a model folder (S1, S4 and M2)."""

import dataclasses
import functools
import itertools
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from toolkit.checkpoints.finite import write_weights
from toolkit.checkpoints.folder import CONFIG as CHECKPOINT_CONFIG
from toolkit.checkpoints.folder import load_compatible_weights, read_model_config, write_model_config
from toolkit.checkpoints.hf.export_hf import to_hf_names
from toolkit.checkpoints.hf.files import Dequantized, Weight, close
from toolkit.checkpoints.hf.mtp import on_meta, write_mtp
from toolkit.checkpoints.hf.origin import ORIGIN_FILE
from toolkit.checkpoints.hf.reader import CONFIG, find_weights, require_supported_format
from toolkit.checkpoints.hf.sums import require_intact
from toolkit.checkpoints.merge import copy_files
from toolkit.checkpoints.scratch import mmap_copy
from toolkit.checkpoints.store import MTP, WEIGHTS, require_new_folder, write_model_folder
from toolkit.checkpoints.weights import require_compatible, resolve_weight_dtype
from toolkit.data.tokenizer import FILE_PATTERNS, Tokenizer, read_tokenizer_files
from toolkit.errors import UserError, join_first, one_line
from toolkit.io.safe_parse import read_json_object, write_yaml
from toolkit.models.config import ModelConfig
from toolkit.models.families import MULTIMODAL, config_from_hf, family_of
from toolkit.models.gpt import model_on_meta

_HEAD, _EMBEDDING = "lm_head.weight", "transformer.wte.weight"
# File names that transformers looks for. FILE_PATTERNS (the files to download) must include all of them.
SENTENCEPIECE = ("tokenizer.model", "spiece.model")
# Texts that both tokenizers must encode identically: spaces, other scripts, unknown characters, line ends, digits. No
# leading space, which transformers encodes differently.
_PROBES = ("Hello world", "two  spaces ", "Grüße, 你好, مرحبا 🎉", "a\nb\n\n\tc", "1234567.89 + x_i == y", "")


def import_hf(
    hf_dir: str | Path, out_dir: str | Path, dtype: torch.dtype | None = None, verify: bool = True
) -> list[str]:
    """Convert a Hugging Face folder to a model folder, atomically and with about one weight in memory at a time.

    Converted weights are buffered in temporary files on out_dir's disk, which need additional free space.

    Args:
        hf_dir: Folder with ``config.json`` and weights: safetensors, or pickles that load with weights_only.
        out_dir: The new folder; an existing one must be empty.
        dtype: Dtype of the weights; unchanged by default.
        verify: Verify checksums if the folder has any.

    Returns:
        Notes and warnings for the user.
    """
    hf_dir, out_dir = Path(hf_dir), Path(out_dir)
    require_new_folder(out_dir)
    config, notes = read_hf_config(hf_dir, name=out_dir.resolve().name), _notes_of_config(hf_dir)
    notes += require_intact(hf_dir, f"hf_dir {hf_dir}") if verify else []
    tokenizer, notes_of_tokenizer = _read_tokenizer(hf_dir, config)
    if config.head is not None and tokenizer is not None:
        tokenizer = _with_pad_token(tokenizer, read_json_object(hf_dir / CONFIG).get("pad_token_id"), notes)
    try:
        stored, mtp, notes_of_unused = _drop_unused(_add_prefix(find_weights(hf_dir), config), config)
        config, notes_of_head = resolve_tied_head(stored, config)
        _require_compatible(stored, config, hf_dir)
        dtype, notes_of_type = resolve_dtype(stored, config, dtype)

        def write(folder: Path) -> None:
            weights = _convert(stored, config, dtype, out_dir)
            write_weights(weights, folder / WEIGHTS, out_dir, config.tie_embeddings)
            write_model_config(config, folder / CHECKPOINT_CONFIG)
            if mtp:
                write_mtp(mtp, folder, hf_dir)
            copy_files(hf_dir, folder, (*FILE_PATTERNS, CONFIG, ORIGIN_FILE))
            if not (folder / ORIGIN_FILE).exists():
                write_yaml(folder / ORIGIN_FILE, {"hf_dir": str(hf_dir.resolve())})
            if tokenizer is not None:  # it may be changed
                tokenizer.save(folder)

        write_model_folder(out_dir, write)
    finally:
        close()
    return notes + notes_of_tokenizer + notes_of_unused + notes_of_head + notes_of_type


def _with_pad_token(tokenizer: Tokenizer, pad: Any, notes: list[str]) -> Tokenizer:
    """Let the tokenizer name the token before whose repetitions at the end transformers reads a score.

    This is pad_token_id of config.json, whatever the tokenizer pads with.
    """
    if pad in (None, tokenizer.pad_id):
        return tokenizer
    if pad in tokenizer.added_tokens.values():
        return tokenizer.with_pad(pad)
    where = f"config.json has pad_token_id {pad}, which is no special token of the tokenizer"
    notes.append(f"warning: {where}: scores of texts that end with it differ from those of transformers")
    return tokenizer


def is_import_of(folder: Path, hf_dir: Path) -> bool:
    """Whether a model folder was imported from a Hugging Face folder.

    For speed, compares only the architecture and the first block's weights (up to rounding).
    """
    config, hf_config = read_model_config(folder), read_hf_config(hf_dir, name="hf")
    if _architecture(config) != _architecture(hf_config):
        return False
    weights = load_compatible_weights(folder, model_on_meta(config))
    try:
        stored, *_ = _drop_unused(_add_prefix(find_weights(hf_dir), hf_config), hf_config)
        _require_compatible(stored, resolve_tied_head(stored, hf_config)[0], hf_dir)
        for entry in family_of(config).weight_map(config):
            if entry.native[0].startswith("transformer.h.0."):
                read = entry.from_hf([stored[name].read() for name in entry.hf])
                if not all(_equal_up_to_rounding(weights[n], t) for n, t in zip(entry.native, read, strict=True)):
                    return False
    finally:
        close()
    return True


def _architecture(config: ModelConfig) -> dict[str, Any]:
    """Return the Hugging Face config fields that determine the weights (not context length or tying)."""
    values = family_of(config).to_hf_config(config)
    return {k: v for k, v in values.items() if k not in ("max_position_embeddings", "tie_word_embeddings")}


def _equal_up_to_rounding(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.to(b.dtype), b) or torch.equal(a, b.to(a.dtype))


def read_hf_config(hf_dir: Path, name: str) -> ModelConfig:
    """Read the architecture of a Hugging Face folder. ``name`` is the default if config.json has no name."""
    if not hf_dir.is_dir():
        raise UserError(f"hf_dir {hf_dir}: no such folder; give a folder with {CONFIG} and the weights")
    if not (hf_dir / CONFIG).is_file():
        hint = "give a Hugging Face folder"
        if (hf_dir / WEIGHTS).exists():
            hint = f"it is already a checkpoint folder (it has {WEIGHTS})"
        raise UserError(f"hf_dir {hf_dir}: holds no {CONFIG}; {hint}")
    values = require_supported_format(hf_dir)
    try:
        config = config_from_hf(values)
    except UserError as error:
        raise UserError(f"hf_dir {hf_dir}: {one_line(error)}") from error
    return dataclasses.replace(config, name=config.name or name)


def _notes_of_config(hf_dir: Path) -> list[str]:
    """Return notes about keys of config.json that have no effect here."""
    values = read_json_object(hf_dir / CONFIG)
    notes = []
    if values.get("auto_map"):
        standard = f"using the standard architecture of {values.get('model_type')}"
        notes.append(f"warning: {CONFIG} names custom code (auto_map), which is not run; {standard}")
    if (kind := values.get("model_type")) in MULTIMODAL and isinstance(text := values.get("text_config"), dict):
        inner = text.get("model_type", MULTIMODAL[kind][0])
        notes.append(f"note: {kind} is multimodal; only its text model ({inner}) is read")
    # summary_first_dropout and classifier_dropout belong to heads that language models lack
    rates = {k: v for k, v in values.items() if k.endswith(("pdrop", "dropout")) and not k.startswith(("sum", "class"))}
    if used := [f"{key} {rate}" for key, rate in rates.items() if isinstance(rate, (int, float)) and rate > 0]:
        notes.append(f"note: {CONFIG} has {join_first(used)}: training here has no dropout in these places")
    return notes


def _read_tokenizer(hf_dir: Path, config: ModelConfig) -> tuple[Tokenizer | None, list[str]]:
    """Return the folder's tokenizer (None if there is none), and notes for the user.

    Converts a SentencePiece model if the folder has no tokenizer.json.
    """
    hint = "copy one and its companion files into that folder; training and evaluate also take --tokenizer_dir"
    if (hf_dir / "tokenizer.json").is_file():
        tokenizer = Tokenizer.load(hf_dir, "hf_dir", is_own=False)
        return tokenizer, tokenizer.notes + _vocab_size_warning(tokenizer, config)
    model = next((hf_dir / name for name in SENTENCEPIECE if (hf_dir / name).is_file()), None)
    if model is None:
        return None, [f"warning: {hf_dir} holds no tokenizer.json: {hint}"]
    try:
        tokenizer_files = read_tokenizer_files(hf_dir) | {"tokenizer.json": convert_sentencepiece(model)}
        tokenizer = Tokenizer(tokenizer_files, model.name, is_foreign=True)
    except ValueError as error:
        failed = f"warning: {hf_dir} holds no tokenizer.json, and {model.name} was not converted: {error}"
        return None, [f"{failed}; or copy a tokenizer.json and its companion files into that folder"]
    note = f"converted {model.name} to tokenizer.json; both encode the probe texts identically"
    return tokenizer, [note, *_vocab_size_warning(tokenizer, config)]


def convert_sentencepiece(model: Path) -> bytes:
    """Convert a SentencePiece model with transformers. Return the content of tokenizer.json.

    Raises ValueError if the conversion fails or a probe text is not encoded as by SentencePiece.
    """
    try:
        import sentencepiece
        from transformers import AutoTokenizer
    except ImportError as error:
        hint = "pip install transformers sentencepiece protobuf"
        raise ValueError(f"{error.name} is not installed; run: {hint}") from error
    try:
        original = sentencepiece.SentencePieceProcessor(model_file=str(model))  # transformers would log a damaged one
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fast = AutoTokenizer.from_pretrained(model.parent, local_files_only=True, trust_remote_code=False)
            fast.save_pretrained(folder)
            content = (Path(folder) / "tokenizer.json").read_bytes()
    except Exception as error:  # a damaged file can make transformers raise anything
        raise ValueError(one_line(error)[:200].rstrip(".")) from error
    for text in _PROBES:
        if fast.encode(text, add_special_tokens=False) != original.encode(text):
            raise ValueError(f"the converted tokenizer encodes {text!r} differently")
    return content


def _vocab_size_warning(tokenizer: Tokenizer, config: ModelConfig) -> list[str]:
    if tokenizer.vocab_size <= config.padded_vocab_size:
        return []
    return [
        f"warning: the tokenizer has {tokenizer.vocab_size:,} tokens, but the model embeds only "
        f"{config.padded_vocab_size:,}; texts that contain other tokens are rejected"
    ]


def _add_prefix(hf_weights: dict[str, Weight], config: ModelConfig) -> dict[str, Weight]:
    """Normalize weight name prefixes to the complete text model's.

    A checkpoint without the head (openai-community/gpt2) lacks a prefix. A multimodal model (google/gemma-3-4b-it) has
    an additional prefix.
    """
    expected = {name for entry in family_of(config).weight_map(config) for name in entry.hf}
    prefix = _hf_name(config, _EMBEDDING).split(".")[0]
    hf_weights, renamed = _split_experts(hf_weights, expected), {}
    for name, stored in hf_weights.items():
        candidates = f"{prefix}.{name}", name.replace("language_model.", "", 1)
        renamed[next((other for other in candidates if other in expected and other not in hf_weights), name)] = stored
    return renamed


def _split_experts(hf_weights: dict[str, Weight], expected: set[str]) -> dict[str, Weight]:
    """Split stacked experts, as in Qwen3.5's files, where the weight map has the weights of each expert."""
    split: dict[str, Weight] = {}
    for name, stored in hf_weights.items():
        experts, _, kind = name.rpartition(".")
        parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(kind, ("",))
        first = f"{experts}.0.{parts[0]}.weight".replace("language_model.", "", 1)
        if first not in expected or len(stored.shape) != 3:
            split[name] = stored
            continue
        n, rows, columns = stored.shape
        rows //= len(parts)
        for e, (i, part) in itertools.product(range(n), enumerate(parts)):
            read = functools.partial(_rows_of_expert, e, slice(i * rows, (i + 1) * rows))
            split[f"{experts}.{e}.{part}.weight"] = Dequantized((rows, columns), (stored,), read, stored.dtype)
    return split


def _rows_of_expert(expert: int, rows: slice, stack: Tensor) -> Tensor:
    return stack[expert, rows]


def _drop_unused(
    hf_weights: dict[str, Weight], config: ModelConfig
) -> tuple[dict[str, Weight], dict[str, Weight], list[str]]:
    """Return the weights to train, those of multi-token prediction (MTP), and notes.

    A note names the modules of other weights. A model with a score layer has no MTP.
    """
    family = family_of(config)
    mtp = {name: stored for name, stored in hf_weights.items() if family.is_mtp(name, config)}
    unused = {name for name in hf_weights if family.is_unused(name, config)}
    if config.head is not None:
        unused, mtp = unused | mtp.keys(), {}
    modules = Counter(name.removeprefix("model.").partition(".")[0] for name in sorted(unused))
    listed = ", ".join(f"{module} ({count})" for module, count in modules.items())
    notes = [f"dropped {len(unused)} weights that the text model does not use: {listed}"] if unused else []
    if mtp:
        notes.append(f"kept {len(mtp)} weights of multi-token prediction in {MTP}: they are exported, not trained")
    return {name: one for name, one in hf_weights.items() if name not in unused | mtp.keys()}, mtp, notes


def _hf_name(config: ModelConfig, native: str) -> str:
    config = dataclasses.replace(config, tie_embeddings=False)  # a tied head has no entry
    return next(entry.hf[0] for entry in family_of(config).weight_map(config) if entry.native == (native,))


def resolve_tied_head(hf_weights: dict[str, Weight], config: ModelConfig) -> tuple[ModelConfig, list[str]]:
    """Keep only the embedding if head and embedding are tied (N10). A head stored alone becomes the embedding.

    If both are stored and differ, untie them, as transformers 5 does (version 4 drops the head).
    """
    if not config.tie_embeddings:
        return config, []
    head, embedding = _hf_name(config, _HEAD), _hf_name(config, _EMBEDDING)
    if head not in hf_weights:
        return config, []
    a, b = hf_weights[head], hf_weights.get(embedding)
    if b is not None and ((a.shape, a.dtype) != (b.shape, b.dtype) or not torch.equal(a.read(), b.read())):
        note = f"warning: {CONFIG} ties {head} and {embedding}, but they differ: imported as untied"
        return dataclasses.replace(config, tie_embeddings=False), [note]
    hf_weights.setdefault(embedding, a)
    del hf_weights[head]
    return config, []


def _require_compatible(hf_weights: dict[str, Weight], config: ModelConfig, hf_dir: Path) -> None:
    expected = dict(to_hf_names(family_of(config).weight_map(config), model_on_meta(config).state_dict()))
    require_compatible(on_meta(hf_weights), expected, hf_dir, CONFIG)


def resolve_dtype(
    hf_weights: dict[str, Weight], config: ModelConfig, dtype: torch.dtype | None
) -> tuple[torch.dtype, list[str]]:
    """Return the dtype to convert weights to, and notes for the user.

    By default, it is the stored dtype, promoted if there are several.
    """
    entries = family_of(config).weight_map(config)
    half = torch.float16
    fixed = {name for entry in entries if resolve_weight_dtype(entry.native[0], half) is not half for name in entry.hf}
    types = {stored.dtype for name, stored in hf_weights.items() if name not in fixed}
    if dtype is not None:
        return dtype, []
    widest = functools.reduce(torch.promote_types, types)
    if len(types) == 1:
        return widest, []
    names = " and ".join(sorted(str(t).removeprefix("torch.") for t in types))
    return widest, [f"the weights have dtypes {names}: all are written as {str(widest).removeprefix('torch.')}"]


def _convert(
    hf_weights: dict[str, Weight], config: ModelConfig, dtype: torch.dtype, out_dir: Path
) -> Iterator[tuple[str, Tensor]]:
    """Yield (native name, weight).

    Large weights are memory-mapped: from the original file if unchanged, else from a temporary file.
    """
    for entry in family_of(config).weight_map(config):
        originals = [hf_weights[name].read() for name in entry.hf]
        for name, tensor in zip(entry.native, entry.from_hf(originals), strict=True):
            target_dtype = resolve_weight_dtype(name, dtype) or tensor.dtype
            if tensor.dtype != target_dtype or all(tensor is not original for original in originals):
                tensor = mmap_copy(tensor, out_dir, target_dtype)
            yield name, tensor
        del originals  # free dequantized weights
