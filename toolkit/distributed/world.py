"""Detection of world size and ranks from the variables of a launcher, see :mod:`toolkit.distributed.launchers`.

Fabric detects these too, but with "auto" devices under torchrun, or with one SLURM task and two devices, its processes
silently train independently. So detection happens here, before Fabric is built, and contradictions are errors.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from toolkit.config import AUTO, Accelerator, Auto
from toolkit.distributed.launchers import PYTORCH_JOB, SLURM, TORCHRUN, Environ, Launcher, find_index, find_launchers
from toolkit.errors import UserError, count_of

if TYPE_CHECKING:
    from lightning.fabric.plugins.environments import ClusterEnvironment

_NODE_LISTS = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
_LOCALHOST = "127.0.0.1"


@dataclass(frozen=True)
class WorldInfo:
    """Number of processes of a run, one per device, and the ranks of this process.

    ``launcher`` is what set the ranks: torchrun, SLURM, the name of another one, or toolkit if there is none. "manual"
    is anything else that sets LOCAL_RANK: the user, an unknown launcher, toolkit for the processes that it launches.
    """

    devices: int
    """Processes per node."""
    num_nodes: int
    node_rank: int
    local_rank: int
    launcher: str
    starts_processes: bool
    """Whether this process launches the other ``devices - 1`` of its node."""
    variables: Mapping[str, str] = field(default_factory=dict, compare=False)
    """What the launcher's variables say, in the variables that torch and Fabric read."""

    @property
    def world_size(self) -> int:
        return self.num_nodes * self.devices

    @property
    def global_rank(self) -> int:
        """Global rank. Ranks of a node are consecutive; a RANK or SLURM_PROCID that differs is an error."""
        return self.node_rank * self.devices + self.local_rank


def detect_world(
    devices: int | Auto, num_nodes: int | Auto, available: int | None, environ: Environ = os.environ
) -> WorldInfo:
    """Detect the ranks of this run's processes from the environment.

    Args:
        devices: Processes per node; "auto" is the launcher's number, otherwise all devices of the node.
        num_nodes: "auto" is the launcher's number, otherwise 1.
        available: Number of devices visible to this process; None on a CPU, where any number of processes can run and
            "auto" is 1.
        environ: Environment variables.
    """
    if devices != AUTO and (not isinstance(devices, int) or devices < 1):
        raise UserError(f"--devices {devices}: must be auto or at least 1")
    if num_nodes != AUTO and num_nodes < 1:
        raise UserError(f"--num_nodes {num_nodes}: must be at least 1")
    _number("MASTER_PORT", environ, 1, below=65536, default=1)
    if not re.fullmatch(r"[\w.-]*|[\da-fA-F:.]+(%[\w.-]+)?", address := environ.get("MASTER_ADDR", "")):
        raise UserError(f"MASTER_ADDR={address}: must be a host name or an IP address alone, such as gpu07 or ::1")
    launchers = find_launchers(environ)
    of_tasks = next((each for each in launchers if each.starts_tasks and each.count(environ) > 1), None)
    of_nodes = next((each for each in launchers if not each.starts_tasks), None)
    if {"TORCHELASTIC_RUN_ID", "GROUP_WORLD_SIZE"} & environ.keys():
        world = _read_tasks(TORCHRUN, devices, num_nodes, available, environ)
    elif of_tasks is not None and "LOCAL_RANK" not in environ:
        world = _read_tasks(of_tasks, devices, num_nodes, available, environ)
    elif of_tasks is None and _is_slurm_task(environ):
        world = _read_slurm(devices, num_nodes, available, environ)
    elif "LOCAL_RANK" in environ:
        world = _read_manual(devices, num_nodes, environ)
    else:
        world = _read_node(of_nodes, devices, num_nodes, available, environ)
    _check_available(world, available, environ)
    for launcher in launchers:
        _check_agrees(launcher, world, environ)
    return world


def count_processes(devices: int | Auto, num_nodes: int | Auto, accelerator: Accelerator) -> int:
    """Return the number of processes of a run from its options. Imports torch only to count GPUs."""
    available = None
    if devices == AUTO and accelerator in (AUTO, "cuda", "mps"):
        from toolkit.distributed.device import count_devices, pick_accelerator

        available = count_devices(pick_accelerator(accelerator))
    return detect_world(devices, num_nodes, available).world_size


