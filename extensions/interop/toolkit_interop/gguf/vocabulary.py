"""Describe a tokenizer in llama.cpp's metadata: byte-level BPE, or BPE with SentencePiece's spaces and byte tokens."""

import json
from typing import Any

from toolkit.data.chat.sources import tokenizer_template
from toolkit.data.chat.template import eos_tokens
from toolkit.data.tokenizer import Tokenizer
from toolkit.errors import UserError
from toolkit.models.config import ModelConfig
from toolkit_interop.gguf.architecture import USE_INSTEAD

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# llama.cpp's name of the steps that split text before BPE. llama.cpp has the regular expressions under this name.
_PRE_TOKENIZERS = {
    ("ByteLevel True",): "gpt-2",
    ("Digits True", "ByteLevel True"): "smollm",
    (rf"Split {_WORDS}\p{{N}}{{1,3}}{_REST}", "ByteLevel False"): "llama-bpe",
    (rf"Split {_WORDS}\p{{N}}{_REST}", "ByteLevel False"): "qwen2",
    ("Punctuation Contiguous", "ByteLevel True", "Digits False", "Split [0-9][0-9][0-9]"): "falcon",
}


def add_vocabulary(writer: Any, tokenizer: Tokenizer, config: ModelConfig) -> list[str]:
    """Add tokens, merges or scores, special tokens and the chat template to a GGUFWriter. Return one-line notes.

    There is one token per row of the embedding; rows without a token get an unused one.
    """
    values = json.loads(tokenizer.files["tokenizer.json"])
    model, rows, notes = values["model"], config.padded_vocab_size, []
    if tokenizer.vocab_size > rows:
        excess = f"its {tokenizer.vocab_size} tokens exceed the model's {rows} embeddings"
        raise UserError(f"{tokenizer.name}: {excess}; use the model's tokenizer")
    if model.get("type", "BPE") != "BPE" or not model.get("merges"):
        kind = model.get("type", "BPE") + " without merges" * ("merges" in model)
        raise UserError(f"{tokenizer.name}: tokenizer.json: a {kind} model {USE_INSTEAD}")
    merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
    tokens, types = _tokens_and_types(model, values.get("added_tokens") or [], rows)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    if model.get("byte_fallback"):
        steps = [*_steps(values["normalizer"]), *_steps(values["pre_tokenizer"])]
        schemes = [step.get("prepend_scheme", "always") for step in steps if step["type"] == "Metaspace"]
        if "first" in schemes:
            notes.append("note: llama.cpp adds a space to text after a special token, which this tokenizer does not")
        writer.add_tokenizer_model("llama")
        adds_space = "always" in schemes or "first" in schemes or any(step["type"] == "Prepend" for step in steps)
        writer.add_add_space_prefix(adds_space)
        # SentencePiece joins the pair whose token has the highest score; the merges are in the same order.
        ranks = {"".join(pair): -float(rank) for rank, pair in reversed(list(enumerate(merges)))}
        writer.add_token_scores([ranks.get(token, 0.0) for token in tokens])
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(_pre_tokenizer(tokenizer, values))
        writer.add_token_merges([" ".join(pair) for pair in merges])
    eos = list(stop_tokens(tokenizer).values())
    named = {"pad": tokenizer.special_tokens.get("pad_token"), "unk": model.get("unk_token")}
    ids = {name: tokenizer.added_tokens.get(text or "") for name, text in named.items()}
    ids |= {"bos": tokenizer.bos_id, "eos": next(iter(eos), None), "eot": next(iter(eos[1:]), None)}
    for name, i in ids.items():
        if i is not None:
            getattr(writer, f"add_{name}_token_id")(i)
    writer.add_add_bos_token(tokenizer.adds_bos)
    if (template := tokenizer_template(tokenizer)) is not None:
        writer.add_chat_template(template[1])
    return notes


def stop_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    """Return {text: id} of the tokens that end an answer: EOS, then others that end a turn."""
    texts, ids = {i: text for text, i in tokenizer.added_tokens.items()}, eos_tokens(tokenizer)
    listed = [tokenizer.eos_id, *(ids if isinstance(ids, list) else [ids])]
    return {texts[i]: i for i in listed if i in texts}


def _tokens_and_types(model: dict[str, Any], added: list[dict[str, Any]], rows: int) -> tuple[list[str], list[int]]:
    import gguf

    kinds, has_bytes = gguf.TokenType, bool(model.get("byte_fallback"))
    tokens, types = [f"[PAD{i}]" for i in range(rows)], [int(kinds.UNUSED)] * rows
    for token, i in model["vocab"].items():
        is_byte = has_bytes and len(token) == 6 and token.startswith("<0x") and token.endswith(">")
        kind = kinds.BYTE if is_byte else kinds.UNKNOWN if token == model.get("unk_token") else kinds.NORMAL
        tokens[i], types[i] = token, int(kind)
    for entry in added:
        text, i, is_special = entry["content"], entry["id"], entry["special"]
        tokens[i] = text.replace("\u2581", " ") if has_bytes and not is_special else text
        if types[i] != kinds.UNKNOWN:
            types[i] = int(kinds.CONTROL if is_special else kinds.USER_DEFINED)
    return tokens, types


def _steps(part: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Return the steps of a normalizer or pre-tokenizer."""
    nested = None if part is None else part.get("pretokenizers", part.get("normalizers"))
    return [] if part is None else [part] if nested is None else [step for one in nested for step in _steps(one)]


def _pre_tokenizer(tokenizer: Tokenizer, values: dict[str, Any]) -> str:
    """Return llama.cpp's name of a byte-level tokenizer's pre-tokenizer."""
    keys = {"ByteLevel": "use_regex", "Digits": "individual_digits", "Punctuation": "behavior"}
    steps = []
    for step in _steps(values["pre_tokenizer"]):
        kind = step["type"]
        value = (step.get("pattern") or {}).get("Regex") if kind == "Split" else step.get(keys.get(kind, ""), True)
        is_changed = step.get("add_prefix_space") or step.get("invert") or step.get("behavior") in ("Removed", "Merged")
        steps.append("" if is_changed else f"{kind} {value}")
    normalizers = [step["type"] for step in _steps(values["normalizer"])]
    name = _PRE_TOKENIZERS.get(tuple(steps))
    if name is None or normalizers not in ([], ["NFC"]):
        part = "normalizer" if name else "pre_tokenizer"
        raise UserError(f"{tokenizer.name}: tokenizer.json: this {part} {USE_INSTEAD}")
    return name
