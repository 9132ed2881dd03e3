"""One line for Docker."""

from toolkit.escape import shell_line
from toolkit_launch.job import GRACE_S, Job


def docker(job: Job) -> str:
    """Return the line. On several nodes, NODE_RANK, MASTER_ADDR and MASTER_PORT are passed on from each one's shell."""
    names = [*job.secrets, *(["NODE_RANK", "MASTER_ADDR", "MASTER_PORT"] if job.nodes > 1 else [])]
    program, *words = job.command
    line = ["docker", "run", "--rm", "--init", "--ipc=host", f"--stop-timeout={GRACE_S}"]
    line += ["--gpus", "all"] if job.has_gpus else []
    line += ["--network=host"] if job.nodes > 1 else []
    line += [word for name in names for word in ("--env", name)]
    line += [] if job.shared_dir is None else [f"--volume={job.shared_dir}:{job.shared_dir}"]
    return f"{shell_line([*line, f'--entrypoint={program}', job.image or '', *words])}\n"
