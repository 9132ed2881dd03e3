"""Programs that start the processes of a run, and the environment variables in which they describe it.

One table: a launcher that it lacks is not read. :mod:`toolkit.distributed.world` turns a row into ranks.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from typing import NamedTuple

from toolkit.errors import CommandError, UserError, one_line

Environ = Mapping[str, str]
PARENT = "TOOLKIT_PARENT_PID"  # PID of the process on this node that launched this one


class Launcher(NamedTuple):
    """A row of the table: names of variables, empty where the launcher sets none."""

    name: str
    size: str
    """Number of tasks (processes that it started), or of nodes if it has no ``local_rank``."""
    rank: str
    """Rank of this task, or of this node."""
    local_rank: str = ""
    """Rank of this task on its node."""
    nodes: str = ""
    """Number of nodes, of a launcher of tasks. Without it ``local_size``, the tasks of this node, gives the number."""
    local_size: str = ""
    """Tasks of this node, or processes that this node should have."""
    address: str = ""
    """Address of node 0; several addresses are separated by spaces or lines."""
    port: str = ""
    per_node: str = ""
    """Command that starts ``{}`` tasks per node, for messages."""

    @property
    def variables(self) -> list[str]:
        fields = (self.size, self.rank, self.local_rank, self.nodes, self.local_size, self.address, self.port)
        return [name for name in fields if name]

    @property
    def needed(self) -> list[str]:
        """The variables without which several tasks or nodes are not described."""
        names = [self.rank, self.local_rank, self.nodes, self.local_size if self.starts_tasks else ""]
        return [name for name in names if name]

    @property
    def starts_tasks(self) -> bool:
        """Whether it starts every process. Otherwise one per node, in which toolkit starts the others."""
        return bool(self.local_rank)

    def count(self, environ: Environ) -> int:
        """Return the number of tasks or nodes, the smallest of a range such as 1:4; 0 if it is not set."""
        number = environ.get(self.size, "").partition(":")[0]
        return int(number) if number.isdecimal() else 0


TORCHRUN = Launcher("torchrun", "WORLD_SIZE", "RANK", "LOCAL_RANK", "GROUP_WORLD_SIZE", "LOCAL_WORLD_SIZE",
                    per_node="torchrun --nproc_per_node {}")  # fmt: skip
SLURM = Launcher("SLURM", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NNODES",
                 per_node="srun --ntasks-per-node {}")  # fmt: skip
PYTORCH_JOB = Launcher("Kubeflow's PyTorchJob", "WORLD_SIZE", "RANK", address="MASTER_ADDR", port="MASTER_PORT")
_MPICH = Launcher("MPICH or Intel MPI", "PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID", "", "MPI_LOCALNRANKS",
                  per_node="mpiexec -ppn {}")  # fmt: skip
_LAUNCHERS = [
    Launcher("Open MPI", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "",
             "OMPI_COMM_WORLD_LOCAL_SIZE", per_node="mpirun --map-by ppr:{}:node"),
    Launcher("MVAPICH", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_LOCAL_RANK", "",
             "MV2_COMM_WORLD_LOCAL_SIZE", per_node="mpiexec -ppn {}"),
    Launcher("Flux", "FLUX_JOB_SIZE", "FLUX_TASK_RANK", "FLUX_TASK_LOCAL_ID", "FLUX_JOB_NNODES",
             per_node="flux run --tasks-per-node {}"),
    Launcher("LSF", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_LOCAL_RANK", "",
             "JSM_NAMESPACE_LOCAL_SIZE", per_node="jsrun -r 1 -a {}"),
    _MPICH,
    Launcher("Kubeflow", "PET_NNODES", "PET_NODE_RANK", local_size="PET_NPROC_PER_NODE", address="PET_MASTER_ADDR",
             port="PET_MASTER_PORT"),
    Launcher("SkyPilot", "SKYPILOT_NUM_NODES", "SKYPILOT_NODE_RANK", address="SKYPILOT_NODE_IPS"),
]  # fmt: skip
"""The launchers besides torchrun and SLURM. Those that start tasks may run inside the others, so they come first."""

_INDEXES = {
    "JOB_COMPLETION_INDEX": "a pod of a Kubernetes Job",
    "VC_TASK_INDEX": "a pod of a Volcano job",
    "PMIX_RANK": "a task of PMIx",
}
"""Variables that number nodes or tasks, of launchers that do not say how many there are."""

COMMON = ["NODE_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]
"""The variables of torchrun, and of users."""
_OF_LAUNCHERS = re.compile(
    "(SLURM|TORCHELASTIC|MASTER|LOCAL|GROUP|ROLE)_.*|TOOLKIT_PARENT_PID|RANK|NODE_RANK|WORLD_SIZE"
)


def find_launchers(environ: Environ = os.environ) -> list[Launcher]:
    """Return the launchers whose variables are set, innermost first.

    Raises:
        UserError: this process is not described by LOCAL_RANK, and variables of a launcher are missing.
    """
    found = []
    is_described = "LOCAL_RANK" in environ
    for launcher in _LAUNCHERS:
        if launcher is _MPICH and "SLURM_STEP_ID" in environ and launcher.local_rank not in environ:
            continue  # srun sets PMI variables, too
        present = [name for name in launcher.variables if environ.get(name)]
        needed = [launcher.size, *([] if launcher.count(environ) < 2 else launcher.needed)]
        missing = [name for name in needed if not environ.get(name)]
        if present and missing and not is_described:
            raise UserError(
                f"{missing[0]}: not set, but {launcher.name} sets it together with {present[0]}; give toolkit all its "
                f"variables, or unset {' and '.join(present)}"
            )
        if launcher.size in present:
            found.append(launcher)
    is_pod = "KUBERNETES_SERVICE_HOST" in environ and {"RANK", "WORLD_SIZE"} <= environ.keys()
    return [PYTORCH_JOB] if is_pod and not found and not is_described else found


def read_variables(launcher: str) -> dict[str, str]:
    """Return the variables that describe this process, by the name of its launcher in ``WorldInfo``."""
    rows = {row.name: row.variables for row in (*_LAUNCHERS, SLURM, PYTORCH_JOB)}
    return {name: os.environ[name] for name in rows.get(launcher, COMMON) if name in os.environ}


def is_launcher_variable(name: str) -> bool:
    """Whether a launcher such as torchrun or SLURM sets this environment variable for its processes."""
    rows = {variable for row in _LAUNCHERS for variable in row.variables}
    return name in rows or name in _INDEXES or _OF_LAUNCHERS.fullmatch(name) is not None


def run_toolkit(words: list[str], timeout: float | None = None) -> str:
    """Run a toolkit command in a new process, which is not of this one's launcher, and return its output.

    Raises:
        CommandError: It has failed; the message is the last line that it printed on standard error.
    """
    environ = {name: value for name, value in os.environ.items() if not is_launcher_variable(name)}
    command = [sys.executable, "-m", "toolkit", *words]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=timeout)
    if done.returncode:
        raise CommandError(one_line((done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]))
    return done.stdout


def find_index(environ: Environ = os.environ) -> tuple[str, str] | None:
    """Return a variable that numbers this process, and what the process is, if nothing else describes it."""
    is_described = {"NODE_RANK", "LOCAL_RANK", SLURM.size} & environ.keys() or find_launchers(environ)
    return None if is_described else next((pair for pair in _INDEXES.items() if environ.get(pair[0])), None)


def is_launched() -> bool:
    """Whether a launcher started this process."""
    return bool({"LOCAL_RANK", "RANK", SLURM.rank} & os.environ.keys() or find_launchers())
