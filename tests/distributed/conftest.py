"""Fixtures of the multi-rank tests."""

from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.small_runs import text_data, write_base, write_rows


@pytest.fixture(scope="session")
def shared_flags(corpus) -> list[str]:
    """A small run on the CPU: global batch 8, 20 steps, accumulation on 1, 2 and 4 ranks."""
    return [
        "pico-llama", "--accelerator", "cpu", "--strategy", "fsdp", *text_data(corpus),
        "--train.global_batch_size", "8", "--train.micro_batch_size", "1",
        "--train.max_seq_length", "32", "--train.max_steps", "20",
        "--train.learning_rate", "1e-3", "--eval.interval", "0", "--eval.max_iters", "2",
    ]  # fmt: skip


@pytest.fixture(scope="session")
def finetuning_flags(corpus) -> Callable[..., list[str]]:
    """Return a function that writes a base and rows into a folder, and returns the flags of small runs on them."""

    def flags(folder: Path, **config) -> list[str]:
        folder.mkdir(exist_ok=True)
        write_base(folder, corpus, **({"intermediate_size": 192} | config))  # a multiple of 64, for QLoRA
        return [
            str(folder), "--accelerator", "cpu", "--data", "JSON", "--data.json_path", str(write_rows(folder)),
            "--data.prompt_style", "plain", "--train.global_batch_size", "8", "--train.micro_batch_size", "1",
            "--train.max_steps", "8", "--train.learning_rate", "1e-2", "--train.lr_schedule", "constant",
            "--train.save_interval", "4", "--eval.interval", "4", "--eval.max_new_tokens", "0",
        ]  # fmt: skip

    return flags