def cluster_environment(world: WorldInfo) -> ClusterEnvironment:
    """Return the cluster environment plugin that passes these ranks to Fabric.

    Lightning's environments read ``os.environ`` on every access, so variables that the launcher did not set are set
    there. Processes that Fabric launches inherit them.
    """
    from lightning.fabric.plugins.environments import LightningEnvironment, TorchElasticEnvironment

    if world.launcher == TORCHRUN.name:
        return TorchElasticEnvironment()
    if world.launcher == SLURM.name:
        return _slurm_environment(world)
    if world.world_size > 1:
        _set_node(world)
    return LightningEnvironment()


def _is_slurm_task(environ: Environ) -> bool:
    """Whether SLURM set this process's rank. A LOCAL_RANK that differs is set by a launcher inside the task."""
    if not {"SLURM_NTASKS", "SLURM_PROCID"} <= environ.keys():
        return False
    if environ.get("LOCAL_RANK") not in (None, environ.get("SLURM_LOCALID")):
        return False
    if (name := environ.get("SLURM_JOB_NAME")) not in ("bash", "interactive") or (
        "SLURM_STEP_ID" in environ and "SLURM_PTY_PORT" not in environ  # srun inside a salloc job of that name
    ):
        return True
    if _number("SLURM_PROCID", environ, 0) == 0:  # an interactive shell with all devices of the node
        return False
    raise UserError(
        f"SLURM_JOB_NAME={name}: an interactive shell cannot be one of several tasks; use srun --job-name train"
    )


def _read_slurm(devices: int | Auto, num_nodes: int | Auto, available: int | None, environ: Environ) -> WorldInfo:
    tasks = _number("SLURM_NTASKS", environ, 1)
    # SLURM numbers the batch script 0 of all tasks; the other tasks do not exist before srun.
    in_batch_script = environ.get("ENVIRONMENT") == "BATCH" and "SLURM_STEP_ID" not in environ
    if in_batch_script and "LOCAL_RANK" in environ:
        return _read_manual(devices, num_nodes, environ)
    if in_batch_script and tasks > 1:
        raise UserError(
            f"SLURM_NTASKS={tasks}: toolkit was started by the batch script, as a single task; start it with srun "
            "toolkit ..., or submit the job with --ntasks=1"
        )
    world = _read_tasks(SLURM, devices, num_nodes, available, environ)
    if (nodes := world.num_nodes) > 1 and not any(environ.get(name) for name in ("MASTER_ADDR", *_NODE_LISTS)):
        raise UserError(f"SLURM_NNODES={nodes}: SLURM_JOB_NODELIST is not set; set MASTER_ADDR to the first node")
    if world.starts_processes and "LOCAL_RANK" in environ:  # the first process of a node, after it launched the others
        return _read_manual(world.devices, world.num_nodes, environ)
    return world


