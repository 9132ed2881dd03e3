"""Export to Hugging Face: write a folder that transformers' ``from_pretrained`` loads (M2)."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from toolkit.checkpoints.adapters import has_adapters_only, require_adapters
from toolkit.checkpoints.find import CONFIG as MODEL_CONFIG
from toolkit.checkpoints.finite import warn_nonfinite
from toolkit.checkpoints.folder import load_compatible_weights, read_model_config, require_language_model
from toolkit.checkpoints.hf.card import auto_class, write_model_card
from toolkit.checkpoints.hf.files import write_safetensors
from toolkit.checkpoints.hf.mtp import read_mtp
from toolkit.checkpoints.hf.reader import CONFIG, INDEX, SINGLE
from toolkit.checkpoints.hf.sums import write_sums
from toolkit.checkpoints.merge import MergedWeights, copy_files, random_tokens, relative_difference
from toolkit.checkpoints.store import require_new_folder, write_folder
from toolkit.checkpoints.weights import Tensors, resolve_weight_dtype
from toolkit.data.chat.template import GENERATION_FILE, eos_tokens
from toolkit.data.tokenizer import FILE_PATTERNS, Tokenizer
from toolkit.errors import GuardError, UserError, notice, one_line, require_package
from toolkit.extension import require_single
from toolkit.io.safe_parse import read_json_object
from toolkit.models.config import Fields, ModelConfig, ModelOverrides
from toolkit.models.families import family_of
from toolkit.models.families.tables import WeightMapping
from toolkit.models.fp8 import hide_torchao_warnings
from toolkit.models.gpt import model_on_meta
from toolkit.models.quantizer import Packing

MAX_SHARD_BYTES = 5_000_000_000  # per weights file; a larger tensor gets a file to itself


def export_hf(
    checkpoint_dir: str | Path,
    out_dir: str | Path,
    dtype: torch.dtype | None = None,
    merge: bool = False,
    base_checkpoint_dir: str | Path | None = None,
    check: Callable[[Path], None] | None = None,
    family_options: Fields | None = None,
    flag: str = "out_dir",
    quantize: str | None = None,
) -> None:
    """Write a Hugging Face folder with checksums, atomically. About one weight is in memory at a time.

    Args:
        checkpoint_dir: A model folder.
        out_dir: The new folder; an existing one must be empty.
        dtype: Dtype of the weights; unchanged by default.
        merge: Whether to merge adapters during the export if the folder holds no merged weights.
        base_checkpoint_dir: Base model of the adapters; by default the path recorded in training.
        check: Called with the written folder before it is renamed to out_dir; if it raises, nothing is created.
        family_options: Options of an extension's family to override. Weights that the new model lacks are dropped.
        flag: What the user sets to change ``out_dir``, for messages.
        quantize: Format of quantized weights; by default what the model was trained with. "dense" writes their values
            in ``dtype``, "none" the weights before quantization.
    """
    checkpoint_dir, out_dir = Path(checkpoint_dir), Path(out_dir)
    require_new_folder(out_dir)
    config, weights = read_model(checkpoint_dir, merge, base_checkpoint_dir, dtype)
    if family_options:
        config, weights = _change_options(config, weights, family_options)
    base = weights.info.base if isinstance(weights, MergedWeights) else None
    folder_dtype = dtype or weights["transformer.wte.weight"].dtype
    packing = make_packing(config, quantize, folder_dtype)
    quantization = "" if packing is None else packing.note
    if packing is None and config.qat is not None:
        quantization = f"weights before quantization, of a model trained to compute with {config.qat['weights']}"
    if quantization:
        notice(f"note: {quantization}")
    if packing is not None and quantize == "dense":
        weights, packing = packing.dense(weights), None
    mtp, mtp_keys = read_mtp(base or checkpoint_dir, config)
    if mtp:
        notice(f"note: the {len(mtp)} weights of multi-token prediction are the base model's, not trained with it")
    tokenizer = None
    if (checkpoint_dir / "tokenizer.json").is_file():
        tokenizer = Tokenizer.load(checkpoint_dir, flag="checkpoint_dir")

    def write(folder: Path) -> None:
        warn_nonfinite(_write_weights(folder, weights, config, dtype, mtp, packing), out_dir)
        if tokenizer is None:
            copy_files(checkpoint_dir, folder, FILE_PATTERNS)
        else:
            pad = None if config.head is None else _pad_id(config, tokenizer)  # transformers pads batches of texts
            length = config.block_size if config.head == "classification" else None  # rewards cut the prompt instead
            (tokenizer if pad is None else tokenizer.with_pad(pad, length)).save(folder, for_transformers=True)
        ids = _token_ids(checkpoint_dir, base, config, tokenizer)
        keys = mtp_keys if packing is None else mtp_keys | {"quantization_config": packing.config}
        _write_config_files(folder, config, ids, folder_dtype, keys)
        has_tokenizer = tokenizer is not None
        write_model_card(folder / "README.md", config, checkpoint_dir, has_tokenizer, quantization=quantization)
        write_sums(folder)
        if check is not None:
            check(folder)

    write_folder(out_dir, write, flag)


def make_packing(config: ModelConfig, quantize: str | None, dtype: torch.dtype) -> Packing | None:
    """Return how to quantize an export of ``dtype``, see :func:`export_hf`; None for weights before quantization."""
    kind = quantize or (config.qat or {}).get("weights", "none")
    if kind == "none":
        return None
    packing: Packing = require_single("quantizer", f"--quantize {kind}").make_packing(config, kind, dtype)
    return packing


@torch.no_grad()
def verify_hf(
    checkpoint_dir: str | Path,
    out_dir: str | Path,
    base_checkpoint_dir: str | Path | None = None,
    quantize: str | None = None,
) -> float:
    """Return the largest fp32 logit difference between the two folders, relative to the largest logit.

    The native weights are merged and rounded to the exported dtype first, so one tolerance (1e-4) fits every dtype.
    Quantized weights of the folder must equal the native ones.

    Raises GuardError if transformers cannot load the folder, or loads other quantized weights.
    """
    require_transformers("--verify true")
    import transformers

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()  # it lists each weight of multi-token prediction as unexpected
    exported = getattr(torch, json.loads((Path(out_dir) / CONFIG).read_text())["torch_dtype"])
    folder = Path(checkpoint_dir)
    config, weights = read_model(folder, has_adapters_only(folder), base_checkpoint_dir, exported)
    packing = make_packing(config, quantize, exported)
    maps = family_of(config).weight_map(config)
    config = replace(config, qat=None)
    if packing is not None:
        weights = packing.dense(weights)
    native = model_on_meta(config)
    rounded = {name: tensor.to(resolve_weight_dtype(name, exported)).float() for name, tensor in weights.items()}
    native.load_state_dict(rounded, assign=True)
    folder, native = Path(out_dir), native.eval()
    if packing is None or quantize == "dense":
        hf = load_with_transformers(folder, config).eval()
    else:
        hf = packing.load_verified(folder, config, dict(to_hf_names(maps, weights, exported)), random_tokens(config))
    tokens = random_tokens(config)
    if config.head in (None, "token_reward"):
        return relative_difference(native(tokens), hf(input_ids=tokens, use_cache=False).logits)
    tokens[:, -1] = 0 if hf.config.get_text_config().pad_token_id else 1  # it scores the last token that is no padding
    scores = torch.cat([hf(input_ids=row[None], use_cache=False).logits for row in tokens])
    return relative_difference(native(tokens)[:, -1], scores)


def require_transformers(option: str, config: ModelConfig | None = None) -> None:
    """Raise UserError if transformers, which ``option`` needs, is not installed or lacks the model family."""
    if config is not None and not family_of(config).is_in_transformers:
        raise UserError(f"{option}: transformers has no class for {config.family!r}; remove {option.split()[0]}")
    require_package(option, "transformers", "4.50")


def load_with_transformers(folder: Path, model: ModelConfig, dtype: torch.dtype = torch.float32) -> Any:
    """Load an exported folder. Raises GuardError if transformers cannot."""
    import transformers

    hide_torchao_warnings()  # transformers imports it
    is_old = tuple(map(int, transformers.__version__.split(".")[:2])) < (4, 56)
    # Load in the dtype directly: converting to float32 afterwards would leave constants rounded.
    options = {"torch_dtype" if is_old else "dtype": dtype, "local_files_only": True}
    try:
        return getattr(transformers, auto_class(model)).from_pretrained(str(folder), **options)
    except Exception as error:  # any failure to load, such as an unknown architecture
        reason = one_line(error)[:300]
        raise GuardError(
            f"transformers {transformers.__version__} cannot load the export: {reason}; try another version"
        ) from error


def read_model(
    folder: Path,
    merge: bool,
    base_checkpoint_dir: str | Path | None,
    dtype: torch.dtype | None,
    is_text_model: bool = False,
) -> tuple[ModelConfig, Mapping[str, Tensor]]:
    """Return the architecture and the weights of a model folder, merged on access if it holds only adapters.

    ``is_text_model``: Raise UserError for a model with a score layer.
    """
    if is_text_model and (folder / MODEL_CONFIG).is_file():  # adapters with a score layer have one
        require_language_model(read_model_config(folder), f"checkpoint_dir {folder}")
    require_adapters(folder, merge=merge, base_checkpoint_dir=base_checkpoint_dir)
    if not has_adapters_only(folder):
        config = read_model_config(folder)
        return config, load_compatible_weights(folder, model_on_meta(config))
    if not merge:
        raise UserError(
            f"checkpoint_dir {folder}: holds adapters and no merged weights; --merge true merges them during the "
            "export, toolkit convert_to_peft exports only the adapters"
        )
    merged = MergedWeights(folder, base_checkpoint_dir, dtype)
    return merged.config, merged


def _change_options(
    config: ModelConfig, weights: Mapping[str, Tensor], options: Fields
) -> tuple[ModelConfig, Mapping[str, Tensor]]:
    changed = config.override(ModelOverrides(family_options=options))
    family_of(changed).validate(changed)
    shapes = {name: tensor.shape for name, tensor in model_on_meta(changed).state_dict().items()}
    for name, shape in shapes.items():
        if name not in weights or weights[name].shape != shape:
            flags = ", ".join(f"--family_options.{option} {value}" for option, value in options.items())
            needed = f"{name} of shape {tuple(shape)}"
            raise UserError(f"{flags}: needs {needed}, which the checkpoint lacks; change or remove these options")
    return changed, {name: weights[name] for name in shapes}


def _write_weights(
    folder: Path,
    weights: Mapping[str, Tensor],
    config: ModelConfig,
    dtype: torch.dtype | None,
    mtp: Tensors,
    packing: Packing | None,
) -> list[str]:
    """Write the safetensors files, ``mtp`` unchanged. Return the names of tensors that contain NaN or Inf."""
    pack = iter if packing is None else packing.pack
    maps = complete_weight_map(config, weights)
    # The header precedes the tensors: convert on the meta device first to get shapes and dtypes.
    dtypes = {name: resolve_weight_dtype(name, dtype) for name in weights}
    meta = {name: torch.empty_like(t, device="meta", dtype=dtypes[name]) for name, t in weights.items()}
    shards = list(_split(chain(pack(to_hf_names(maps, meta)), mtp.items())))
    n = len(shards)
    files = [SINGLE] if n == 1 else [f"model-{i:05d}-of-{n:05d}.safetensors" for i in range(1, n + 1)]
    tensors, nonfinite = chain(pack(to_hf_names(maps, weights, dtype)), mtp.items()), []
    for file, shard in zip(files, shards, strict=True):
        nonfinite += write_safetensors(folder / file, shard, tensors)
    if n > 1:
        where = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
        size = sum(t.nbytes for shard in shards for t in shard.values())
        write_config(folder / INDEX, {"metadata": {"total_size": size}, "weight_map": dict(sorted(where.items()))})
    return nonfinite


def complete_weight_map(config: ModelConfig, weights: Mapping[str, Tensor]) -> list[WeightMapping]:
    """Return the family's weight map. Raise UserError unless it lists exactly these weights."""
    maps = family_of(config).weight_map(config)
    listed = {name for entry in maps for name in entry.native}
    present = weights.keys() - ({"lm_head.weight"} if config.tie_embeddings else set())
    if wrong := sorted(listed ^ present):
        verb = "has no" if wrong[0] in present else "requires"
        raise UserError(
            f"{wrong[0]}: the Hugging Face model type {config.family!r} {verb} such a weight; this model cannot be "
            "exported"
        )
    return maps


