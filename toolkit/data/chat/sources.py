"""Where chat templates come from: the tokenizer's files, a built-in prompt style, or a file."""

import re
from importlib.resources import files
from pathlib import Path
from typing import Any

from toolkit.data.base import file_errors
from toolkit.data.hf_tokenizer import CONFIG_FILE
from toolkit.data.tokenizer import Tokenizer
from toolkit.errors import UserError, did_you_mean

TEMPLATE_FILE = "chat_template.jinja"
_STYLES = files("toolkit.data.chat") / "prompt_styles"
# First lines of the built-in prompt styles, adapted to the tokenizer.
_BEGIN = "{%- set begin = bos_token %}"
_NO_BEGIN = "{%- set begin = '' %}"
_END = re.compile(r"\{%- set end_of_turn = '(.*)' %\}")
_END_WITH_EOS = "{%- set end_of_turn = eos_token %}"
_OVERRIDES = ": overrides the checkpoint's own chat template, and is saved with the model"
# Tokens of the built-in styles, not their XML tags, which are text.
_MARKUP = re.compile(r"<(?:\|[a-z_]+\||[a-z]+_of_turn)>")


def prompt_styles() -> list[str]:
    """Return the valid values of ``--data.prompt_style``."""
    return sorted(file.name.removesuffix(".jinja") for file in _STYLES.iterdir() if file.name.endswith(".jinja"))


def require_style(style: str) -> None:
    if style not in (styles := prompt_styles()):
        raise UserError(f"--data.prompt_style {style}: must be one of {', '.join(styles)}{did_you_mean(style, styles)}")


def read_style(tokenizer: Tokenizer, style: str) -> tuple[str, str, list[str]]:
    """Return a prompt style's source, name and notes, adapted to the tokenizer's vocabulary."""
    require_style(style)
    source = (_STYLES / f"{style}.jinja").read_text(encoding="utf-8")
    name, notes = f"--data.prompt_style {style}", []
    if tokenizer_template(tokenizer) is not None:
        notes.append(name + _OVERRIDES)
    if not tokenizer.adds_bos:
        source = source.replace(_BEGIN, _NO_BEGIN)
    end = _END.search(source)
    if end and end[1] not in tokenizer.added_tokens:
        source = source.replace(end[0], _END_WITH_EOS)
        eos = tokenizer.special_tokens.get("eos_token", "eos")
        notes.append(f"{name}: {end[1]} is not in the vocabulary; turns end with {eos} instead")
    plain = sorted(set(_MARKUP.findall(source)) - set(tokenizer.added_tokens))
    if plain:
        notes.append(f"{name}: {', '.join(plain)}: not in the vocabulary, tokenized as plain text")
    return source, name, notes


def read_template(tokenizer: Tokenizer, path: str) -> tuple[str, str, list[str]]:
    """Return the source, name and notes of the ``--data.chat_template`` file."""
    name, file = f"--data.chat_template {path}", Path(path).expanduser()
    if not file.is_file():
        raise UserError(
            f"{name}: {'not a regular file' if file.exists() else 'no such file'}; provide a jinja template"
        )
    with file_errors(name, file):
        source = file.read_text(encoding="utf-8-sig")
    tokenizer_source = tokenizer_template(tokenizer)
    return source, name, [name + _OVERRIDES] if tokenizer_source is not None and tokenizer_source[1] != source else []


def has_tool_template(tokenizer: Tokenizer) -> bool:
    """Whether the tokenizer has a separate ``tool_use`` template for conversations with tools."""
    return "additional_chat_templates/tool_use.jinja" in tokenizer.files or "tool_use" in _named_templates(tokenizer)


def tokenizer_template(tokenizer: Tokenizer) -> tuple[str, str] | None:
    """Return the tokenizer's chat template as (file name, source), or None."""
    if (content := tokenizer.files.get(TEMPLATE_FILE)) is not None:
        with file_errors(tokenizer.name, Path(TEMPLATE_FILE)):
            return TEMPLATE_FILE, content.decode()
    source = _named_templates(tokenizer).get("default")
    return (CONFIG_FILE, source) if isinstance(source, str) else None


def _named_templates(tokenizer: Tokenizer) -> dict[Any, Any]:
    setting = tokenizer.settings(CONFIG_FILE).get("chat_template")
    if not isinstance(setting, list):
        return {"default": setting}
    return {entry.get("name"): entry.get("template") for entry in setting if isinstance(entry, dict)}
