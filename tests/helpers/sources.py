"""The source files of toolkit and of its built-in extensions."""

import tokenize
from pathlib import Path

import toolkit
from toolkit.extension import BUILT_IN

PACKAGE = Path(toolkit.__file__).parent
EXTENSIONS = PACKAGE.parent / "extensions"
FOLDERS = {"toolkit": PACKAGE} | {name: EXTENSIONS / name.removeprefix("toolkit_") / name for name in BUILT_IN}
FILES = sorted(file for folder in FOLDERS.values() for file in folder.rglob("*.py"))


def module_name(file: Path) -> str:
    """Return the dotted name of a module, such as toolkit.data.base or toolkit_doctor.verify."""
    folder = PACKAGE.parent if file.is_relative_to(PACKAGE) else EXTENSIONS / file.relative_to(EXTENSIONS).parts[0]
    return ".".join(file.relative_to(folder).with_suffix("").parts).removesuffix(".__init__")


def file_name(file: Path) -> str:
    """Return the path of a module in toolkit/ or extensions/NAME/, as data/base.py or toolkit_doctor/verify.py."""
    folder = PACKAGE if file.is_relative_to(PACKAGE) else EXTENSIONS / file.relative_to(EXTENSIONS).parts[0]
    return file.relative_to(folder).as_posix()


LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
F_STRING = tuple(getattr(tokenize, f"FSTRING_{end}", None) for end in ("START", "END"))  # one token before Python 3.12


def tokens_of(file: Path) -> int:
    """Count tokens without comments, docstrings and layout: unlike lines, they do not shrink when lines get longer."""
    kinds, depth = [tokenize.NEWLINE], 0
    with tokenize.open(file) as source:
        for kind, *_ in tokenize.generate_tokens(source.readline):
            depth += (kind == F_STRING[0]) - (kind == F_STRING[1])
            if not depth and kind not in LAYOUT:
                kinds.append(tokenize.STRING if kind == F_STRING[1] else kind)
    alone = [tokenize.NEWLINE, tokenize.STRING, tokenize.NEWLINE]
    docstrings = sum(kinds[i : i + 3] == alone for i in range(len(kinds)))
    return len(kinds) - kinds.count(tokenize.NEWLINE) - docstrings
