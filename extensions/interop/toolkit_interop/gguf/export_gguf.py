"""Export to GGUF, the format of llama.cpp and Ollama: weights, tokenizer and chat template in one file (M2).

GGUF has the native layout of weights. Only llama.cpp's "llama" architecture pairs adjacent rows of queries and keys for
RoPE. Source: ``conversion/`` in llama.cpp's repository, and the names of the ``gguf`` package.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from toolkit.checkpoints.adapters import has_adapters_only
from toolkit.checkpoints.finite import nonfinite_tensors, warn_nonfinite
from toolkit.checkpoints.hf.export_hf import complete_weight_map, make_packing, read_model
from toolkit.checkpoints.scratch import trim_after
from toolkit.checkpoints.store import write_file
from toolkit.data.tokenizer import Tokenizer
from toolkit.errors import UserError
from toolkit.io.atomic import file_error, write_atomic
from toolkit.models.config import ModelConfig
from toolkit.models.families.tables import WeightMapping
from toolkit_interop.gguf import architecture
from toolkit_interop.gguf.vocabulary import add_vocabulary, stop_tokens

NamedTensors = Iterator[tuple[str, Tensor]]
# Kept in float32, as llama.cpp's converter does: norms, the router, learned positions and RoPE factors.
_FLOAT32 = ("norm", "ffn_gate_inp", "position_embd", "rope_f")


def export_gguf(
    checkpoint_dir: Path, out_path: Path, dtype: str = "F16", merge: bool = False, base: str | None = None
) -> list[str]:
    """Write a new GGUF file atomically, with about one weight in memory at a time, and a Modelfile if there is none.

    ``dtype`` is that of the command. Where rows are not complete blocks of 32, Q8_0 stores F16, others are a UserError.
    ``merge`` merges adapters into ``base``, by default the base model recorded in training. Returns one-line notes.
    """
    try:
        import gguf

        gguf.GGMLQuantizationType[dtype]
    except (ImportError, KeyError) as error:  # 0.17 has no MXFP4
        raise UserError("convert_to_gguf: needs gguf; run: pip install 'gguf>=0.18'") from error
    merged_dtype = torch.float32 if has_adapters_only(checkpoint_dir) else None  # rounded once
    config, weights = read_model(checkpoint_dir, merge, base, merged_dtype, is_text_model=True)
    architecture.require_supported(config, checkpoint_dir)
    _require_new_file(out_path)
    maps, tokenizer = complete_weight_map(config, weights), Tokenizer.load(checkpoint_dir, flag="checkpoint_dir")
    writer = gguf.GGUFWriter(None, architecture.ARCHITECTURES[config.family])
    # ALL_F32, MOSTLY_MXFP4_MOE, others MOSTLY_{dtype}
    writer.add_file_type(next(kind for kind in gguf.LlamaFileType if f"_{dtype}" in kind.name))
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    architecture.add_architecture(writer, config)
    notes = add_vocabulary(writer, tokenizer, config)
    if (context := architecture.context_length(config)) < config.block_size:
        reason = f"llama.cpp has no sliding windows for {config.family}: the context is limited to the window"
        notes.append(f"note: {reason}, {context} of {config.block_size} tokens")
    meta = {name: torch.empty_like(tensor, device="meta") for name, tensor in weights.items()}
    if config.qat is not None:
        weights, note = _quantized_values(config, weights, dtype)
        notes.append(f"note: {note}")
    shapes, tensors = (_to_gguf_names(config, maps, source) for source in (meta, weights))

    def write(tmp: Path) -> None:
        warn_nonfinite(_write(writer, tmp, shapes, tensors, dtype), out_path)
        notes.extend(_write_modelfile(out_path, tokenizer))  # before the rename: a killed command can be repeated

    write_file(out_path, write, flag="out_path")
    return notes


def _quantized_values(
    config: ModelConfig, weights: Mapping[str, Tensor], dtype: str
) -> tuple[Mapping[str, Tensor], str]:
    """Return the weights to write of a model that was trained with quantized weights, and a note.

    4-bit types lose less from the weights before quantization (measured with Q4_0 and MXFP4).
    """
    assert config.qat is not None
    trained = config.qat["weights"]
    if dtype in ("F32", "F16", "BF16"):
        packing = make_packing(config, "dense", weights["transformer.wte.weight"].dtype)
        assert packing is not None
        return packing.dense(weights), packing.note + f"; rounded to {dtype}" * (dtype != "F32")
    scale = " (signed maximum / -8 instead of largest magnitude / 7.5)"
    scale *= dtype == "Q4_0" and trained.endswith("int4")
    note = f"{dtype} rounds the weights otherwise than training with {trained}{scale}"
    return weights, f"{note}; toolkit convert_to_hf writes the trained numbers"


def _write_modelfile(out_path: Path, tokenizer: Tokenizer) -> list[str]:
    """Write a Modelfile next to ``out_path``; keep the Modelfile of another model. Return one-line notes."""
    stops = [f'PARAMETER stop "{text}"' for text in stop_tokens(tokenizer)]
    content = "\n".join([f"FROM ./{out_path.name}", *stops, ""]).encode()
    first, second = out_path.with_name("Modelfile"), out_path.with_suffix(".Modelfile")
    for path in (first, second):
        if not path.exists() or (path.is_file() and path.read_bytes() == content):
            write_atomic(path, content)
            return [] if path == first else [f"note: {first} already exists and is kept; wrote {second}"]
    return [f"note: {second} already exists and is kept"]


def _require_new_file(path: Path) -> None:
    if path.suffix != ".gguf":
        raise UserError(f"out_path {path}: must be a file that ends in .gguf, such as {path}/model.gguf")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            raise UserError(f"out_path {path}: already exists; give a new file")
    except OSError as error:
        raise file_error(path.parent, error) from error


def _write(writer: Any, path: Path, shapes: NamedTensors, tensors: NamedTensors, dtype: str) -> list[str]:
    """Write the metadata, then one tensor after the other. Return the names of tensors that contain NaN or Inf."""
    import gguf

    for name, tensor in shapes:
        kind = gguf.GGMLQuantizationType[_type_of(name, tensor, dtype)]
        block, size = gguf.GGML_QUANT_SIZES[kind]
        # With a raw_dtype, the writer uses the NumPy dtype only to tell packed bytes from values.
        writer.add_tensor_info(name, tensor.shape, np.dtype(np.float32), tensor.numel() // block * size, kind)
    nonfinite: list[str] = []
    try:
        writer.write_header_to_file(path)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        file = writer.fout[0]
        writer.write_padding(file, file.tell())
        for name, tensor in tensors:
            stored = _convert(tensor, _type_of(name, tensor, dtype))
            # Not writer.write_tensor_data: NumPy's tofile loses the errno of a full disk.
            file.write(stored.data)
            writer.write_padding(file, stored.nbytes)
            has_overflow = stored.dtype == np.float16 and not np.isfinite(stored).all()
            nonfinite += [name] if has_overflow else nonfinite_tensors({name: tensor})
            numel = tensor.numel()
            del tensor, stored
            trim_after(numel)
    finally:
        writer.close()
    return nonfinite


def _to_gguf_names(config: ModelConfig, maps: list[WeightMapping], weights: Mapping[str, Tensor]) -> NamedTensors:
    """Yield (GGUF name, tensor), converting one entry of the weight map at a time."""
    import gguf

    arch = architecture.ARCHITECTURES[config.family]
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(kinds[arch], config.n_layer)
    for entry in maps:
        tensors, hf_names = [weights[name] for name in entry.native], entry.hf
        if ".experts." in hf_names[0]:  # stacked, as the native tensor
            hf_names = (hf_names[0].replace(".experts.0.", ".experts."),)
        elif ".norms." in hf_names[0]:  # one per head
            tensors, hf_names = [tensors[0].unflatten(0, (len(hf_names), -1))], (hf_names[0].replace(".norms.0", ""),)
        elif len(entry.native) != len(hf_names):  # fused on one side; other transforms leave the native layout
            tensors = entry.to_hf(tensors)
        for hf_name, tensor in zip(hf_names, tensors, strict=True):
            stem, _, kind = hf_name.rpartition(".")
            name = names.get_name(stem)
            assert name is not None, f"{arch} has no {stem}"
            yield f"{name}.{kind}", _convert_layout(f"{name}.{kind}", tensor, config)
    yield from architecture.rope_tensors(config)


def _convert_layout(name: str, tensor: Tensor, config: ModelConfig) -> Tensor:
    """Convert a native tensor to the layout that llama.cpp expects."""
    if config.norm_offset and "norm" in name:
        return tensor.float() + 1
    if "ffn_gate_inp_shexp" in name:
        return tensor.flatten()
    if architecture.ARCHITECTURES[config.family] == "llama" and (".attn_q." in name or ".attn_k." in name):
        heads = config.n_head if ".attn_q." in name else config.n_query_groups
        return tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
    return tensor


def _type_of(name: str, tensor: Tensor, dtype: str) -> str:
    import gguf

    if tensor.ndim == 1 or any(part in name for part in _FLOAT32):
        return "F32"
    block, _ = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[dtype]]
    if tensor.shape[-1] % block:
        if dtype == "Q8_0":
            return "F16"
        raise UserError(f"--dtype {dtype}: {name} has rows of {tensor.shape[-1]}, not a multiple of {block}; use Q8_0")
    # Embeddings lose more with fewer bits than other matrices.
    return "Q8_0" if block > 1 and name.startswith(("token_embd.", "output.")) else dtype


def _convert(tensor: Tensor, kind: str) -> Any:
    """Return the NumPy array to write."""
    import gguf

    if kind == "BF16":
        return tensor.bfloat16().contiguous().view(torch.int16).numpy()
    values = tensor.half() if kind == "F16" else tensor.float()
    return gguf.quantize(values.contiguous().numpy(), gguf.GGMLQuantizationType[kind])
