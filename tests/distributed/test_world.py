import json
import os
import socket
import subprocess
import sys
from functools import partial
from itertools import chain, combinations

import pytest
from helpers.cases import check_each

from toolkit.distributed.world import WorldInfo, _first_node, cluster_environment, detect_world
from toolkit.errors import UserError

LAUNCHERS = ("SLURM", "TORCHELASTIC", "MASTER_", "GROUP_", "LOCAL_", "NODE_", "PET_", "OMPI_", "PMI_", "KUBERNETES_")


def clean(**more: object) -> dict[str, str]:
    """Return this machine's environment without variables that a launcher of the tests may have set."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHERS) and k not in ("RANK", "WORLD_SIZE")}
    return kept | {k: str(v) for k, v in more.items()}


def torchrun(rank=0, world=4, per_node=2, **more):
    values = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": per_node, "LOCAL_RANK": rank % per_node}
    values |= {"TORCHELASTIC_RUN_ID": "none", "GROUP_RANK": rank // per_node, "GROUP_WORLD_SIZE": world // per_node}
    return {k: str(v) for k, v in (values | more).items()}


def slurm(rank=0, tasks=4, nodes=2, **more):
    per_node = max(1, tasks // nodes)
    values = {"SLURM_NTASKS": tasks, "SLURM_NNODES": nodes, "SLURM_STEP_ID": 0, "SLURM_JOB_NAME": "train"}
    values |= {"SLURM_PROCID": rank, "SLURM_LOCALID": rank % per_node, "SLURM_NODEID": rank // per_node}
    values |= {"SLURM_JOB_NODELIST": "gpu[07-08]", "SLURM_JOB_ID": 1234567}
    return {k: str(v) for k, v in (values | more).items()}


def manual(**more):
    return {k: str(v) for k, v in ({"LOCAL_RANK": 1, "MASTER_PORT": 29500} | more).items()}


def tasks(name: str, rank=0, number=4, per_node=2, **more):
    """Return what Open MPI, MPICH, Flux or LSF sets."""
    variables = {
        "mpirun": ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK",
                   "OMPI_COMM_WORLD_LOCAL_SIZE"),
        "mpich": ("PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
        "mvapich": ("MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_LOCAL_RANK",
                    "MV2_COMM_WORLD_LOCAL_SIZE"),
        "jsrun": ("JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_LOCAL_RANK", "JSM_NAMESPACE_LOCAL_SIZE"),
        "flux": ("FLUX_JOB_SIZE", "FLUX_TASK_RANK", "FLUX_TASK_LOCAL_ID", "FLUX_JOB_NNODES"),
    }[name]  # fmt: skip
    last = number // per_node if name == "flux" else per_node
    values = dict(zip(variables, (number, rank, rank % per_node, last), strict=True)) | NODES
    return {k: str(v) for k, v in (values | more).items()}


def kubeflow(rank=0, nodes=2, per_node="auto", **more):
    values = {"PET_NNODES": nodes, "PET_NODE_RANK": rank, "PET_NPROC_PER_NODE": per_node, "JOB_COMPLETION_INDEX": rank}
    values |= {"PET_MASTER_ADDR": "job-node-0-0.job", "PET_MASTER_PORT": 29400}
    return {k: str(v) for k, v in (values | more).items()}


def skypilot(rank=0, nodes=2, **more):
    values = {"SKYPILOT_NUM_NODES": nodes, "SKYPILOT_NODE_RANK": rank, "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"}
    return {k: str(v) for k, v in (values | {"SKYPILOT_NUM_GPUS_PER_NODE": 8} | more).items()}


def pytorch_job(rank=0, pods=2, **more):
    values = {"KUBERNETES_SERVICE_HOST": "10.0.0.9", "WORLD_SIZE": pods, "RANK": rank} | NODES
    return {k: str(v) for k, v in (values | more).items()}


def without(environ, *names):
    return {k: v for k, v in environ.items() if k not in names}


NODES = {"MASTER_ADDR": "gpu07", "MASTER_PORT": "29500"}
TWO = {"NODE_RANK": "1", **NODES}
# devices, num_nodes, available, environment -> devices, nodes, node rank, local rank, launcher, starts processes
READ = {
    "nothing": ("auto", "auto", None, {}, (1, 1, 0, 0, "toolkit", False)),
    "all GPUs": ("auto", "auto", 4, {}, (4, 1, 0, 0, "toolkit", True)),
    "two of the GPUs": (2, 1, 4, {}, (2, 1, 0, 0, "toolkit", True)),
    "processes on a CPU": (3, "auto", None, {}, (3, 1, 0, 0, "toolkit", True)),
    "second node": (2, 2, 2, TWO, (2, 2, 1, 0, "toolkit", True)),
    "second node, IPv6": (2, 2, 2, TWO | {"MASTER_ADDR": "fe80::1%eth0"}, (2, 2, 1, 0, "toolkit", True)),
    "second node, one device": (1, 2, None, TWO, (1, 2, 1, 0, "toolkit", False)),
    "torchrun": ("auto", "auto", 2, torchrun(3), (2, 2, 1, 1, "torchrun", False)),
    "torchrun and the same flags": (2, 2, None, torchrun(2), (2, 2, 1, 0, "torchrun", False)),
    "torchrun, one process": ("auto", "auto", 4, torchrun(0, 1, 1), (1, 1, 0, 0, "torchrun", False)),
    "torchrun in a SLURM task": ("auto", "auto", None, slurm(1, 2, 2) | torchrun(3), (2, 2, 1, 1, "torchrun", False)),
    "srun": (2, 2, 2, slurm(3), (2, 2, 1, 1, "SLURM", False)),
    "srun, auto": ("auto", "auto", 2, slurm(2), (2, 2, 1, 0, "SLURM", False)),
    "srun, wrapper sets LOCAL_RANK": (2, "auto", None, slurm(3, LOCAL_RANK=1), (2, 2, 1, 1, "SLURM", False)),
    "srun, a launcher in a task": (2, "auto", None, slurm(0, 2, 1) | manual(), (2, 1, 0, 1, "manual", False)),
    "srun in a batch script": (2, "auto", None, slurm(3, ENVIRONMENT="BATCH"), (2, 2, 1, 1, "SLURM", False)),
    "srun in salloc": (2, "auto", None, slurm(3, SLURM_JOB_NAME="interactive"), (2, 2, 1, 1, "SLURM", False)),
    "srun, task per node": (8, 2, 8, slurm(1, 2, 2), (8, 2, 1, 0, "SLURM", True)),
    "srun, one task": (2, "auto", None, slurm(0, 1, 1), (2, 1, 0, 0, "SLURM", True)),
    "srun, task per node, auto": ("auto", "auto", 8, slurm(1, 2, 2), (8, 2, 1, 0, "SLURM", True)),
    "srun, task per node, auto, CPU": ("auto", "auto", None, slurm(1, 2, 2), (1, 2, 1, 0, "SLURM", False)),
    "a child of such a task": (
        "auto", "auto", 2, slurm(1, 2, 2, LOCAL_RANK=1, LOCAL_WORLD_SIZE=2, WORLD_SIZE=4, **TWO),
        (2, 2, 1, 1, "manual", False),
    ),
    "such a task, later": (
        2, "auto", 2, slurm(1, 2, 2, LOCAL_RANK=0, LOCAL_WORLD_SIZE=2, WORLD_SIZE=4, **TWO),
        (2, 2, 1, 0, "manual", False),
    ),
    "batch script of one task": (
        2, "auto", None, {k: v for k, v in slurm(0, 1, 1, ENVIRONMENT="BATCH").items() if k != "SLURM_STEP_ID"},
        (2, 1, 0, 0, "SLURM", True),
    ),
    "loop in a batch script": (
        8, "auto", 8, {k: v for k, v in slurm(0, 8, 1, ENVIRONMENT="BATCH").items() if k != "SLURM_STEP_ID"}
        | manual(LOCAL_RANK=0), (8, 1, 0, 0, "manual", False),
    ),
    "shell in SLURM": (
        2, "auto", None, slurm(0, 4, 1, SLURM_JOB_NAME="bash", SLURM_PTY_PORT=1), (2, 1, 0, 0, "toolkit", True),
    ),
    "salloc's shell": (2, "auto", None, {"SLURM_NTASKS": "4", "SLURM_NNODES": "1"}, (2, 1, 0, 0, "toolkit", True)),
    "manual": (2, "auto", None, manual(), (2, 1, 0, 1, "manual", False)),
    "manual, auto": ("auto", "auto", 2, manual(LOCAL_WORLD_SIZE=2), (2, 1, 0, 1, "manual", False)),
    "manual, nodes": (2, 2, None, manual(**TWO), (2, 2, 1, 1, "manual", False)),
    "manual, node from RANK": (2, "auto", None, manual(RANK=3, WORLD_SIZE=4, **NODES), (2, 2, 1, 1, "manual", False)),
    "manual, alone": ("auto", "auto", None, {"LOCAL_RANK": "0", "WORLD_SIZE": "1"}, (1, 1, 0, 0, "manual", False)),
    "mpirun": ("auto", "auto", 2, tasks("mpirun", 3), (2, 2, 1, 1, "Open MPI", False)),
    "mpirun, a task per node": ("auto", "auto", 8, tasks("mpirun", 1, 2, 1), (8, 2, 1, 0, "Open MPI", True)),
    "a child of such a task of mpirun": (
        8, "auto", 8, tasks("mpirun", 1, 2, 1, LOCAL_RANK=5, LOCAL_WORLD_SIZE=8, WORLD_SIZE=16, NODE_RANK=1),
        (8, 2, 1, 5, "manual", False),
    ),
    "mpirun, one task": (2, "auto", 2, tasks("mpirun", 0, 1, 1), (2, 1, 0, 0, "toolkit", True)),
    "mpirun in a batch script": (
        2, 2, None, slurm(0, 2, 2, ENVIRONMENT="BATCH") | tasks("mpirun", 3), (2, 2, 1, 1, "Open MPI", False),
    ),
    "mpiexec": (2, "auto", None, tasks("mpich", 3), (2, 2, 1, 1, "MPICH or Intel MPI", False)),
    "mpiexec, its tasks set LOCAL_RANK": (
        2, "auto", None, tasks("mpich", 3, LOCAL_RANK=1, WORLD_SIZE=4, RANK=3), (2, 2, 1, 1, "manual", False),
    ),
    "mpiexec of MVAPICH": (2, 2, None, tasks("mvapich", 3), (2, 2, 1, 1, "MVAPICH", False)),
    "jsrun": ("auto", 2, 2, tasks("jsrun", 2), (2, 2, 1, 0, "LSF", False)),
    "flux run": ("auto", "auto", None, tasks("flux", 3), (2, 2, 1, 1, "Flux", False)),
    "flux run, one node": (
        "auto", "auto", None, without(tasks("flux", 1, 2, 2), "MASTER_ADDR"), (2, 1, 0, 1, "Flux", False),
    ),
    "Kubeflow": ("auto", "auto", 4, kubeflow(1), (4, 2, 1, 0, "Kubeflow", True)),
    "Kubeflow, CPUs": ("auto", 2, None, kubeflow(1, 2, 3), (3, 2, 1, 0, "Kubeflow", True)),
    "Kubeflow, one node": (2, "auto", 4, {"PET_NNODES": "1"}, (2, 1, 0, 0, "Kubeflow", True)),
    "a child of Kubeflow's": (
        2, "auto", 4, kubeflow(1, LOCAL_RANK=1, LOCAL_WORLD_SIZE=2, WORLD_SIZE=4, **TWO),
        (2, 2, 1, 1, "manual", False),
    ),
    "torchrun in Kubeflow": ("auto", "auto", None, kubeflow(1) | torchrun(3), (2, 2, 1, 1, "torchrun", False)),
    "torchrun in Kubeflow, 1 to 4 nodes": (
        "auto", "auto", None, kubeflow(1, "1:4") | torchrun(3), (2, 2, 1, 1, "torchrun", False),
    ),
    "torchrun reads PET_NPROC_PER_NODE": (
        "auto", "auto", None, {"PET_NPROC_PER_NODE": "2"} | torchrun(3), (2, 2, 1, 1, "torchrun", False),
    ),
    "PyTorchJob": ("auto", "auto", 4, pytorch_job(1), (4, 2, 1, 0, "Kubeflow's PyTorchJob", True)),
    "PyTorchJob, a newer one": (1, "auto", None, pytorch_job(1) | kubeflow(1), (1, 2, 1, 0, "Kubeflow", False)),
    "SkyPilot": ("auto", "auto", 8, skypilot(1), (8, 2, 1, 0, "SkyPilot", True)),
    "SkyPilot, as users wrote it": (8, 2, 8, skypilot(1) | TWO, (8, 2, 1, 0, "SkyPilot", True)),
    "a Kubernetes Job": (
        2, 2, 2, {"JOB_COMPLETION_INDEX": "1", **NODES}, (2, 2, 1, 0, "toolkit", True),
    ),
    "Open MPI 5, one task": (2, 1, 2, {"PMIX_RANK": "0"} | tasks("mpirun", 0, 1, 1), (2, 1, 0, 0, "toolkit", True)),
    "a Kubernetes Job, alone": (2, 1, 2, {"JOB_COMPLETION_INDEX": "1"}, (2, 1, 0, 0, "toolkit", True)),
}  # fmt: skip


@pytest.mark.parametrize("case", READ)
def test_variables_of_each_launcher_are_read(case):
    devices, num_nodes, available, environ, expected = READ[case]
    world = detect_world(devices, num_nodes, available, environ)
    assert world == WorldInfo(*expected)
    assert world.world_size == expected[0] * expected[1]
    assert world.global_rank == expected[2] * expected[0] + expected[3]


BATCH = without(slurm(0, 16, 2, ENVIRONMENT="BATCH"), "SLURM_STEP_ID")
# devices, num_nodes, available, environment -> words that the message must hold, in this order
REFUSED = {
    "no device": (0, "auto", None, {}, ["--devices 0", "auto or at least 1"]),
    "a word": ("all", "auto", None, {}, ["--devices all", "auto or at least 1"]),
    "no node": (1, 0, None, {}, ["--num_nodes 0", "at least 1"]),
    "too many": (4, "auto", 2, {}, ["--devices 4: this machine has 2", "--devices 2"]),
    "too many to see": (4, "auto", 1, {"CUDA_VISIBLE_DEVICES": "3"}, ["has 1 device (CUDA_VISIBLE_DEVICES=3)"]),
    "torchrun, too many": ("auto", "auto", 1, torchrun(), ["--devices 2: this machine has 1", "--nproc_per_node 1"]),
    "torchrun, devices": (
        3, "auto", None, torchrun(),
        ["--devices 3: torchrun started 4 tasks on 2 nodes", "LOCAL_WORLD_SIZE=2); drop --devices, or use torchrun "
         "--nproc_per_node 3"],
    ),
    "torchrun, nodes": ("auto", 3, None, torchrun(), ["--num_nodes 3", "2 nodes", "WORLD_SIZE=4", "start 3 nodes"]),
    "torchrun, --devices 1": (1, "auto", None, torchrun(), ["--devices 1", "LOCAL_WORLD_SIZE=2"]),
    "torchrun, uneven": ("auto", "auto", None, torchrun(0, 3, 2), ["WORLD_SIZE=3", "LOCAL_WORLD_SIZE=2"]),
    "torchrun, uneven but divisible": (
        "auto", "auto", None, torchrun(0, 3, 1, GROUP_WORLD_SIZE=2), ["WORLD_SIZE=3", "LOCAL_WORLD_SIZE=1"],
    ),
    "torchrun, RANK": ("auto", "auto", None, torchrun(0, RANK=1), ["RANK=1: task 0 of node 0", "2 consecutive"]),
    "torchrun, missing variable": (
        "auto", "auto", None, without(torchrun(), "LOCAL_WORLD_SIZE"), ["LOCAL_WORLD_SIZE: not set"],
    ),
    "srun, devices": (
        4, "auto", None, slurm(0, 2, 1), ["--devices 4", "2 tasks on 1 node", "SLURM_NTASKS=2", "--ntasks-per-node 4"],
    ),
    "srun, --devices 1": (1, "auto", None, slurm(0, 2, 1), ["--devices 1", "SLURM_NTASKS=2", "drop --devices"]),
    "srun, nodes": (2, 1, None, slurm(), ["--num_nodes 1", "4 tasks on 2 nodes", "SLURM_NNODES=2", "drop --num_nodes"]),
    "srun, uneven": ("auto", "auto", None, slurm(0, 3, 2), ["SLURM_NTASKS=3: SLURM", "NNODES=2", "--ntasks-per-node"]),
    "srun, cyclic distribution": (
        2, "auto", None, slurm(1, SLURM_LOCALID=0, SLURM_NODEID=1), ["SLURM_PROCID=1", "--distribution block"],
    ),
    "srun, more tasks here": (2, "auto", None, slurm(2, SLURM_LOCALID=2, SLURM_NODEID=0), ["SLURM_PROCID=2"]),
    "srun, a GPU per task": (2, "auto", 1, slurm(), ["--devices 2: this task sees 1", "--gpus-per-node"]),
    "srun, no list of nodes": (2, "auto", None, without(slurm(), "SLURM_JOB_NODELIST"), ["SLURM_JOB_NODELIST"]),
    "srun in an interactive SLURM shell": (
        2, "auto", None, slurm(1, SLURM_JOB_NAME="bash", SLURM_PTY_PORT=1), ["SLURM_JOB_NAME=bash", "--job-name"],
    ),
    "batch script without srun": (8, 2, 8, BATCH, ["SLURM_NTASKS=16", "start it with srun"]),
    "batch script, task per node": (8, 2, 8, BATCH | {"SLURM_NTASKS": "2"}, ["SLURM_NTASKS=2", "srun"]),
    "manual, how many": ("auto", "auto", 2, manual(), ["--devices auto", "LOCAL_RANK=1", "unset LOCAL_RANK"]),
    "manual, devices": (4, "auto", None, manual(LOCAL_WORLD_SIZE=2), ["--devices 4", "LOCAL_WORLD_SIZE=2"]),
    "manual, world": (2, 2, None, manual(WORLD_SIZE=2, **TWO), ["WORLD_SIZE=2", "--devices 2 x --num_nodes 2"]),
    "manual, alone": (2, "auto", None, manual(LOCAL_RANK=0, WORLD_SIZE=1), ["--devices 2", "WORLD_SIZE=1"]),
    "manual, rank too high": (2, "auto", None, manual(LOCAL_RANK=2), ["LOCAL_RANK=2", "less than 2"]),
    "manual, not a number": (2, "auto", None, manual(LOCAL_RANK="one"), ["LOCAL_RANK=one", "an integer"]),
    "manual, RANK": (2, "auto", None, manual(RANK=0, WORLD_SIZE=2), ["RANK=0", "has rank 1"]),
    "manual, no port": (2, "auto", None, {"LOCAL_RANK": "1"}, ["MASTER_PORT: not set"]),
    "manual, no node": (2, 2, None, manual(**NODES), ["--num_nodes 2: NODE_RANK is not set"]),
    "manual, no address": (2, 2, None, manual(NODE_RANK=0), ["--num_nodes 2: MASTER_ADDR is not set"]),
    "RANK alone": (2, "auto", None, {"RANK": "1", "WORLD_SIZE": "2"}, ["RANK=1", "LOCAL_RANK is not", "unset RANK"]),
    "RANK in one SkyPilot node": (
        1, "auto", None, skypilot(0, 1, RANK=0, WORLD_SIZE=2), ["WORLD_SIZE=2: one of several processes", "LOCAL_RANK"],
    ),
    "RANK in one Kubeflow node": (
        2, "auto", None, {"PET_NNODES": "1", "RANK": "1", "WORLD_SIZE": "2"}, ["RANK=1: one of several processes"],
    ),
    "WORLD_SIZE alone": (1, "auto", None, {"WORLD_SIZE": "2"}, ["WORLD_SIZE=2", "LOCAL_RANK is not"]),
    "nodes, no launcher": (
        8, 2, None, {},
        ["--num_nodes 2: NODE_RANK is not set; on every node, start the same command with NODE_RANK=0 (the others: 1), "
         f"MASTER_ADDR={socket.gethostname()} (the name of node 0) and MASTER_PORT=29500 before it"],
    ),
    "nodes, rank": (2, 3, None, NODES, ["--num_nodes 3: NODE_RANK is not set", "(the others: 1 to 2)"]),
    "nodes, address": (2, 2, None, without(TWO, "MASTER_ADDR"), ["MASTER_ADDR is not set; on every node"]),
    "nodes, port": (2, 2, None, without(TWO, "MASTER_PORT"), ["MASTER_PORT is not set; on every node"]),
    "nodes, rank too high": (2, 2, None, TWO | {"NODE_RANK": "2"}, ["NODE_RANK=2", "--num_nodes 2"]),
    "nodes, not a number": (2, 2, None, TWO | {"NODE_RANK": "gpu07"}, ["NODE_RANK=gpu07", "an integer"]),
    "nodes, bad port": (2, 2, None, TWO | {"MASTER_PORT": "70000"}, ["MASTER_PORT=70000", "less than 65536"]),
    "a node of one": (
        2, "auto", None, {"NODE_RANK": "1"}, ["NODE_RANK=1", "--num_nodes 1; unset NODE_RANK, or use --num_nodes 2"],
    ),
    "mpirun, devices": (
        4, "auto", None, tasks("mpirun"), ["--devices 4: Open MPI started 4 tasks on 2 nodes (OMPI_COMM_WORLD_SIZE=4, "
        "OMPI_COMM_WORLD_LOCAL_SIZE=2); drop --devices, or use mpirun --map-by ppr:4:node"],
    ),
    "mpirun, uneven": ("auto", "auto", None, tasks("mpirun", 0, 3), ["_SIZE=3", "unevenly; use mpirun"]),
    "mpirun, ranks across nodes": (
        "auto", "auto", None, tasks("mpirun", 1, OMPI_COMM_WORLD_LOCAL_RANK=0),
        ["_RANK=1: task 0 of node 0", "ppr:2:node"],
    ),
    "mpirun, address": (
        "auto", "auto", None, without(tasks("mpirun"), *NODES),
        ["MASTER_ADDR and MASTER_PORT: not set", "the first node and a free port"],
    ),
    "mpirun, port": (2, "auto", None, without(tasks("mpirun", 0, 2, 2), *NODES), ["MASTER_PORT: not set", "a free"]),
    "mpiexec of Cray": (
        1, "auto", None, {"PMI_SIZE": "2", "PMI_RANK": "1"},
        ["MPI_LOCALRANKID: not set, but MPICH or Intel MPI sets it together with PMI_SIZE", "unset PMI_SIZE and PMI_"],
    ),
    "mpirun of torchrun, alone": (
        "auto", "auto", None, tasks("mpirun", 1, 2, 1) | torchrun(0, 1, 1),
        ["OMPI_COMM_WORLD_SIZE=2", "1 node of 1 process (by torchrun); to train one model per task, unset"],
    ),
    "Kubeflow, nodes": ("auto", 1, 4, kubeflow(), ["--num_nodes 1: Kubeflow started 2 nodes (PET_NNODES=2)"]),
    "Kubeflow, devices": (4, "auto", 4, kubeflow(0, 2, 2), ["--devices 4", "PET_NPROC_PER_NODE=2"]),
    "Kubeflow, 1 to 4 nodes": ("auto", "auto", 4, kubeflow(0, "1:4"), ["PET_NNODES=1:4", "torchrun -m toolkit"]),
    "Kubeflow, another rank": ("auto", "auto", 4, kubeflow(1, NODE_RANK=0), ["PET_NODE_RANK=1", "this is node 0"]),
    "Kubeflow, half": (4, "auto", 4, {"PET_NODE_RANK": "0"}, ["PET_NNODES: not set, but Kubeflow", "PET_NODE_RANK"]),
    "Kubeflow, no address": (4, "auto", 4, without(kubeflow(), "PET_MASTER_ADDR"), ["PET_MASTER_ADDR: not"]),
    "torchrun in Kubeflow, alone": (
        "auto", "auto", None, kubeflow(1) | torchrun(0, 2, 2), ["PET_NNODES=2", "1 node of 2 processes (by torchrun)"],
    ),
    "SkyPilot, too few": (8, 2, 8, skypilot(0, 4), ["--num_nodes 2: SkyPilot started 4 nodes (SKYPILOT_NUM_NODES=4)"]),
    "SkyPilot, manual": (2, "auto", None, skypilot(0, 4) | manual(), ["SKYPILOT_NUM_NODES=4", "1 node of 2 processes"]),
    "a Kubernetes Job": (2, "auto", 2, {"JOB_COMPLETION_INDEX": "0"}, ["JOB_COMPLETION_INDEX=0", "use --num_nodes"]),
    "Volcano": (2, "auto", 2, {"VC_TASK_INDEX": "1"}, ["VC_TASK_INDEX=1: a pod of a Volcano job", "--num_nodes"]),
    "PMIx alone": (2, "auto", 2, {"PMIX_RANK": "1"}, ["PMIX_RANK=1: a task of PMIx, which does not say how many"]),
    "two launchers": (
        2, "auto", 2, skypilot(1) | kubeflow(1, 3), ["SKYPILOT_NUM_NODES=2", "3 nodes of 2 processes (by Kubeflow)"],
    ),
    "address in brackets": (2, 2, None, TWO | {"MASTER_ADDR": "[::1]"}, ["MASTER_ADDR=[::1]: must be", "::1"]),
    "address and port": (2, 2, None, TWO | {"MASTER_ADDR": "gpu07:29500"}, ["MASTER_ADDR=gpu07:29500: must be"]),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_contradictions_are_one_line_errors(case):
    devices, num_nodes, available, environ, words = REFUSED[case]
    with pytest.raises(UserError) as refusal:
        detect_world(devices, num_nodes, available, environ)
    message = str(refusal.value)
    assert "\n" not in message and len(message) < 260
    position = 0
    for word in words:
        assert word in message[position:], message
        position = message.index(word, position)


DESCRIPTIONS = {
    "torchrun": lambda rank: torchrun(rank),
    "slurm": lambda rank: slurm(rank),
    "manual": lambda rank: manual(LOCAL_RANK=rank % 2, RANK=rank, WORLD_SIZE=4, LOCAL_WORLD_SIZE=2, **NODES),
    "kubeflow": lambda rank: kubeflow(rank % 2, 2, 2),
    "skypilot": lambda rank: skypilot(rank % 2),
    "PyTorchJob": lambda rank: pytorch_job(rank % 2),
    **{name: partial(tasks, name) for name in ("mpirun", "mpich", "mvapich", "jsrun", "flux")},
}
"""What launchers set for two nodes of two devices."""


def test_no_subset_of_variables_describes_a_smaller_world():
    """Whatever is missing: a world of less than a variable says would train several models."""

    def check(name, rank, devices, num_nodes):
        complete = DESCRIPTIONS[name](rank)
        optional = [v for v in complete if v not in NODES]
        for dropped in chain.from_iterable(combinations(optional, n) for n in range(len(optional) + 1)):
            environ = without(complete, *dropped)
            try:
                world = detect_world(devices, num_nodes, 2, environ)
            except UserError:
                continue
            says = [int(environ[v]) for v in environ if v in sizes and environ[v].isdecimal()]
            assert world.world_size >= max(says, default=1), (dropped, world)
            says = [int(environ[v]) for v in environ if v in ranks]
            assert max(says, default=0) in (0, world.global_rank, world.node_rank), (dropped, world)

    sizes = {"WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "PET_NNODES", "PET_NPROC_PER_NODE", "PMI_SIZE",
             "SKYPILOT_NUM_NODES", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "FLUX_JOB_SIZE",
             "FLUX_JOB_NNODES", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_LOCAL_SIZE", "MPI_LOCALNRANKS",
             "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE"}  # fmt: skip
    ranks = {"RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "FLUX_TASK_RANK", "JSM_NAMESPACE_RANK", "PET_NODE_RANK",
             "MV2_COMM_WORLD_RANK",
             "SKYPILOT_NODE_RANK"}  # fmt: skip
    options = [("auto", "auto"), (2, "auto"), (1, "auto"), (2, 2), (1, 1), (2, 1)]
    check_each(check, [(name, rank, *each) for name in DESCRIPTIONS for rank in (0, 3) for each in options])


def fabric_environment(monkeypatch, layout_of, **variables):
    """Set this process's environment to ``variables`` and return Fabric's cluster environment for it."""
    for name in os.environ:
        if name not in clean():
            monkeypatch.delenv(name)
    for name in ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE"):
        monkeypatch.setenv(name, "")  # so that monkeypatch restores what is set below
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return cluster_environment(detect_world(*layout_of))


@pytest.mark.parametrize("wrong", [{}, {"SLURM_NTASKS_PER_NODE": "7"}])
def test_slurm_tasks_need_no_ntasks_per_node(monkeypatch, wrong):
    environment = fabric_environment(monkeypatch, (2, 2, None), **slurm(3, SLURM_STEP_NODELIST="gpu[08,10]"), **wrong)
    environment.validate_settings(num_devices=2, num_nodes=2)
    ranks = environment.world_size(), environment.global_rank(), environment.local_rank(), environment.node_rank()
    assert ranks == (4, 3, 1, 1)
    assert environment.creates_processes_externally
    assert (environment.main_address, environment.main_port) == ("gpu08", 15000 + 4567)


def test_first_name_of_a_slurm_list():
    lists = {
        "rack[1-2]node[3-4]": "rack1node3", "gpu[007-010,12]-ib,login": "gpu007-ib", "a,b[1-2]": "a", "a[5]": "a5",
        "cn[08,10-11]": "cn08", "host1 host2": "host1",
    }  # fmt: skip
    assert {nodes: _first_node(nodes) for nodes in lists} == lists


def test_slurm_tasks_on_one_node_use_the_loopback_address(monkeypatch):
    assert fabric_environment(monkeypatch, (2, 1, None), **slurm(1, 2, 1)).main_address == "127.0.0.1"
    assert fabric_environment(monkeypatch, (2, 1, None), **slurm(1, 2, 1, MASTER_ADDR="ib0")).main_address == "ib0"


def test_one_slurm_task_per_node_launches_the_other_processes(monkeypatch):
    environment = fabric_environment(monkeypatch, (8, 2, 8), **slurm(1, 2, 2))
    assert not environment.creates_processes_externally
    assert (environment.node_rank(), environment.local_rank()) == (1, 0)
    assert (environment.main_address, environment.main_port) == ("gpu07", 15000 + 4567)
    monkeypatch.setenv("LOCAL_RANK", "5")  # as Fabric's launcher does for the sixth process
    monkeypatch.setenv("WORLD_SIZE", "16")
    assert detect_world("auto", "auto", 8) == WorldInfo(8, 2, 1, 5, "manual", False)


def test_concurrent_runs_of_one_slurm_job_use_different_ports(monkeypatch):
    fabric_environment(monkeypatch, (2, 1, None), **slurm(0, 1, 1))
    assert "MASTER_PORT" not in os.environ


WORKER = """
import json, os, sys, torch
from lightning.fabric import Fabric
from toolkit.distributed.world import cluster_environment, detect_world
world = detect_world({devices!r}, "auto", None)
fabric = Fabric(accelerator="cpu", devices=world.devices, num_nodes=world.num_nodes, strategy="ddp",
                plugins=[cluster_environment(world)])
