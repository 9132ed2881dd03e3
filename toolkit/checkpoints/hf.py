"""Out to Hugging Face: a model folder becomes one that ``AutoModelForCausalLM.from_pretrained`` loads (law M2)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from toolkit.checkpoints.folder import fitting_weights, load_model, read_model_config
from toolkit.checkpoints.store import write_folder
from toolkit.data.tokenizer import Tokenizer
from toolkit.errors import UserError
from toolkit.models.config import ModelConfig
from toolkit.models.families import family_of
from toolkit.models.families.tables import Map
from toolkit.models.gpt import GPT

MAX_SHARD_BYTES = 5_000_000_000
# What the safetensors format calls the types that a model's weights can have.
_FORMAT_NAMES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


def export_hf(
    checkpoint_dir: str | Path,
    out_dir: str | Path,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write a complete Hugging Face folder, whole or not at all, with about one weight in memory at a time.

    Args:
        checkpoint_dir: A model folder.
        out_dir: The new folder; one that is there must be empty.
        dtype: Type of the weights; as they are when not given.
        max_shard_bytes: Weights are split into files of at most this size (a single one may be larger).

    Raises:
        UserError: the model cannot be read, out_dir is in use, or the disk is full.
    """
    checkpoint_dir, out_dir = Path(checkpoint_dir), Path(out_dir)
    if out_dir.exists() and (not out_dir.is_dir() or any(out_dir.iterdir())):
        raise UserError(f"out_dir {out_dir}: already there and not empty; give a new folder")
    config = read_model_config(checkpoint_dir)
    tokenizer = None
    if (checkpoint_dir / "tokenizer.json").is_file():
        tokenizer = Tokenizer.load(checkpoint_dir, flag="checkpoint_dir")
    with torch.device("meta"):
        model = GPT(config)
    weights = fitting_weights(checkpoint_dir, model)

    def write(folder: Path) -> None:
        _write_weights(folder, weights, config, dtype, max_shard_bytes)
        if tokenizer is not None:
            tokenizer.save(folder)
        _write_settings(folder, config, tokenizer, dtype or weights["transformer.wte.weight"].dtype)
        _write_model_card(folder / "README.md", config, sum(p.numel() for p in model.parameters()))

    write_folder(out_dir, write, flag="out_dir")


@torch.no_grad()
def verify_hf(checkpoint_dir: str | Path, out_dir: str | Path) -> float:
    """Load both folders in float32 and compare their logits on random tokens.

    Returns:
        The largest difference, relative to the largest logit. Ours are rounded to the type of the exported weights
        first, so that the same bound (1e-4 is ample) holds for every type.

    Raises:
        UserError: transformers is not installed.
    """
    try:
        import transformers
    except ImportError as error:
        raise UserError("--verify true: needs transformers; run: pip install 'transformers>=4.50'") from error
    transformers.utils.logging.disable_progress_bar()
    exported = json.loads((Path(out_dir) / "config.json").read_text())["torch_dtype"]
    ours = load_model(checkpoint_dir, dtype=getattr(torch, exported)).float()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(str(out_dir), local_files_only=True).float()
    config = ours.config
    draw = torch.Generator().manual_seed(0)
    shape = (2, min(config.block_size, 64))
    tokens = torch.randint(config.vocab_size or config.padded_vocab_size, shape, generator=draw)
    a, b = ours.eval()(tokens), theirs.eval()(input_ids=tokens).logits
    return float((a - b).abs().max() / b.abs().max())


def _write_weights(
    folder: Path, weights: dict[str, Tensor], config: ModelConfig, dtype: torch.dtype | None, max_shard_bytes: int
) -> None:
    maps = family_of(config).weights(config)
    # The header of a file comes before its tensors: run the conversion on the meta device to learn what they will be.
    meta = {name: torch.empty_like(t, device="meta", dtype=dtype) for name, t in weights.items()}
    shards = list(_split(_convert(maps, meta, None), max_shard_bytes))
    if len(shards) == 1:
        files = ["model.safetensors"]
    else:
        files = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    tensors = _convert(maps, weights, dtype)
    for file, shard in zip(files, shards, strict=True):
        _write_safetensors(folder / file, shard, tensors)
    if len(shards) > 1:
        where = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
        size = sum(t.nbytes for shard in shards for t in shard.values())
        _write_json(
            folder / "model.safetensors.index.json",
            {"metadata": {"total_size": size}, "weight_map": dict(sorted(where.items()))},
        )


def _convert(maps: list[Map], weights: dict[str, Tensor], dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
    """Yield (Hugging Face name, tensor), converting one entry of the family's table at a time."""
    for entry in maps:
        yield from zip(entry.theirs, entry.to_hf([weights[name].to(dtype) for name in entry.ours]), strict=True)


def _split(tensors: Iterable[tuple[str, Tensor]], max_bytes: int) -> Iterator[dict[str, Tensor]]:
    """Group tensors, in order, into files of at most ``max_bytes``."""
    shard: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors:
        if shard and size + tensor.nbytes > max_bytes:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor
        size += tensor.nbytes
    yield shard


def _write_safetensors(path: Path, expected: dict[str, Tensor], tensors: Iterator[tuple[str, Tensor]]) -> None:
    """Take the ``expected`` tensors from the iterator into one file, one at a time.

    The library's ``save_file`` wants them all in memory. The format (https://huggingface.co/docs/safetensors): 8 bytes
    little-endian length of the header; the header, JSON with type, shape and place of every tensor; their bytes, in C
    order, without gaps.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in expected.items():
        place = [end, end := end + tensor.nbytes]
        header[name] = {"dtype": _FORMAT_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": place}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the tensors begin on a multiple of 8 bytes
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for wanted in expected:
            name, tensor = next(tensors)
            meta = expected[wanted]
            assert (name, tensor.shape, tensor.dtype) == (wanted, meta.shape, meta.dtype), f"{name} is not {wanted}"
            _write_bytes(file, tensor)


def _write_bytes(file: IO[bytes], tensor: Tensor) -> None:
    file.write(memoryview(tensor.contiguous().flatten().view(torch.uint8).numpy()))


def _write_settings(folder: Path, config: ModelConfig, tokenizer: Tokenizer | None, dtype: torch.dtype) -> None:
    """Write config.json, and generation_config.json where the tokenizer's files did not bring one."""
    ids = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id} if tokenizer is not None else {}
    values = family_of(config).to_hf(config, **ids)
    _write_json(folder / "config.json", {**values, "torch_dtype": str(dtype).removeprefix("torch.")})
    if not (folder / "generation_config.json").exists():
        _write_json(folder / "generation_config.json", {k: v for k, v in ids.items() if v is not None})


def _write_model_card(path: Path, config: ModelConfig, parameters: int) -> None:
    name = config.name or "A language model"
    path.write_text(
        f"""---
library_name: transformers
pipeline_tag: text-generation
---

# {name}

A causal language model with {parameters:,} parameters ({config.n_layer} layers, width {config.n_embd}, context
{config.block_size:,} tokens), trained and exported with `toolkit`.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("path/to/this/folder")
tokenizer = AutoTokenizer.from_pretrained("path/to/this/folder")
```
""",
        encoding="utf-8",
    )


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
