"""What transformers reads from the files beside tokenizer.json: further tokens, and what begins and ends a text.

Follows ``PreTrainedTokenizerBase._from_pretrained`` and ``TokenizersBackend`` of transformers 5.
"""

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from toolkit.io.safe_parse import parse_json

if TYPE_CHECKING:
    import tokenizers

CONFIG_FILE = "tokenizer_config.json"
MAP_FILE = "special_tokens_map.json"
TOKENS_FILE = "added_tokens.json"
Ends = tuple[list[int], list[int]]  # token ids before and after a text
_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_EXTRA = ("extra_special_tokens", "additional_special_tokens")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_TEMPLATES = ("TemplateProcessing", "BertProcessing", "RobertaProcessing")
# Classes that replace the post-processor of tokenizer.json. Whether they add bos; none adds eos.
_CLASSES = {"GPTNeoXTokenizer": False, "CodeLlamaTokenizer": True}


def parse_object(name: str, content: bytes) -> dict[str, Any]:
    try:
        parsed = parse_json(content)
    except ValueError as error:
        raise ValueError(f"{name} is not valid JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise ValueError(f"{name} must contain a JSON object")
    return parsed


def add_tokens(core: "tokenizers.Tokenizer", files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Add the tokens that transformers adds to the tokenizer of tokenizer.json. Return the files that change."""
    try:
        config, tokens = _read_tokens(core, files)
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        raise ValueError(f"{CONFIG_FILE}, {MAP_FILE} or {TOKENS_FILE}: a token cannot be read: {error}") from error
    before = _added_tokens(core)
    core.add_tokens(tokens)
    changed = {}
    if (after := _added_tokens(core)) != before:
        changed["tokenizer.json"] = to_json(parse_object("tokenizer.json", files["tokenizer.json"]) | after)
    original = parse_object(CONFIG_FILE, files.get(CONFIG_FILE, b"{}"))
    if named := {n: config[n] for n in _NAMED if original.get(n) and content_of(original[n]) != content_of(config[n])}:
        changed[CONFIG_FILE] = to_json(original | named)
    return changed


def _read_tokens(core: "tokenizers.Tokenizer", files: Mapping[str, bytes]) -> tuple[dict[str, Any], list[Any]]:
    """Return tokenizer_config.json with what transformers merges into it, and the tokens to add, in order.

    special_tokens_map.json and added_tokens.json, of older versions, are not read next to an added_tokens_decoder.
    """
    from tokenizers import AddedToken

    def token(value: Any) -> Any:
        if isinstance(value, str):
            return AddedToken(value, special=True)
        return AddedToken(value["content"], **{name: value[name] for name in _FLAGS if name in value})

    config = parse_object(CONFIG_FILE, files.get(CONFIG_FILE, b"{}"))
    extra: Any = next((config[name] for name in _EXTRA if config.get(name)), [])
    tokens: dict[int, Any] = {}
    if "added_tokens_decoder" in config:
        tokens = {int(i): token(value) for i, value in config["added_tokens_decoder"].items()}
    else:
        for name, value in parse_object(MAP_FILE, files.get(MAP_FILE, b"{}")).items():
            if name not in _EXTRA:
                config[name] = value | {"special": True} if isinstance(value, dict) else value
            elif isinstance(value, list) and isinstance(extra, list) and (name == _EXTRA[0] or not extra):
                extra = [*extra, *(one | {"special": True} if isinstance(one, dict) else one for one in value)]
            elif isinstance(value, dict):
                extra = value
        special = {
            content_of(value) for value in [*map(config.get, _NAMED), *(extra if isinstance(extra, list) else [])]
        }
        for text, i in parse_object(TOKENS_FILE, files.get(TOKENS_FILE, b"{}")).items():
            tokens[i] = AddedToken(text, normalized=text not in special, special=text in special)
        tokens |= core.get_added_tokens_decoder()
    named = [*map(config.get, _NAMED)]
    named += [value for name, value in config.items() if _is_token(name, value) and name not in _NAMED]
    if isinstance(extra, dict):
        named, extra = [*named, *extra.values()], []
    texts = {content_of(value) for value in named if value}
    result = [tokens[i] for i in sorted(tokens)]
    listed = {one.content for one in (*result, *core.get_added_tokens_decoder().values())}
    for value in filter(None, [*named, *extra]):
        if content_of(value) not in listed:
            listed.add(content_of(value))
            result.append(token(value))
    for one in result:
        one.special |= one.content in texts
    return config, result


def class_ends(tokenizer_class: Any, bos_id: int | None) -> Ends | None:
    """Return the token ids before and after a text, if the class decides and not the post-processor."""
    adds_bos = _CLASSES.get(str(tokenizer_class).removesuffix("Fast"))
    return None if adds_bos is None else ([bos_id] if adds_bos and bos_id is not None else [], [])


def text_ends(core: "tokenizers.Tokenizer") -> Ends:
    """Return the token ids that the post-processor adds before and after a text."""
    ids, text = (core.encode("a", add_special_tokens=adds).ids for adds in (True, False))
    start = next(i for i in range(len(ids) + 1) if ids[i : i + len(text)] == text)
    return ids[:start], ids[start + len(text) :]


def export_files(core: "tokenizers.Tokenizer", files: Mapping[str, bytes], ends: Ends | None) -> dict[str, bytes]:
    """Return changed files from which transformers reads the tokens of tokenizer.json alone.

    It then adds ``ends`` to a text; None keeps the post-processor.
    """
    added = _added_tokens(core)["added_tokens"]
    config = {
        name: value
        for name, value in parse_object(CONFIG_FILE, files.get(CONFIG_FILE, b"{}")).items()
        if name not in _EXTRA and not (_is_token(name, value) and core.token_to_id(content_of(value)) is None)
    }
    # makes transformers ignore special_tokens_map.json and added_tokens.json
    config["added_tokens_decoder"] = {one.pop("id"): one for one in added}
    changed = {}
    if ends is not None:
        raw = parse_object("tokenizer.json", files["tokenizer.json"])
        steps = (raw.get("post_processor") or {}).get("processors", [raw.get("post_processor")])
        steps = [step for step in steps if step and step["type"] not in _TEMPLATES]
        raw["post_processor"] = {"type": "Sequence", "processors": [*steps, _template(core, *ends)]}
        changed["tokenizer.json"] = to_json(raw)
        if class_ends(config.get("tokenizer_class"), None):
            config["tokenizer_class"] = "PreTrainedTokenizerFast"
        config |= {"add_bos_token": bool(ends[0]), "add_eos_token": bool(ends[1])}
    return changed | {CONFIG_FILE: to_json(config)}


def _template(core: "tokenizers.Tokenizer", before: list[int], after: list[int]) -> dict[str, Any]:
    """Return a post-processor of tokenizer.json that adds tokens to a text."""
    texts = {i: core.id_to_token(i) for i in (*before, *after)}
    start, end = ([{"SpecialToken": {"id": texts[i], "type_id": 0}} for i in ids] for ids in (before, after))
    first, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    tokens = {text: {"id": text, "ids": [i], "tokens": [text]} for i, text in texts.items()}
    pair = [*start, first, *end, *start, second, *end]
    return {"type": _TEMPLATES[0], "single": [*start, first, *end], "pair": pair, "special_tokens": tokens}


def _added_tokens(core: "tokenizers.Tokenizer") -> dict[str, Any]:
    """Return the entry of tokenizer.json."""
    tokens = sorted(core.get_added_tokens_decoder().items())
    return {"added_tokens": [{"id": i} | token.__getstate__() for i, token in tokens]}


def _is_token(name: str, value: Any) -> bool:
    return name.endswith("_token") and isinstance(value, str | dict)


def content_of(value: Any) -> Any:
    return value.get("content") if isinstance(value, dict) else value


def to_json(value: Any) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()