def to_hf_names(
    maps: list[WeightMapping], weights: Mapping[str, Tensor], dtype: torch.dtype | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield (Hugging Face name, tensor), converting one entry of the weight map at a time."""
    for entry in maps:
        native = [weights[name].to(resolve_weight_dtype(name, dtype)) for name in entry.native]
        yield from zip(entry.hf, entry.to_hf(native), strict=True)


def _split(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[Tensors]:
    """Split tensors, in order, into shards of at most :data:`MAX_SHARD_BYTES`."""
    shard: Tensors = {}
    size = 0
    for name, tensor in tensors:
        if shard and size + tensor.nbytes > MAX_SHARD_BYTES:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor
        size += tensor.nbytes
    yield shard


def _token_ids(folder: Path, base: Path | None, config: ModelConfig, tokenizer: Tokenizer | None) -> Fields:
    """Return BOS, EOS and PAD token ids.

    BOS and EOS come from the tokenizer if it defines them, PAD from the original Hugging Face config if there is one.
    """
    original, generation = _original_config(folder, base), read_json_object(folder / GENERATION_FILE, optional=True)
    from_tokenizer: Fields = {}
    if tokenizer is not None:
        pad = tokenizer.added_tokens.get(tokenizer.special_tokens.get("pad_token", ""))
        from_tokenizer = {"bos_token_id": tokenizer.bos_id, "eos_token_id": eos_tokens(tokenizer), "pad_token_id": pad}
    ids: Fields = {}
    for values in (original, generation, from_tokenizer):  # the last one that has an id
        ids |= {name: value for name, value in values.items() if value is not None}
    if config.head is not None and tokenizer is not None:  # the score is read before the padding
        ids["pad_token_id"] = _pad_id(config, tokenizer)
    elif original:
        ids["pad_token_id"] = original.get("pad_token_id")
    # Written even if None: the default id of some classes is outside a small vocabulary, which they reject.
    return {name: _embedded_ids(ids.get(name), config) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}


def _pad_id(config: ModelConfig, tokenizer: Tokenizer) -> int | None:
    """Return the token that pads texts for a score layer: the tokenizer's if the model embeds it, else eos."""
    pad = tokenizer.pad_id
    return pad if pad is None or pad < config.padded_vocab_size else tokenizer.eos_id


def _embedded_ids(ids: Any, config: ModelConfig) -> int | list[int] | None:
    """Drop token ids outside the padded vocabulary. Return None if none remains."""
    listed = ids if isinstance(ids, list) else [ids]
    embedded = [i for i in listed if type(i) is int and 0 <= i < config.padded_vocab_size]
    return embedded if isinstance(ids, list) and embedded else next(iter(embedded), None)


def _original_config(folder: Path, base: Path | None) -> Fields:
    """Return the original config.json of the model or of its base model; empty if there is none."""
    folders = [folder] if base is None else [folder, base]
    values = next(filter(None, (read_json_object(one / CONFIG, optional=True) for one in folders)), {})
    text = values.get("text_config")  # of a multimodal model
    return (text if isinstance(text, dict) else {}) | {k: v for k, v in values.items() if v is not None}


def _write_config_files(folder: Path, config: ModelConfig, ids: Fields, dtype: torch.dtype, mtp_keys: Fields) -> None:
    """Write config.json, and generation_config.json unless a copied one defines eos_token_id."""
    values = family_of(config).to_hf_config(config) | mtp_keys
    write_config(folder / CONFIG, {**values, **ids, "torch_dtype": str(dtype).removeprefix("torch.")})
    generation = read_json_object(folder / GENERATION_FILE, optional=True)
    if generation.get("eos_token_id") is None:
        ids = {name: value for name, value in ids.items() if value is not None}
        write_config(folder / GENERATION_FILE, generation | ids)


def write_config(path: Path, values: Fields) -> None:
    """Write a JSON file as transformers does."""
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
