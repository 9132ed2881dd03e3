"""What the machine and the shell must not change in a test: environment, home, locale, temporary folder and CPU.

conftest.py applies it to the tests; rank_worker.py the part about the CPU to the processes that are forked for them.
"""

import atexit
import gc
import locale
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from unittest import mock

# Only what finds programs and packages, describes the hardware, or is for the test tools. Anything else may come from a
# launcher, a container, a company's proxy or a user's taste.
KEPT = {
    "PATH", "PYTHONPATH", "PYTHONHOME", "PYTHONPYCACHEPREFIX", "PYTHONDONTWRITEBYTECODE", "VIRTUAL_ENV", "TMPDIR",
    "USER", "LOGNAME", "CC", "CXX", "CHROMIUM", "PYENV_VERSION",
}  # fmt: skip
KEPT_GROUPS = (
    "PYTEST_", "COV_", "TOOLKIT_TEST_", "FUZZ_", "PIP_", "UV_", "LD_", "DYLD_", "CUDA_", "NVIDIA_", "NCCL_",
    "TORCHINDUCTOR_", "TRITON_", "ONEDNN_", "ATEN_", "MKL_",
)  # fmt: skip
TORCH = {  # one thread per process: bit-equality, and two cores
    "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
}  # fmt: skip
N_CPUS = 2
SLOW_COLLECTION_S = 0.01
MAX_TMPDIR = 60  # characters; the path of a process's socket has 32 more, and may have 103


def default_signals() -> None:
    """Undo what the background of a script and nohup ignore: processes that tests start would inherit it."""
    for number in (signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler)


def set_environment() -> None:
    """Replace this process's environment, which libraries read when they are imported."""
    _shorten_temporary_folder()
    home = tempfile.mkdtemp(prefix="home-")
    atexit.register(_remove_home, home, os.getpid())
    kept = {k: v for k, v in os.environ.items() if k in KEPT or k.startswith(KEPT_GROUPS)}
    git = {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "safe.directory", "GIT_CONFIG_VALUE_0": "*"}
    replace_environment(kept | TORCH | git | {"HOME": home, "LC_ALL": "C.UTF-8"})
    with suppress(locale.Error):  # text files are read as UTF-8
        locale.setlocale(locale.LC_CTYPE, "C.UTF-8")


def _remove_home(home: str, owner: int) -> None:
    if os.getpid() == owner:  # not in a forked process
        shutil.rmtree(home, ignore_errors=True)


def _shorten_temporary_folder() -> None:
    """Use /tmp for sockets where TMPDIR is too long for them; pytest's folders stay where TMPDIR says."""
    if len(usual := tempfile.gettempdir()) > MAX_TMPDIR:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", usual)
        os.environ["TMPDIR"] = tempfile.tempdir = "/tmp"


def replace_environment(values: dict[str, str]) -> None:
    """Change what differs and nothing else: other threads may be reading."""
    for name in os.environ.keys() - values.keys():
        del os.environ[name]
    for name, value in values.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


def set_cpu() -> None:
    """Let this process use one thread and see two cores that multiply bf16 matrices no faster than fp32 ones."""
    with suppress(ImportError):  # test_interpreters.py does without
        import torch

        torch.set_num_threads(1)
        torch.cpu._is_amx_tile_supported = lambda: False
    values = {"cpu_count": N_CPUS, "process_cpu_count": N_CPUS, "sched_getaffinity": set(range(N_CPUS))}
    for name, value in values.items():
        if hasattr(os, name):
            setattr(os, name, lambda *_, value=value: value)


get_freeze_count = gc.get_freeze_count


def freeze_objects() -> None:
    """Let full collections skip what was imported: a million objects, and a run collects about five times.

    A run asks how many objects are frozen, and counting them takes as long as a collection.
    """
    gc.collect()
    gc.freeze()
    if gc.get_freeze_count is get_freeze_count:
        n_frozen = get_freeze_count()
        gc.get_freeze_count = lambda: n_frozen


class SlowCollections:
    """Freezes objects again when full collections have become slow: a file's first run creates many that last."""

    def __init__(self) -> None:
        self._is_slow, self._started_at = False, 0.0
        gc.callbacks.append(self)

    def __call__(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._started_at = time.process_time()
        elif info["generation"] == 2 and time.process_time() - self._started_at > SLOW_COLLECTION_S:
            self._is_slow = True

    def freeze(self) -> None:
        if self._is_slow:
            freeze_objects()
            self._is_slow = False


@contextmanager
def short_outputs() -> Iterator[None]:
    """Do without what takes as long as a small run: draw no loss.png, and let finetuning sample 4 tokens, not 64.

    Nor does each Fabric search all installed packages for callbacks.
    """
    with (
        mock.patch("toolkit_report.page.plot_loss"),
        mock.patch("toolkit.training.callbacks.samples._NEW_TOKENS", 4),
        mock.patch("lightning.fabric.fabric._load_external_callbacks", lambda group: []),
    ):
        yield


class Folders:
    """Empty folders to run tests in."""

    def __init__(self, base: Path) -> None:
        self._base, self._number = base, 0

    @contextmanager
    def inside(self, is_shared: bool = False) -> Iterator[Path]:
        """Run in an empty folder; another one may run there afterwards if it is empty still.

        Args:
            is_shared: Whether other tests, in other folders, run in the meantime.
        """
        folder, before = self._base / str(self._number), os.getcwd()
        folder.mkdir(exist_ok=True)
        self._number += is_shared
        os.chdir(folder)
        try:
            yield folder
        finally:
            os.chdir(before)
            if not is_shared and any(os.scandir(folder)):
                self._number += 1
