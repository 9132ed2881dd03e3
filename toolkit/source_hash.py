"""Hash the source files of modules, to compare the code of ranks and launches."""

import ast
import hashlib
from collections.abc import Iterable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path


def hash_sources(modules: Iterable[str]) -> str:
    """Return a short hash of the modules' source files.

    It includes modules imported from the same folder, and all Python files of packages.
    """
    files: set[Path] = set()
    for module in modules:
        with suppress(ImportError, AttributeError, ValueError):
            if (spec := find_spec(module)) is not None and spec.origin is not None:
                folders = spec.submodule_search_locations
                if folders is None:
                    _add_with_helpers(Path(spec.origin), files)
                else:
                    files |= {Path(spec.origin), *(f for folder in folders for f in Path(folder).rglob("*.py"))}
    contents = sorted(hashlib.sha256(file.read_bytes()).digest() for file in files if file.is_file())
    return hashlib.sha256(b"".join(contents)).hexdigest()[:12]


def _add_with_helpers(file: Path, files: set[Path]) -> None:
    """Add a source file and its imports from the same folder, recursively (only the file for an installed module)."""
    if file in files or not file.is_file():
        return
    files.add(file)
    if {"site-packages", "dist-packages"} & set(file.parts):
        return  # other files in this folder belong to other packages
    with suppress(SyntaxError, ValueError):  # not valid Python
        for node in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                dotted = [*(alias.name for alias in node.names), getattr(node, "module", None) or ""]
                for name in filter(None, ".".join(dotted).split(".")):
                    _add_with_helpers(file.parent / f"{name}.py", files)
                    if (file.parent / name / "__init__.py").is_file():
                        files |= set((file.parent / name).rglob("*.py"))