fabric.launch()
total = fabric.all_reduce(torch.tensor(2.0 ** fabric.global_rank), reduce_op="sum").item()
assert (fabric.world_size, fabric.global_rank) == (world.world_size, world.global_rank), world
with open(f"{{sys.argv[1]}}/{{fabric.global_rank}}.json", "w") as file:
    json.dump([fabric.world_size, fabric.node_rank, fabric.local_rank, total], file)
torch.distributed.destroy_process_group()  # otherwise gloo's threads may abort at exit
"""


def run_workers(tmp_path, devices, environments, prefix=()):
    script = tmp_path / "worker.py"
    script.write_text(WORKER.format(devices=devices))
    (tmp_path / "out").mkdir()
    command = [sys.executable, *prefix, str(script), str(tmp_path / "out")]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    processes = [subprocess.Popen(command, env=clean(**environ), **pipes) for environ in environments]
    try:
        outputs = [process.communicate(timeout=90)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * len(processes), "\n".join(outputs)
    return {int(file.stem): json.loads(file.read_text()) for file in (tmp_path / "out").iterdir()}


def free_port() -> str:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return str(server.getsockname()[1])


@pytest.mark.slow
def test_slurm_tasks_form_one_run(tmp_path):
    port = free_port()
    ranks = run_workers(tmp_path, "auto", [slurm(rank, 2, 1, MASTER_PORT=port) for rank in range(2)])
    assert ranks == {0: [2, 0, 0, 3.0], 1: [2, 0, 1, 3.0]}


@pytest.mark.slow
def test_one_slurm_task_launches_the_second_process(tmp_path):
    """Fabric alone would silently train with one process."""
    assert run_workers(tmp_path, 2, [slurm(0, 1, 1)]) == {0: [2, 0, 0, 3.0], 1: [2, 0, 1, 3.0]}


@pytest.mark.slow
def test_two_slurm_tasks_with_two_processes_each_form_one_run_of_four(tmp_path):
    nodes = {"SLURM_JOB_NODELIST": "localhost,elsewhere", "MASTER_PORT": free_port()}
    ranks = run_workers(tmp_path, 2, [slurm(rank, 2, 2, **nodes) for rank in range(2)])
    assert ranks == {rank: [4, rank // 2, rank % 2, 15.0] for rank in range(4)}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Kubeflow", "SkyPilot", "PyTorchJob", "Open MPI"])
def test_nodes_of_other_launchers_form_one_run(tmp_path, name):
    """Two nodes with two processes each; toolkit starts them all, or, for Open MPI, the second of each node."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    environments = {
        "Kubeflow": lambda rank: kubeflow(rank, 2, 2, **{f"PET_{k}": v for k, v in address.items()}),
        "SkyPilot": lambda rank: skypilot(rank, SKYPILOT_NODE_IPS="127.0.0.1\n127.0.0.2"),
        "PyTorchJob": lambda rank: pytorch_job(rank, **address),
        "Open MPI": lambda rank: tasks("mpirun", rank, 2, 1, **address),
    }
    ranks = run_workers(tmp_path, 2, [environments[name](rank) for rank in range(2)])
    assert ranks == {rank: [4, rank // 2, rank % 2, 15.0] for rank in range(4)}


@pytest.mark.slow
def test_tasks_of_mpi_form_one_run(tmp_path):
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    ranks = run_workers(tmp_path, "auto", [tasks("mpirun", rank, 2, 1, **address) for rank in range(2)])
    assert ranks == {rank: [2, rank, 0, 3.0] for rank in range(2)}


@pytest.mark.slow
def test_torchrun_without_devices_flag_forms_one_run(tmp_path):
    prefix = ("-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", free_port())
    assert run_workers(tmp_path, "auto", [{}], prefix) == {0: [2, 0, 0, 3.0], 1: [2, 0, 1, 3.0]}
