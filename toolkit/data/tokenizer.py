"""Encode and decode text with the ``tokenizers`` library. Token ids match transformers."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.data import hf_tokenizer
from toolkit.data.hf_tokenizer import CONFIG_FILE, MAP_FILE, Ends, parse_object, to_json
from toolkit.data.tokenizer_limits import PARALLEL, require_bounded, translate_panic
from toolkit.errors import UserError, one_line
from toolkit.io.paths import require_inside
from toolkit.io.safe_parse import read_bounded

if TYPE_CHECKING:
    import numpy as np

END_OF_TEXT = "<|endoftext|>"
UNKNOWN = "<|unknown|>"  # character outside a character-level tokenizer's vocabulary
UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # decoded from incomplete UTF-8
# Candidates for the eos token if tokenizer.json comes without configuration files.
_COMMON_EOS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>")
# Tokenizer files in a model folder. All of them are copied to every checkpoint.
FILE_PATTERNS = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt",
    "spiece.model", "*.tiktoken", "chat_template*", "additional_chat_templates/*", "generation_config.json",
)  # fmt: skip
_HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")  # organization/name, or just name
_SETTINGS = (CONFIG_FILE, MAP_FILE, "generation_config.json")
# {"before": ids, "after": ids}: what toolkit adds to a text, if its other files do not say the same, see _read_ends.
ENDS_FILE = "tokenizer_ends.json"
# Files of folders that toolkit writes. Their tokenizer.json has all tokens.
_OWN_FILES = (ENDS_FILE, "model_config.yaml", "hyperparameters.yaml", "adapter.yaml")
# GPT-2's alphabet: printable characters of Latin-1 stand for themselves, the n-th other byte for character 256 + n.
_PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
_BYTES = {chr(byte): byte for byte in _PRINTABLE} | {chr(256 + n): byte for n, byte in enumerate(_OTHERS)}
Spans = list[tuple[int, int]]  # of characters, [start, end)


class Tokenizer:
    """A ``tokenizer.json`` and its configuration files. Create it with :meth:`load` or :func:`train_bpe`.

    Attributes:
        notes: Log lines about settings that have no effect.
    """

    def __init__(self, files: dict[str, bytes], name: str, is_foreign: bool = False) -> None:
        """``files`` maps file names to contents. Error messages show ``name``.

        ``is_foreign``: not written by toolkit. All files are then read as transformers reads them, and changed so that
        this constructor reads the same from them alone.
        """
        # Set before any fork; otherwise the library warns in every worker.
        os.environ.setdefault(PARALLEL, "true")
        import tokenizers

        self.name = name
        self._files = dict(files)
        self._settings = {file: parse_object(file, files[file]) for file in _SETTINGS if file in files}
        with translate_panic(name):
            try:
                self._tokenizer = tokenizers.Tokenizer.from_str(files["tokenizer.json"].decode("utf-8"))
            except Exception as error:  # the library raises bare Exceptions
                raise ValueError(f"tokenizer.json cannot be read: {error}") from error
        for part in ("normalizer", "decoder"):
            require_bounded(part, getattr(self._tokenizer, part))
        if is_foreign:
            self._files = files | hf_tokenizer.add_tokens(self._tokenizer, files)
            self._settings |= {file: parse_object(file, self._files[file]) for file in self._settings}
        # Disable the file's truncation and padding settings.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.vocab_size: int = max(self.vocabulary.values(), default=-1) + 1
        if self.vocab_size == 0:
            raise ValueError("tokenizer.json has an empty vocabulary")
        with translate_panic(name):
            self._file_ends = hf_tokenizer.text_ends(self._tokenizer)
        self.bos_id: int | None = self._find_special_id("bos")
        self.eos_id: int | None = self._find_special_id("eos")
        self.notes: list[str] = []
        self._ends, self._default_ends = self._read_ends(is_foreign)
        self.adds_bos: bool = self._ends[0] == [self.bos_id]
        # This class adds special tokens itself. The file's post-processor might trim spaces from the offsets.
        self._tokenizer.post_processor = tokenizers.processors.ByteLevel(trim_offsets=False)

    @classmethod
    def load(
        cls,
        path: str | Path,
        flag: str = "--tokenizer_dir",
        report: Callable[[str], object] | None = None,
        is_own: bool | None = None,
    ) -> Tokenizer:
        """Load a tokenizer.json file or a folder that contains one; also searches checkpoints/.

        Args:
            path: The file or folder.
            flag: The option that set it, for messages.
            report: Called with the tokenizer's notes.
            is_own: Whether toolkit wrote the folder. Default: whether it has files of a model folder.
        """
        path = Path(path).expanduser()
        if not path.exists() and (Path("checkpoints") / path).is_dir():
            path = Path("checkpoints") / path
        file = path if path.is_file() else path / "tokenizer.json"
        if not path.exists():
            hint = "specify a folder with a tokenizer.json"
            if _HUB_NAME.fullmatch(str(path)):
                hint = f"`toolkit download {path} --tokenizer_only` downloads it from the hub, or give a local folder"
            raise UserError(f"{flag} {path}: no such folder or file; {hint}")
        if not file.is_file():
            raise UserError(
                f"{flag} {path}: contains no tokenizer.json (tokenizer.model or vocab.json alone is not supported)"
            )
        try:
            files = read_tokenizer_files(file.parent)
            files["tokenizer.json"] = read_bounded(file, "tokenizer")
            if is_own is None:
                is_own = any((file.parent / name).exists() for name in _OWN_FILES)
            tokenizer = cls(files, name=f"{flag} {path}", is_foreign=not is_own)
        except UserError:
            raise
        except (ValueError, OSError) as error:
            raise UserError(f"{flag} {path}: {one_line(error)}") from error
        if report is not None:
            for note in tokenizer.notes:
                report(note)
        return tokenizer

    @property
    def fingerprint(self) -> str:
        """Hex SHA-256 of tokenizer.json, the bos and eos ids, and what begins and ends a text."""
        ids = f"{self.bos_id} {self.eos_id}{'' if self._ends == self._default_ends else self._ends}".encode()
        return hashlib.sha256(self._files["tokenizer.json"] + ids).hexdigest()

    @property
    def vocabulary(self) -> dict[str, int]:
        """Map every token to its id."""
        return self._tokenizer.get_vocab(with_added_tokens=True)

    @property
    def files(self) -> dict[str, bytes]:
        """Contents of all tokenizer files by name, as written by :meth:`save`."""
        return dict(self._files)

    def settings(self, file: str) -> dict[str, Any]:
        """Return tokenizer_config.json, special_tokens_map.json or generation_config.json, parsed; {} if missing."""
        return dict(self._settings.get(file, {}))

    def with_files(self, changed: Mapping[str, bytes]) -> Tokenizer:
        """Return a copy with the ``changed`` files replaced or added."""
        return Tokenizer({**self._files, **changed}, self.name)

    @property
    def added_tokens(self) -> dict[str, int]:
        """Map the text of every added token, including special tokens, to the token id."""
        return {token.content: i for i, token in self._tokenizer.get_added_tokens_decoder().items()}

    @property
    def special_tokens(self) -> dict[str, str]:
        """Map special token names, such as ``bos_token`` and ``eos_token``, to token text."""
        ids = {"bos_token": self.bos_id, "eos_token": self.eos_id}
        texts = {name: self._tokenizer.id_to_token(id_) for name, id_ in ids.items() if id_ is not None}
        tokens = {name: text for name, text in texts.items() if text is not None}
        return tokens | self._named_tokens(MAP_FILE) | self._named_tokens(CONFIG_FILE)

    @property
    def pad_id(self) -> int | None:
        """The token that pads texts in a Hugging Face export with a score layer: the tokenizer's, or eos."""
        return self.added_tokens.get(self.special_tokens.get("pad_token", ""), self.eos_id)

    def with_pad(self, pad_id: int, max_length: int | None = None) -> Tokenizer:
        """Return a copy whose tokenizer_config.json names the token that pads texts, and where they are cut."""
        settings = self.settings(CONFIG_FILE) | {"pad_token": self._tokenizer.id_to_token(pad_id)}
        if max_length is not None:
            settings.setdefault("model_max_length", max_length)
        return self.with_files({CONFIG_FILE: to_json(settings)})

    def encode_with_offsets(self, text: str) -> tuple[list[int], Spans]:
        """Tokenize ``text`` without bos. Return token ids and each token's character span [start, end).

        Byte tokens of one character have the same span.
        """
        with translate_panic(self.name):
            encoding = self._tokenizer.encode(text, add_special_tokens=False)
        return encoding.ids, encoding.offsets

    def encode(self, text: str, bos: bool | None = None, eos: bool | None = False) -> list[int]:
        """Return the token ids of ``text`` with bos and eos, see :meth:`missing_ends`."""
        return self.encode_batch([text], bos, eos)[0]

    def encode_batch(self, texts: list[str], bos: bool | None = None, eos: bool | None = False) -> list[list[int]]:
        """Tokenize texts in parallel. See :meth:`encode`."""
        with translate_panic(self.name):
            encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        ends = [self.missing_ends(encoding.ids, bos, eos) for encoding in encodings]
        return [before + encoding.ids + after for encoding, (before, after) in zip(encodings, ends, strict=True)]

    def missing_ends(
        self, ids: list[int], bos: bool | None = None, eos: bool | None = False
    ) -> tuple[list[int], list[int]]:
        """Return what to add before and after the tokens ``ids`` of a text: bos and eos, unless it has them.

        None adds what the tokenizer adds by default. All text that becomes tokens begins and ends by this rule.
        """
        before, after = self._ends
        if bos is not None:
            before = self._special("bos", self.bos_id) if bos else []
        if eos is not None:
            after = self._special("eos", self.eos_id) if eos else []
        return [] if ids[: len(before)] == before else before, [] if ids[-len(after) :] == after else after

    def _special(self, name: str, id_: int | None) -> list[int]:
        if id_ is None:
            raise UserError(f"{self.name}: the tokenizer has no {name} token; {self.missing_hint(name)}")
        return [id_]

    def missing_hint(self, name: str) -> str:
        """Return what to do about a missing ``name`` ("bos" or "eos") token."""
        for file in (CONFIG_FILE, MAP_FILE):
            if text := self._named_tokens(file).get(f"{name}_token"):
                return f"{file} names {text}, which tokenizer.json lacks: add it there"
        return f"set {name}_token in {CONFIG_FILE}"

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        with translate_panic(self.name):
            return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=skip_special_tokens)

    def token_bytes(self) -> np.ndarray:
        """Return the UTF-8 bytes per token, (vocab_size,) int64; 0 for special tokens and unused ids.

        The sum over a text's tokens is the text length in bytes, plus the leading space if a SentencePiece-like
        tokenizer adds one.
        """
        import numpy as np

        sizes = np.zeros(self.vocab_size, dtype=np.int64)
        added = self._tokenizer.get_added_tokens_decoder()
        for i in self.vocabulary.values():
            sizes[i] = 0 if i in added and added[i].special else len(self.bytes_of(i))
        return sizes

    def bytes_of(self, token: int) -> bytes:
        """Return the UTF-8 bytes of a token, which may be a part of a character."""
        text = self._tokenizer.id_to_token(token) or ""
        if token in self._added_ids:
            return text.encode()
        if self._is_byte_level:
            return bytes(_BYTES[character] for character in text)
        if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):  # byte fallback
            return bytes.fromhex(text[3:5])
        return text.replace("\u2581", " ").encode()

    @cached_property
    def _added_ids(self) -> frozenset[int]:
        return frozenset(self._tokenizer.get_added_tokens_decoder())

    @cached_property
    def _is_byte_level(self) -> bool:
        return '"ByteLevel"' in json.dumps(json.loads(self._tokenizer.to_str())["decoder"])

    def save(self, folder: str | Path, for_transformers: bool = False) -> None:
        """Write all tokenizer files, including chat templates and generation_config.json, to ``folder``.

        ``for_transformers``: such that transformers reads the same token ids from them, with what begins and ends a
        text.
        """
        files = self._files
        if for_transformers:
            files = {name: content for name, content in files.items() if name != ENDS_FILE}
            read = Tokenizer(files, self.name, is_foreign=True)
            ends = None if read._ends == self._ends else self._ends
            if ends is not None or read.fingerprint != self.fingerprint:
                files |= hf_tokenizer.export_files(self._tokenizer, files, ends)
        for name, content in files.items():
            file = Path(folder) / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)

    def splits_at_newlines(self) -> bool:
        """Whether splitting text after a newline and before a letter keeps the token ids. False if the tokenizer adds a
        leading space."""
        left, right = self.encode_batch(["some text;\n", "and more"], bos=False)
        return self.encode("some text;\nand more", bos=False) == left + right

    def is_character_level(self) -> bool:
        """Whether all tokens except added and special tokens are single characters."""
        return all(len(token) == 1 for token in self.vocabulary.keys() - self.added_tokens.keys())

    def _named_tokens(self, file: str) -> dict[str, str]:
        """Return the special tokens of a settings file by name."""
        texts = {name: hf_tokenizer.content_of(value) for name, value in self.settings(file).items()}
        return {name: text for name, text in texts.items() if name.endswith("_token") and isinstance(text, str)}

    def _find_special_id(self, which: str) -> int | None:
        for file in (CONFIG_FILE, MAP_FILE):
            token_id = self._tokenizer.token_to_id(self._named_tokens(file).get(f"{which}_token", ""))
            if token_id is not None:
                return token_id
        token_id = self.settings("generation_config.json").get(f"{which}_token_id")
        token_id = token_id[0] if isinstance(token_id, list) and token_id else token_id
        if isinstance(token_id, int) and 0 <= token_id < self.vocab_size:
            return token_id
        if which == "eos" and not any(self._settings.values()):
            return next((i for t in _COMMON_EOS if (i := self._tokenizer.token_to_id(t)) is not None), None)
        before = self._file_ends[0]  # the file's post-processor may add one that no setting names
        return before[0] if which == "bos" and len(before) == 1 else None

    def _read_ends(self, is_foreign: bool) -> tuple[Ends, Ends]:
        """Return what begins and ends a text, and the default for toolkit's files: bos by setting, never eos."""
        settings = self.settings(CONFIG_FILE)
        adds = {name: settings.get(f"add_{name}_token") for name in ("bos", "eos")}
        adds_bos = adds["bos"] if isinstance(adds["bos"], bool) else self._file_ends[0][:1] == [self.bos_id]
        default: Ends = [self.bos_id] if adds_bos and self.bos_id is not None else [], []
        if not is_foreign:
            stored = parse_object(ENDS_FILE, self._files.get(ENDS_FILE, b"{}"))
            for name, ids in stored.items():
                if not (isinstance(ids, list) and all(type(i) is int and 0 <= i < self.vocab_size for i in ids)):
                    raise ValueError(f"{ENDS_FILE}: {name} {ids!r:.40} must be a list of token ids")
            return (stored.get("before", default[0]), stored.get("after", default[1])), default
        ends = hf_tokenizer.class_ends(settings.get("tokenizer_class"), self.bos_id) or self._file_ends
        for (name, setting), ids, id_ in zip(adds.items(), ends, (self.bos_id, self.eos_id), strict=True):
            if isinstance(setting, bool) and setting != (id_ in ids):
                added = "none: texts have no" if setting else "one: texts have a"
                self.notes.append(
                    f"{self.name}: {CONFIG_FILE} has add_{name}_token {str(setting).lower()}, but tokenizer.json adds "
                    f"{added} {name} token, as in transformers 5"
                )
        if ends != default:
            self._files[ENDS_FILE] = to_json({"before": ends[0], "after": ends[1]})
        return ends, default


