"""A training command and the machines that it needs."""

from dataclasses import dataclass

from toolkit.escape import comment, shell_word

GRACE_S = 300
"""Seconds for the last checkpoint between the signal and the end of a process."""
MAX_RESTARTS = 50
PORT = 29500
"""Port of the rendezvous on node 0."""


@dataclass(frozen=True)
class Job:
    """What a launch file describes.

    Args:
        name: A DNS label.
        command: The words of the command, ``toolkit`` first. Continues from the latest checkpoint when run again.
        nodes: Number of nodes.
        devices: Processes per node.
        has_gpus: Whether each process uses a GPU.
        summary: Size and planned memory, for a comment.
        gpu: Name of the GPU.
        image: Container image.
        time: Time limit.
        shared_dir: Folder on storage that all nodes share.
        claim: The persistent volume claim of that storage.
        secrets: Environment variables that the job needs, by name.
        spot: Whether the machines may be preempted.
    """

    name: str
    command: tuple[str, ...]
    nodes: int
    devices: int
    has_gpus: bool
    summary: str
    gpu: str | None = None
    image: str | None = None
    time: str | None = None
    shared_dir: str | None = None
    claim: str | None = None
    secrets: tuple[str, ...] = ()
    spot: bool = False

    def shell(self, *prefix: str) -> str:
        """Return the command for a shell, with one option per line."""
        words = (*prefix, *self.command)
        return " ".join("\\\n    " * word.startswith("--") + shell_word(word) for word in words)

    def header(self, *lines: str) -> str:
        """Return the comment at the top of the file."""
        return comment(self.summary, *lines)
