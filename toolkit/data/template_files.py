"""Where chat templates come from: the tokenizer's files, and the prompt styles in the folder of that name."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.errors import UserError, did_you_mean

if TYPE_CHECKING:
    from toolkit.data.tokenizer import Tokenizer

TEMPLATE_FILE = "chat_template.jinja"
CONFIG_FILE = "tokenizer_config.json"
# The first lines of a prompt style of ours; they are changed to fit a tokenizer.
_BEGIN = "{%- set begin = bos_token %}"
_NO_BEGIN = "{%- set begin = '' %}"
_END = re.compile(r"\{%- set end_of_turn = '(.*)' %\}")
_END_WITH_EOS = "{%- set end_of_turn = eos_token %}"
_INSTEAD = ": is used, and saved with the model, instead of the checkpoint's own chat template"
_MARKUP = re.compile(r"<\|?[a-z_]+\|?>")


def prompt_styles() -> list[str]:
    """Names that ``--data.prompt_style`` takes."""
    folder = files("toolkit.data") / "prompt_styles"
    return sorted(file.name.removesuffix(".jinja") for file in folder.iterdir() if file.name.endswith(".jinja"))


def read_style(tokenizer: Tokenizer, style: str) -> tuple[str, str, list[str]]:
    """Source, name and notes of a prompt style, fitted to the tokenizer. The vocabulary stays as it is."""
    known = prompt_styles()
    if style not in known:
        raise UserError(f"--data.prompt_style {style}: must be one of {', '.join(known)}{did_you_mean(style, known)}")
    source = (files("toolkit.data") / "prompt_styles" / f"{style}.jinja").read_text(encoding="utf-8")
    name, notes = f"--data.prompt_style {style}", []
    if own_template(tokenizer, strict=False) is not None:
        notes.append(name + _INSTEAD)
    if not tokenizer.adds_bos:
        source = source.replace(_BEGIN, _NO_BEGIN)
    end = _END.search(source)
    if end and end[1] not in tokenizer.added_tokens:
        source = source.replace(end[0], _END_WITH_EOS)
        eos = tokenizer.special_tokens.get("eos_token", "eos")
        notes.append(f"{name}: {end[1]} is no token of this vocabulary; turns end with {eos} instead")
    plain = sorted(set(_MARKUP.findall(source)) - set(tokenizer.added_tokens))
    if plain:
        notes.append(f"{name}: {', '.join(plain)}: no token of this vocabulary, encoded as ordinary text")
    return source, name, notes


def read_template(tokenizer: Tokenizer, path: str) -> tuple[str, str, list[str]]:
    """Source, name and notes of ``--data.chat_template``.

    Raises:
        UserError: if there is no such file, or it cannot be read.
    """
    name, file = f"--data.chat_template {path}", Path(path).expanduser()
    if not file.is_file():
        raise UserError(f"{name}: {'not a regular file' if file.exists() else 'no such file'}; give a jinja template")
    try:
        source = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{name}: is not UTF-8") from error
    except OSError as error:
        raise UserError(f"{name}: cannot be read: {error.strerror or error}") from error
    own = own_template(tokenizer, strict=False)
    return source, name, [name + _INSTEAD] if own is not None and own[1] != source else []


def has_tool_template(tokenizer: Tokenizer) -> bool:
    """Whether a template named ``tool_use``, beside the default one, is for conversations with tools."""
    setting = tokenizer.settings(CONFIG_FILE).get("chat_template")
    named = setting if isinstance(setting, list) else []
    return "additional_chat_templates/tool_use.jinja" in tokenizer.files or any(
        isinstance(entry, dict) and entry.get("name") == "tool_use" for entry in named
    )


def own_template(tokenizer: Tokenizer, strict: bool = True) -> tuple[str, str] | None:
    """File and source of the template among the tokenizer's files; ``strict`` refuses one that cannot be read."""
    if (content := tokenizer.files.get(TEMPLATE_FILE)) is not None:
        try:
            return TEMPLATE_FILE, content.decode("utf-8")
        except UnicodeDecodeError as error:
            if strict:
                raise UserError(f"{tokenizer.name}: {TEMPLATE_FILE}: is not UTF-8") from error
            return None
    said = tokenizer.settings(CONFIG_FILE).get("chat_template")
    if isinstance(said, list):
        named = {entry.get("name"): entry.get("template") for entry in said if isinstance(entry, dict)}
        said = named.get("default", {})
    if said is None or isinstance(said, str):
        return None if said is None else (CONFIG_FILE, said)
    if strict:
        raise UserError(
            f"{tokenizer.name}: {CONFIG_FILE}: chat_template must be text or hold a template named 'default'; "
            "or give a --data.prompt_style"
        )
    return None
