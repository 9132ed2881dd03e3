"""`toolkit doctor`: print the environment, and check communication and gradients."""

from jsonargparse.typing import PositiveFloat

from toolkit.config import AUTO, Accelerator, Auto, Strategy
from toolkit.errors import require_option
from toolkit_doctor.environment import describe_environment, format_sections


def setup(
    comm: bool = False,
    check_grads: bool = False,
    topology: bool = False,
    prove: bool = False,
    json_path: str | None = None,
    devices: int | Auto = AUTO,
    num_nodes: int | Auto = AUTO,
    accelerator: Accelerator = "auto",
    strategy: Strategy = "auto",
    timeout: PositiveFloat | Auto = AUTO,
    out_dir: str = "out",
) -> None:
    """Print the environment, for bug reports, and check communication and gradients between processes.

    Launch it like a run: directly with --devices and --num_nodes, with torchrun, or with SLURM.

    The exit code is 0 if all checks pass, 1 if a process does not answer (its rank, host and pid are named) or a row of
    --prove fails, and 3 if a collective or a gradient is wrong. Warnings do not change it. Tokens and keys are never
    printed.

    Args:
        comm: Check the values and measure the bandwidth of all-reduce, all-gather, reduce-scatter and point-to-point
            transfers between all processes.
        check_grads: Train one step of a small model on all processes and on one, and compare every gradient.
        topology: Show how the GPUs of this node are connected (nvidia-smi topo -m), and warn of slow pairs.
        prove: Instead, compare every path that exists only for CUDA with its reference: kernels, precisions, compiled
            runs, sharding, checkpoints, memory and speed. Takes up to ten minutes, uses all GPUs of this machine, and
            names the option that avoids what fails. Without a GPU no comparison is run.
        json_path: File for the results of --prove.
        devices: Devices per node. auto: all GPUs, one process on a CPU, or as set by torchrun or SLURM.
        num_nodes: Number of nodes. auto: 1, or as set by torchrun or SLURM.
        accelerator: Device type.
        strategy: Distributed strategy for check_grads. auto: fsdp on several devices.
        timeout: Minutes to wait for a process that does not start or answer. auto: 5.
        out_dir: Folder of your runs, to show its free disk space.
    """
    require_option(json_path is None or prove, "json_path", json_path, "has no effect without --prove")
    if prove:
        from toolkit_doctor.prove import prove as run_rows

        run_rows(json_path)
        return
    try:
        from toolkit_doctor.doctor import examine
    except Exception:  # torch or Lightning does not import
        print(format_sections(describe_environment(out_dir)), flush=True)
        raise
    examine(
        comm=comm, check_grads=check_grads, topology=topology, strategy=strategy, accelerator=accelerator,
        devices=devices, num_nodes=num_nodes, timeout=timeout, out_dir=out_dir,
    )  # fmt: skip
