"""Damaged and hostile files."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any


class RunsCode:
    """Creates a file where it is unpickled."""

    def __init__(self, witness):
        self.witness = witness

    def __reduce__(self):
        return os.system, (f"touch {self.witness}",)


def flip(path: Path, at: int | None = None, mask: int = 1) -> None:
    """Flip bits of a byte, by default one bit in the middle of the file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2 if at is None else at] ^= mask
    path.write_bytes(content)


def edit_json(path: Path, change: Callable[[Any], object]) -> None:
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


def change_json(path: Path, **values: Any) -> None:
    edit_json(path, lambda content: content.update(values))
