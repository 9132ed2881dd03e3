"""Answers of the trained model to the prompts of a step, written before the step trains on them.

An answer is a pure function of the weights and of (seed, key of the prompt, step, number), whatever the ranks. The
file of a step is read again by a resumed run, which then generates nothing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from toolkit.checkpoints.store import ROLLOUTS, newest_first
from toolkit.data.base import Report
from toolkit.io.atomic import file_error, write_atomic
from toolkit.io.checksums import crc32_of
from toolkit.io.safe_parse import parse_json, read_bounded


class Rollout(NamedTuple):
    """An answer.

    Args:
        prompt: Index of the prompt.
        key: Position of the prompt in the sample stream.
        number: Index of the answer among those to this prompt.
        tokens: Token ids, with the one that ends it.
        log_probs: The decoder's log-probability of each token, in nats.
        has_ended: False if it is cut off.
        text: The text of the answer, without the token that ends it.
        rewards: By name; empty without reward functions.
    """

    prompt: int
    key: int
    number: int
    tokens: list[int]
    log_probs: list[float]
    has_ended: bool
    text: str
    rewards: dict[str, float]


def seed_of(seed: int, key: int, step: int, number: int) -> int:
    """Return the sampling seed of an answer. A prompt that a step has twice has two keys."""
    return int.from_bytes(hashlib.sha256(f"{seed} {key} {step} {number}".encode()).digest()[:7], "big")


def path_of(out_dir: Path, step: int) -> Path:
    """Return the file of the answers that the step after ``step`` trains on."""
    return out_dir / ROLLOUTS / f"step-{step:08d}.jsonl"


def write_rollouts(out_dir: Path, step: int, origin: str, rollouts: Sequence[Rollout]) -> None:
    """Write the answers of a step, and delete those of steps before the oldest checkpoint.

    ``origin`` identifies the options and the data that the answers depend on.
    """
    body = "".join(json.dumps(rollout._asdict()) + "\n" for rollout in rollouts).encode()
    head = json.dumps({"origin": origin, "crc32": crc32_of(body)})
    path = path_of(out_dir, step)
    try:
        write_atomic(path, f"{head}\n".encode() + body)
    except OSError as error:
        raise file_error(path, error) from error
    steps = [folder.name for folder in newest_first(out_dir) if folder.name.startswith("step-")]
    for file in path.parent.glob("step-*"):
        if file.stem < min(steps, default=""):
            file.unlink()


def read_rollouts(out_dir: Path, step: int, origin: str, report: Report) -> list[Rollout] | None:
    """Return the answers of a step. If there are none, or damaged ones, or of another origin, return None."""
    path = path_of(out_dir, step)
    if not path.exists():
        return None
    with suppress(OSError, ValueError, TypeError):
        head, _, body = read_bounded(path, "log").partition(b"\n")
        if parse_json(head) == {"origin": origin, "crc32": crc32_of(body)}:
            return [Rollout(**parse_json(line)) for line in body.splitlines()]
    report(f"warning: {path}: is damaged, or of other options; its answers are generated again")
    return None
