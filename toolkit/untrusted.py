"""Reading files that strangers may have written: every read is bounded in size, nesting and time, and never blocks."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

import yaml

MAX_BYTES = {"JSON": 2**26, "YAML": 2**18}  # an index of weights has some MB, YAML's reader takes seconds per MB
_MAX_DEPTH = 64
_MAX_NODES = 200_000  # of a YAML file with its aliases written out
_MAX_DIGITS = 300  # a longer number overflows a float; model_max_length has up to 31


def open_regular(path: str | Path) -> BinaryIO:
    """Open a regular file for reading; a FIFO, which would block for ever, or a device is refused.

    Raises:
        OSError: there is no such file, or it is of another kind.
    """
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "not a regular file", str(path))


def read_json(path: str | Path) -> Any:
    """Read a JSON file.

    Raises:
        OSError: as :func:`open_regular`.
        ValueError: as :func:`parse_json`.
    """
    return parse_json(_read(path, "JSON"))


def read_yaml(path: str | Path) -> Any:
    """Read a YAML file.

    Raises:
        OSError: as :func:`open_regular`.
        ValueError: as :func:`parse_yaml`.
    """
    return parse_yaml(_read(path, "YAML"))


def parse_json(content: bytes | str) -> Any:
    """Parse JSON.

    Raises:
        ValueError: it is not JSON, is nested too deeply or holds a number too long to compute with.
    """
    try:
        values = json.loads(content, parse_int=_int)
        _require_shallow(values)
    except RecursionError:
        raise ValueError(f"nested more than {_MAX_DEPTH} levels deep") from None
    return values


def parse_yaml(content: bytes | str) -> Any:
    """Parse YAML into plain values. Aliases are read as long as the file stays small with them written out.

    Raises:
        ValueError: it is not YAML, is nested too deeply, grows too large by its aliases or holds a number too long to
            compute with.
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
    except (yaml.YAMLError, TypeError, KeyError, OverflowError) as error:  # the last of values that YAML cannot make
        raise ValueError(" ".join(str(error).split())) from error


def _read(path: str | Path, kind: str) -> bytes:
    with open_regular(path) as file:
        content = file.read(MAX_BYTES[kind] + 1)
    if len(content) > MAX_BYTES[kind]:
        raise ValueError(f"larger than {MAX_BYTES[kind]:,} bytes, too large for such a {kind} file")
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


def _require_bounded(root: yaml.Node | None) -> None:
    """Visit a document's nodes as often as its aliases repeat them."""
    level, count = [root] if root is not None else [], 0
    for _ in range(_MAX_DEPTH):
        inner: list[yaml.Node] = []
        for node in level:
            if isinstance(node, yaml.ScalarNode):
                if node.tag.endswith((":int", ":float")) and len(node.value) > _MAX_DIGITS:
                    raise ValueError(f"contains a number of {len(node.value):,} digits")
            elif isinstance(node, yaml.MappingNode):
                inner += [part for pair in node.value for part in pair]
            else:
                inner += node.value
            if count + len(inner) > _MAX_NODES:
                raise ValueError(f"holds more than {_MAX_NODES:,} values with its aliases written out")
        count += len(inner)
        level = inner
        if not level:
            return
    raise RecursionError
