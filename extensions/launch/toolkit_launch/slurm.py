"""A batch script for SLURM that saves before its time limit and requeues itself."""

from toolkit_launch.job import GRACE_S, MAX_RESTARTS, Job

_SCRIPT = """\
#!/bin/bash
{header}
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
# One task per device; GPUs per node and not per task, because every process must see all of its node.
#SBATCH --ntasks-per-node={devices}
{gpus}#SBATCH --cpus-per-task=8
#SBATCH --mem=0
#SBATCH --time={time}
# Every process receives SIGUSR1 before the time limit: the run finishes its step, saves, and exits with 138.
#SBATCH --signal=USR1@{grace}
# Allow requeueing; append to the log.
#SBATCH --requeue
#SBATCH --open-mode=append

{secrets}# srun does not inherit --cpus-per-task from sbatch (since SLURM 22.05).
export SRUN_CPUS_PER_TASK="${{SLURM_CPUS_PER_TASK:-8}}"
# Threads per process; more threads than cores slow training down.
export OMP_NUM_THREADS="$SRUN_CPUS_PER_TASK"

# --resume auto: starts a new run, or resumes from the latest checkpoint in out_dir.
code=0
{command} \\
    "$@" || code=$?

# 128 + the number of SIGUSR1. Other exit codes are final: success (0), user error (2), guard (3), failure.
if [ "$code" -eq 138 ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt {restarts} ]; then
    echo "saved a checkpoint before the time limit; requeueing"
    scontrol requeue "$SLURM_JOB_ID" && exit 0
fi
exit "$code"
"""


def slurm(job: Job) -> str:
    """Return the script. With an image, srun starts it by the container plugin pyxis."""
    container = [] if job.image is None else [f"--container-image={job.image}"]
    if container and job.shared_dir is not None:
        container.append(f"--container-mounts={job.shared_dir}:{job.shared_dir}")
    secrets = "".join(f': "${{{name}:?must be set where sbatch is called}}"\n' for name in job.secrets)
    return _SCRIPT.format(
        header=job.header(
            "Start: sbatch FILE; add your --partition and --account. Further arguments are passed to toolkit."
        ),
        name=job.name,
        nodes=job.nodes,
        devices=job.devices,
        gpus=f"#SBATCH --gpus-per-node={job.devices}\n" if job.has_gpus else "",
        time=job.time or "24:00:00",
        grace=GRACE_S,
        secrets=secrets,
        command=job.shell("srun", *container),
        restarts=MAX_RESTARTS,
    )
