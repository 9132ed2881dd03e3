"""Read untrusted files with limits on size, nesting and time. Reads never block. Also write YAML."""

import errno
import json
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any, AnyStr, BinaryIO

import yaml

from toolkit.errors import UserError, one_line
from toolkit.escape import to_yaml

MAX_BYTES = {"JSON": 2**26, "YAML": 2**18, "tokenizer": 2**28, "log": 2**29}
"""Maximum file size in bytes. Weight indices take a few MB, tokenizers up to 40, the metrics of a million steps 150.

Parsing YAML takes seconds per MB."""
MAX_ROW = 2**26
"""Maximum bytes or characters in a line or cell of training data."""
_NONBLOCK = getattr(os, "O_NONBLOCK", 0)
_MAX_DEPTH = 64
_MAX_NODES = 200_000  # YAML nodes after alias expansion
_MAX_DIGITS = 300  # a longer number overflows a float; model_max_length has up to 31


def no_follow(path: str | Path, flags: int) -> int:
    """Open a file without following a symbolic link. Raise OSError for a link.

    An opener for :func:`open`. It never blocks.
    """
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0) | _NONBLOCK, 0o666)


def open_regular(path: str | Path, opener: Any = os.open) -> BinaryIO:
    """Open a regular file for reading. Raise OSError for other files; a FIFO could block forever."""
    descriptor = opener(path, os.O_RDONLY | _NONBLOCK | getattr(os, "O_BINARY", 0))
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "not a regular file", str(path))


def read_json(path: str | Path) -> Any:
    """Read a JSON file. For exceptions, see :func:`read_bounded` and :func:`parse_json`."""
    return parse_json(read_bounded(path, "JSON"))


def read_json_object(path: Path, optional: bool = False) -> dict[str, Any]:
    """Read a JSON object from a model or run file. Return {} if an ``optional`` file does not exist."""
    if optional and not path.is_file():
        return {}
    try:
        values = read_json(path)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"{path}: not JSON: {one_line(error)}; copy or download it again") from error
    if not isinstance(values, dict):
        raise UserError(f"{path}: must hold a JSON object; copy or download it again")
    return values


def read_yaml(path: str | Path) -> Any:
    """Read a YAML file. For exceptions, see :func:`read_bounded` and :func:`parse_yaml`."""
    return parse_yaml(read_bounded(path, "YAML"))


def write_yaml(path: Path, values: dict[str, Any]) -> None:
    """Write a YAML file that :func:`read_yaml` reads, with the keys in their order. Not atomic."""
    path.write_text(to_yaml(values), encoding="utf-8")


def bounded_lines(file: IO[AnyStr], start: int = 0) -> Iterator[AnyStr]:
    """Yield the lines of an open file from byte ``start``. Raise ValueError for a line longer than :data:`MAX_ROW`."""
    while line := file.readline(MAX_ROW + 1):
        if len(line) > MAX_ROW:
            raise ValueError(f"byte {start:,}: line longer than {MAX_ROW:,} bytes, the maximum for a row")
        yield line
        start += len(line)


def parse_json(content: bytes | str) -> Any:
    """Parse JSON. Raise ValueError if it is invalid, nested too deeply, or has a number with too many digits."""
    try:
        values = json.loads(content, parse_int=_int)
        _require_shallow(values)
    except RecursionError:
        raise ValueError(f"nested more than {_MAX_DEPTH} levels deep") from None
    return values


def parse_yaml(content: bytes | str) -> Any:
    """Parse YAML into plain values. Aliases are allowed if the expanded file stays small.

    Raises:
        ValueError: The content is not YAML, has a duplicate key or a number with too many digits, is nested too deeply,
            or is too large after alias expansion.
    """
    try:
        loader = yaml.SafeLoader(content)
        try:
            node = loader.get_single_node()
            _require_bounded(node)
            return None if node is None else loader.construct_document(node)
        finally:
            loader.dispose()
    except RecursionError:
        raise ValueError(f"nested more than {_MAX_DEPTH} levels deep") from None
    except yaml.MarkedYAMLError as error:
        mark, texts = error.problem_mark or error.context_mark, (error.context, error.problem)
        place = f"line {mark.line + 1}: " if mark else ""
        raise ValueError(place + ", ".join(text for text in texts if text)) from error
    except (yaml.YAMLError, TypeError, LookupError, OverflowError, AttributeError) as error:  # or an invalid value
        raise ValueError(one_line(error)) from error


def read_bounded(path: str | Path, kind: str = "JSON") -> bytes:
    """Read a file of at most ``MAX_BYTES[kind]`` bytes. Raise ValueError if larger, OSError if not a regular file.

    The kind log is for all files of a run's folder. Links to them are not followed.
    """
    with open_regular(path, no_follow if kind == "log" else os.open) as file:
        content = file.read(MAX_BYTES[kind] + 1)
    if len(content) > MAX_BYTES[kind]:
        raise ValueError(f"{Path(path).name}: larger than {MAX_BYTES[kind]:,} bytes, the maximum for a {kind} file")
    return content


def _int(text: str) -> int:
    if len(text) > _MAX_DIGITS:
        raise ValueError(f"contains a number of {len(text):,} digits")
    return int(text)


def _require_shallow(values: Any) -> None:
    level: Iterable[Any] = [values]
    for _ in range(_MAX_DEPTH):
        level = [
            inner
            for value in level
            if isinstance(value, dict | list)
            for inner in (value.values() if isinstance(value, dict) else value)
        ]
        if not level:
            return
    raise RecursionError


def _require_unique(node: yaml.MappingNode) -> None:
    names = set()
    for name, _ in node.value:
        if name.value != "<<" and isinstance(name, yaml.ScalarNode) and name.value in names:
            raise ValueError(f"line {name.start_mark.line + 1}: duplicate key {name.value}; remove one")
        names.add(name.value if isinstance(name, yaml.ScalarNode) else None)


def _require_bounded(root: yaml.Node | None) -> None:
    """Check the number of nodes after alias expansion, the nesting depth, the keys and the numbers."""
    level, count = [root] if root is not None else [], 0
    for _ in range(_MAX_DEPTH):
        inner: list[yaml.Node] = []
        for node in level:
            if isinstance(node, yaml.ScalarNode):
                if node.tag.endswith((":int", ":float")) and len(node.value) > _MAX_DIGITS:
                    raise ValueError(f"contains a number of {len(node.value):,} digits")
            elif isinstance(node, yaml.MappingNode):
                _require_unique(node)
                inner += [part for pair in node.value for part in pair]
            else:
                inner += node.value
            if count + len(inner) > _MAX_NODES:
                raise ValueError(f"has more than {_MAX_NODES:,} values after alias expansion")
        count += len(inner)
        level = inner
        if not level:
            return
    raise RecursionError
