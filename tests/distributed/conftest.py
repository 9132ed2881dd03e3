"""Fixtures of the multi-rank tests."""

import pytest
from helpers.small_runs import text_data


@pytest.fixture(scope="session")
def shared_flags(corpus) -> list[str]:
    """A small run on the CPU: global batch 8, 20 steps, accumulation on 1, 2 and 4 ranks."""
    return [
        "pico-llama", "--accelerator", "cpu", "--strategy", "fsdp", *text_data(corpus),
        "--train.global_batch_size", "8", "--train.micro_batch_size", "1",
        "--train.max_seq_length", "32", "--train.max_steps", "20",
        "--train.learning_rate", "1e-3", "--eval.interval", "0", "--eval.max_iters", "2",
    ]  # fmt: skip
