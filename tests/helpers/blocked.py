"""Runs of toolkit in which some packages cannot be imported, forked where torch is imported and toolkit is not.

python -m helpers.blocked runs the cases of the JSON list on stdin: packages, a folder, and command lines. Each
folder gets results.json: exit code, stdout and stderr of each command.
"""

import contextlib
import gc
import io
import json
import os
import subprocess
import sys
import traceback
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import NamedTuple
from unittest import mock


class Case(NamedTuple):
    packages: list[str]
    folder: str
    commands: list[list[str]]


class Blocked(MetaPathFinder):
    def __init__(self, packages: list[str]) -> None:
        self.packages = packages

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name.partition(".")[0] in self.packages:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def run_cases(cases: list[Case]) -> list[list[tuple[int, str, str]]]:
    """Run each case in a process and return exit code, stdout and stderr of its commands."""
    path = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])  # tests/
    command = [sys.executable, "-P", "-m", "helpers.blocked"]
    done = subprocess.run(
        command, input=json.dumps(cases), capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path}
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(Path(case.folder, "results.json").read_text()) for case in cases]


def run_case(case: Case) -> None:
    sys.meta_path.insert(0, Blocked(case.packages))
    os.chdir(case.folder)
    from toolkit.cli import main

    results = []
    with mock.patch("lightning.fabric.fabric._load_external_callbacks", lambda group: []):  # searches all packages
        for words in case.commands:
            out, err = io.StringIO(), io.StringIO()
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                try:
                    code = main(words)
                except BaseException:
                    code = traceback.print_exc() or 1
            results.append((code, out.getvalue(), err.getvalue()))
    Path("results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    import lightning.fabric  # noqa: F401
    import litdata  # noqa: F401
    import tokenizers.implementations  # noqa: F401

    from helpers.surroundings import set_cpu

    set_cpu()
    gc.freeze()
    assert not any(name.partition(".")[0] == "toolkit" for name in sys.modules)
    for case in json.load(sys.stdin):
        if not (pid := os.fork()):
            try:
                run_case(Case(*case))
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        if os.waitpid(pid, 0)[1]:
            sys.exit(1)