def _read_tasks(
    launcher: Launcher, devices: int | Auto, num_nodes: int | Auto, available: int | None, environ: Environ
) -> WorldInfo:
    """Read the ranks of a launcher of tasks: one per device, or one per node, which launches the others."""
    tasks = _number(launcher.size, environ, 1)
    if launcher.local_size:
        nodes, left_over = divmod(tasks, _number(launcher.local_size, environ, 1, below=tasks + 1))
        left_over = left_over or nodes - _number(launcher.nodes, environ, 1, default=nodes)
    else:
        nodes = _number(launcher.nodes, environ, 1, default=1 if num_nodes == AUTO else num_nodes)
        left_over = tasks % nodes
    counts = [name for name in (launcher.size, launcher.nodes, launcher.local_size) if environ.get(name)]
    shown = ", ".join(f"{name}={environ[name]}" for name in counts)
    started = f"{launcher.name} started {count_of(tasks, 'task')} on {count_of(nodes, 'node')} ({shown})"
    if num_nodes not in (AUTO, nodes):
        hint = f"drop --num_nodes, or start {count_of(num_nodes, 'node')}"
        raise UserError(f"--num_nodes {num_nodes}: {started}; {hint}")
    if devices == AUTO:
        devices = available if tasks == nodes and available and launcher is not TORCHRUN else tasks // nodes
    hint = launcher.per_node.format(devices)
    if left_over:
        raise UserError(f"{launcher.size}={tasks}: {started}, unevenly; use {hint}")
    if tasks != devices * nodes and (tasks != nodes or launcher is TORCHRUN):
        raise UserError(f"--devices {devices}: {started}; drop --devices, or use {hint}")
    rank, local_rank = _number(launcher.rank, environ, 0, below=tasks), _number(launcher.local_rank, environ, 0)
    starts = tasks < devices * nodes
    node_rank = _number("SLURM_NODEID", environ, 0, below=nodes) if launcher is SLURM else rank * nodes // tasks
    world = WorldInfo(devices, nodes, node_rank, 0 if starts else local_rank, launcher.name, starts)
    # Shard groups of tasks that are numbered across the nodes would span all nodes.
    if local_rank >= tasks // nodes or rank != node_rank * (tasks // nodes) + local_rank:
        block = " --distribution block" if launcher is SLURM else ""
        raise UserError(
            f"{launcher.rank}={rank}: task {local_rank} of node {node_rank}, but each node must run "
            f"{tasks // nodes} consecutive tasks; use {launcher.per_node.format(tasks // nodes)}{block}"
        )
    if launcher in (SLURM, TORCHRUN):
        return world
    needed = ["MASTER_ADDR"] * (nodes > 1) + ["MASTER_PORT"] * (nodes > 1 or not starts)
    if missing := [name for name in needed if not environ.get(name)]:
        what = "the first node and a free port" if nodes > 1 else "a free port"
        raise UserError(
            f"{' and '.join(missing)}: not set; {launcher.name} does not tell tasks how to connect, so start all with "
            f"the same values ({what})"
        )
    variables = {"NODE_RANK": str(node_rank)}
    variables |= {} if starts else {"LOCAL_RANK": str(local_rank), "WORLD_SIZE": str(tasks)}
    return replace(world, variables=variables)


