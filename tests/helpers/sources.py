"""The source files of toolkit and of its built-in extensions."""

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
