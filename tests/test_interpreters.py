"""Other Python versions that this machine has: all files compile, and what needs no torch passes its tests.

The packages that toolkit needs without torch are pure Python: other versions run those that are installed here.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from xml.etree import ElementTree

import pytest
from helpers.cases import slow_except
from helpers.sources import FOLDERS

from toolkit.extension import BUILT_IN

ROOT = Path(__file__).parents[1]
FIRST, *_ = VERSIONS = ["3.10", "3.11", "3.12", "3.13"]
PACKAGES = [  # jsonargparse, PyYAML, rich and pytest with what they need
    "jsonargparse", "docstring_parser", "typeshed_client", "typing_extensions.py", "yaml", "rich", "pygments",
    "markdown_it", "mdurl", "pytest", "_pytest", "py.py", "pluggy", "iniconfig", "packaging",
]  # fmt: skip
CLI = [
    "help_is_fast_and_does_not_import_torch", "help_is_one_screen_that_names_the_rest", "overview_lists_every_command",
    "only_the_selected_command_is_imported", "user_errors_in_a_real_process",
    "broken_pipe_exits_cleanly",
]  # fmt: skip
TESTS = [  # one that fails for want of a package does not count
    "tests/io", "tests/config", "tests/ui", "tests/training/test_garbage.py",
    *(f"tests/test_cli.py::test_{name}" for name in CLI),
]  # fmt: skip

# Python 3.10 has no exception groups; pytest takes them from a package that newer versions do not install.
GROUPS = """
class BaseExceptionGroup(BaseException):
    __class_getitem__ = classmethod(lambda cls, item: cls)
class ExceptionGroup(BaseExceptionGroup, Exception): ...
"""
IMPORT = """
import importlib, pathlib, pkgutil, sys
for folder in ("toolkit", "extensions", "scripts"):
    for path in pathlib.Path(folder).rglob("*.py"):
        compile(path.read_bytes(), path, "exec", dont_inherit=True)
for name in ("toolkit.io", "toolkit.config", "toolkit.ui", "toolkit.cli", "toolkit.training.garbage"):
    module = importlib.import_module(name)
    for found in pkgutil.walk_packages(getattr(module, "__path__", []), f"{name}."):
        importlib.import_module(found.name)
        print(found.name)
assert "torch" not in sys.modules
"""


def find_python(version: str) -> str:
    """Return an interpreter that runs; skip if none does."""
    folders = [Path(folder) for folder in os.get_exec_path()]
    for shims in [folder for folder in folders if folder.name == "shims"]:  # pyenv's, which may be switched off
        folders += shims.parent.glob(f"versions/{version}.*/bin")
    for folder in folders:
        if python := shutil.which(f"python{version}", path=folder):
            code = "import sys; print(*sys.version_info[:2], sep='.')"
            if subprocess.run([python, "-c", code], capture_output=True, text=True).stdout.strip() == version:
                return python
    pytest.skip(f"no Python {version} on this machine")


def run_python(version: str, folder: Path, *arguments: str | Path) -> subprocess.CompletedProcess:
    """Run another Python with the pure packages of this one, linked in ``folder``."""
    if version == f"{sys.version_info.major}.{sys.version_info.minor}":
        pytest.skip("the tests themselves run on this version")
    python = find_python(version)
    (folder / "packages").mkdir()
    for name in PACKAGES:
        (folder / "packages" / name).symlink_to(Path(sysconfig.get_path("purelib")) / name)
    if version == FIRST:
        (folder / "packages" / "exceptiongroup.py").write_text(GROUPS)
    built_in = [FOLDERS[name].parent for name in BUILT_IN]
    path = os.pathsep.join(map(str, [ROOT, *built_in, ROOT / "tests", folder / "packages"]))
    environment = os.environ | {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run([python, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("version", slow_except([FIRST], VERSIONS))
def test_files_compile_and_what_needs_no_torch_is_imported(version, tmp_path):
    done = run_python(version, tmp_path, "-c", IMPORT)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) > 30


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_what_needs_no_torch_passes(version, tmp_path):
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = slow\n    gpu\n")
    done = run_python(
        version, tmp_path, "-m", "pytest", "-q", "-c", tmp_path / "pytest.ini", "--rootdir", ROOT, "-m", "not slow",
        "-p", "no:cacheprovider", "--import-mode", "importlib", "--continue-on-collection-errors",
        "-o", "junit_logging=all", "--junitxml", tmp_path / "result.xml", *TESTS,
    )  # fmt: skip
    assert (tmp_path / "result.xml").exists(), done.stdout + done.stderr
    passed, failed = [], {}
    for case in ElementTree.parse(tmp_path / "result.xml").iter("testcase"):
        text = "".join(case.itertext())
        lacking = set(re.findall(r"No module named '(\w+)", text)) | set(re.findall(r"(\w+) is not installed", text))
        if not {part.tag for part in case} & {"failure", "error", "skipped"}:
            passed.append(case.get("name"))
        elif case.find("skipped") is None and not lacking - {"toolkit", "tests", *sys.stdlib_module_names}:
            failed[case.get("name")] = text[-3000:]
    assert not failed, "\n".join(f"{name}: {text}" for name, text in failed.items())
    assert len(passed) > 200