def _read_manual(devices: int | Auto, num_nodes: int | Auto, environ: Environ) -> WorldInfo:
    """Read LOCAL_RANK and related variables. Missing values are errors, because a wrong guess would hang."""
    world_size = _number("WORLD_SIZE", environ, 1, default=0)
    per_node = _number("LOCAL_WORLD_SIZE", environ, 1, default=1 if world_size == 1 else 0)
    started = f"LOCAL_RANK={environ['LOCAL_RANK']} means that a launcher started this process"
    if devices == AUTO:
        if not per_node:
            raise UserError(f"--devices auto: {started}; give the number per node, or unset LOCAL_RANK")
        devices = per_node
    elif per_node not in (0, devices):
        variable = f"LOCAL_WORLD_SIZE={per_node}" if "LOCAL_WORLD_SIZE" in environ else f"WORLD_SIZE={world_size}"
        raise UserError(f"--devices {devices}: {started}, one of {per_node} ({variable}); set both to the same number")
    nodes = max(1, world_size // devices) if num_nodes == AUTO else num_nodes
    if world_size and world_size != devices * nodes:
        raise UserError(
            f"WORLD_SIZE={world_size}: not equal to --devices {devices} x --num_nodes {nodes}; "
            "use the launcher's numbers, or unset LOCAL_RANK"
        )
    local_rank = _number("LOCAL_RANK", environ, 0, below=devices)
    by_rank = None if "RANK" not in environ else _number("RANK", environ, 0, below=devices * nodes) // devices
    # The port is required on one node, too; otherwise each process would choose a different one.
    address = ["MASTER_ADDR"] * (nodes > 1) + ["MASTER_PORT"] * (devices * nodes > 1)
    node_rank = _node_rank(nodes, environ, address, default=by_rank)
    world = WorldInfo(devices, nodes, node_rank, local_rank, "manual", False)
    if (rank := _number("RANK", environ, 0, default=world.global_rank)) != world.global_rank:
        raise UserError(
            f"RANK={rank}: process {local_rank} of node {node_rank}, with {devices} on each node, has rank "
            f"{world.global_rank}; number the ranks node by node"
        )
    return world


def _read_node(
    launcher: Launcher | None, devices: int | Auto, num_nodes: int | Auto, available: int | None, environ: Environ
) -> WorldInfo:
    """Return the ranks of the first process of a node, of a launcher of nodes or without one."""
    variables: dict[str, str] = {}
    if launcher is not None:
        if ":" in environ[launcher.size]:
            hint = "start torchrun -m toolkit, which connects as many as there are"
            raise UserError(f"{launcher.size}={environ[launcher.size]}: a number of nodes that changes; {hint}")
        nodes = _number(launcher.size, environ, 1)
        if num_nodes not in (AUTO, nodes):
            started = f"{launcher.name} started {count_of(nodes, 'node')} ({launcher.size}={nodes})"
            raise UserError(f"--num_nodes {num_nodes}: {started}; drop --num_nodes")
        if (per_node := environ.get(launcher.local_size, "")).isdecimal():
            if devices not in (AUTO, int(per_node)):
                raise UserError(f"--devices {devices}: not equal to {launcher.local_size}={per_node}; drop --devices")
            devices = int(per_node)
        if nodes > 1:
            addresses = (environ.get("MASTER_ADDR") or environ.get(launcher.address, "")).split()
            if not addresses:
                raise UserError(f"{launcher.address}: not set; it must be the address of the first of {nodes} nodes")
            variables = {"NODE_RANK": environ[launcher.rank], "MASTER_PORT": environ.get(launcher.port) or "29500"}
            variables["MASTER_ADDR"] = addresses[0]
    else:
        nodes = 1 if num_nodes == AUTO else num_nodes
        if (index := find_index(environ)) is not None:
            name, what = index
            if num_nodes == AUTO:
                hint = "use --num_nodes (1: this one trains alone)"
                raise UserError(f"{name}={environ[name]}: {what}, which does not say how many there are; {hint}")
            variables = {"NODE_RANK": environ[name]} if nodes > 1 else {}
    environ = {**variables, **environ}
    devices = (available or 1) if devices == AUTO else devices
    node_rank = _node_rank(nodes, environ, ["MASTER_ADDR", "MASTER_PORT"] if nodes > 1 else [])
    if launcher is not PYTORCH_JOB:  # its RANK and WORLD_SIZE count pods
        pod = 0 if launcher is None else node_rank  # a newer PyTorchJob also sets PET_*
        for name, limit in (("WORLD_SIZE", devices * nodes), ("LOCAL_WORLD_SIZE", devices), ("RANK", pod)):
            if (number := _number(name, environ, 0, default=0)) > limit:
                hint = f"set it to the rank within the node, or unset {name} if toolkit starts the processes"
                raise UserError(f"{name}={number}: one of several processes, but LOCAL_RANK is not set; {hint}")
    name = "toolkit" if launcher is None else launcher.name
    return WorldInfo(devices, nodes, node_rank, 0, name, starts_processes=devices > 1, variables=variables)


def _node_rank(nodes: int, environ: Environ, address: list[str], default: int | None = None) -> int:
    """Return this node's rank, and require the variables ``address``, by which the processes find each other."""

    def require(names: list[str]) -> None:
        for name in (name for name in names if not environ.get(name)):
            if nodes > 1:
                raise UserError(f"--num_nodes {nodes}: {name} is not set; {_variables_hint(nodes)}")
            raise UserError(f"{name}: not set; set it to the same free port for all processes")

    if nodes > 1 and default is None:
        require(["NODE_RANK"])
    value = _number("NODE_RANK", environ, 0, default=default or 0)
    if value >= nodes:
        hint = _variables_hint(nodes) if nodes > 1 else "unset NODE_RANK, or use --num_nodes 2"
        raise UserError(f"NODE_RANK={value}: must be less than --num_nodes {nodes}; {hint}")
    require(address)
    return value


def _variables_hint(nodes: int) -> str:
    return (
        f"on every node, start the same command with NODE_RANK=0 (the others: 1{f' to {nodes - 1}' * (nodes > 2)}), "
        f"MASTER_ADDR={socket.gethostname()} (the name of node 0) and MASTER_PORT=29500 before it"
    )


def _check_available(world: WorldInfo, available: int | None, environ: Environ) -> None:
    if available is None or world.devices <= available:
        return
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    count = count_of(available, "device") + (f" (CUDA_VISIBLE_DEVICES={visible})" if visible else "")
    if world.launcher == SLURM.name and not world.starts_processes:
        hint = "every task must see all devices of its node: use srun --gpus-per-node, not --gpus-per-task"
        raise UserError(f"--devices {world.devices}: this task sees {count}; {hint}")
    hint = f"torchrun --nproc_per_node {available}" if world.launcher == TORCHRUN.name else f"--devices {available}"
    raise UserError(f"--devices {world.devices}: this machine has {count}; use {hint}")


def _check_agrees(launcher: Launcher, world: WorldInfo, environ: Environ) -> None:
    """Reject a launcher that started tasks or nodes which this run does not contain: each would train alone."""
    if (number := launcher.count(environ)) <= 1:
        return
    is_of_tasks = launcher.starts_tasks and not world.starts_processes and number == world.world_size
    what = "task" if launcher.starts_tasks else "node"
    started = f"{launcher.name} started {count_of(number, what)}"
    hint = f"to train one model per {what}, unset {launcher.size}"
    if number != world.num_nodes and not is_of_tasks:
        run = f"{count_of(world.num_nodes, 'node')} of {count_of(world.devices, 'process')} (by {world.launcher})"
        raise UserError(f"{launcher.size}={number}: {started}, but this run has {run}; {hint}")
    expected = world.global_rank if is_of_tasks else world.node_rank
    if (rank := _number(launcher.rank, environ, 0, default=expected)) != expected:
        here = f"this is {what} {expected} (by {world.launcher})"
        raise UserError(f"{launcher.rank}={rank}: {started}, but {here}; let both agree, or {hint}")


def _number(name: str, environ: Environ, at_least: int, *, below: int | None = None, default: int | None = None) -> int:
    """Return a variable as an integer, or ``default`` if it is not set."""
    if (value := environ.get(name)) is None:
        if default is None:
            raise UserError(f"{name}: not set by this process's launcher")
        return default
    if not value.strip().isdecimal():
        raise UserError(f"{name}={value}: must be an integer")
    number = int(value)
    if number < at_least or (below is not None and number >= below):
        upper = "" if below is None else f" and less than {below}"
        raise UserError(f"{name}={value}: must be at least {at_least}{upper}")
    return number


def _slurm_environment(world: WorldInfo) -> ClusterEnvironment:
    from lightning.fabric.plugins.environments import LightningEnvironment, SLURMEnvironment

    # Lightning requires it, but only --ntasks-per-node sets it, and srun may start another number.
    os.environ["SLURM_NTASKS_PER_NODE"] = str(1 if world.starts_processes else world.devices)
    slurm = SLURMEnvironment(auto_requeue=False)
    nodes = next((os.environ[name] for name in _NODE_LISTS if os.environ.get(name)), _LOCALHOST)
    # On one node the loopback address: node names do not resolve everywhere.
    root = _LOCALHOST if world.num_nodes == 1 else _first_node(nodes)
    os.environ.setdefault("MASTER_ADDR", root)
    if not world.starts_processes:
        return slurm
    if world.num_nodes > 1:
        os.environ["MASTER_PORT"] = str(slurm.main_port)  # on one node any free port works
    _set_node(world)
    return LightningEnvironment()


def _first_node(nodes: str) -> str:
    """Return the first name of SLURM's list: ``rack1node3-ib`` for ``rack[1-2]node[3-4,7]-ib,login``."""
    first = re.match(r"(\[[^]]*\]|[^,\s])*", nodes)
    return re.sub(r"\[(\w+)[^]]*\]", r"\1", first[0]) if first else nodes


def _set_node(world: WorldInfo) -> None:
    """Set the variables that launched processes inherit. LOCAL_WORLD_SIZE is the resolved value of --devices."""
    if world.launcher == PYTORCH_JOB.name:  # they count pods
        del os.environ["RANK"], os.environ["WORLD_SIZE"]
    for name, value in world.variables.items():
        os.environ.setdefault(name, value)
    os.environ["NODE_RANK"], os.environ["LOCAL_WORLD_SIZE"] = str(world.node_rank), str(world.devices)