def read_tokenizer_files(folder: Path) -> dict[str, bytes]:
    matches = {match for pattern in FILE_PATTERNS for match in folder.glob(pattern)}
    files = sorted(match for match in matches if match.is_file())
    for file in files:
        require_inside(file, folder)
    return {str(file.relative_to(folder)): read_bounded(file, "tokenizer") for file in files}


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE tokenizer whose only special token is ``<|endoftext|>`` (id 0). Deterministic.

    Args:
        texts: The corpus or a sample. A few MB suffice for a small vocabulary.
        vocab_size: Target size, including the special token and 256 bytes. Short texts yield fewer tokens.
    """
    os.environ.setdefault(PARALLEL, "true")
    from tokenizers.implementations import ByteLevelBPETokenizer

    core = ByteLevelBPETokenizer()
    core.train_from_iterator(
        iter(texts), vocab_size, min_frequency=2, special_tokens=[END_OF_TEXT], show_progress=False
    )
    return _with_settings(core)


def collect_characters(texts: Iterable[str]) -> Tokenizer:
    """Build a character-level tokenizer: ``<|endoftext|>`` (id 0), ``<|unknown|>``, then each distinct character in
    sorted order.
    """
    os.environ.setdefault(PARALLEL, "true")
    from tokenizers import AddedToken, decoders, models
    from tokenizers import Tokenizer as Core

    characters: set[str] = set()
    for text in texts:
        characters.update(text)
    vocabulary = {token: i for i, token in enumerate([END_OF_TEXT, UNKNOWN, *sorted(characters)])}
    core = Core(models.BPE(vocabulary, [], unk_token=UNKNOWN))  # no merges: each character is a token
    core.decoder = decoders.Fuse()
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in (END_OF_TEXT, UNKNOWN)])
    return _with_settings(core, unk_token=UNKNOWN)


def _with_settings(core: Any, **special_tokens: str) -> Tokenizer:
    """Add configuration files with ``<|endoftext|>`` as bos and eos token."""
    special_tokens = {"bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT, **special_tokens}
    eos_id = core.token_to_id(END_OF_TEXT)
    settings = {
        CONFIG_FILE: {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **special_tokens,
            "clean_up_tokenization_spaces": False,
        },
        MAP_FILE: special_tokens,
        "generation_config.json": {"bos_token_id": eos_id, "eos_token_id": eos_id},
    }
    files = {name: to_json(content) for name, content in settings.items()}
    return Tokenizer({"tokenizer.json": core.to_str(pretty=True).encode(), **files}, name="the trained tokenizer")
