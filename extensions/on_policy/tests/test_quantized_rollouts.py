"""Rollouts of a model that trains with --qat.weights."""

import json

import pytest
from helpers.on_policy import GRPO_RUN

from toolkit.cli import main


def test_the_plan_counts_weights_that_are_quantized_once_for_the_answers(folder, capsys):
    """Not with sharded weights."""
    pytest.importorskip("torchao")
    words = GRPO_RUN.replace("base", "Llama-3.2-1B").replace("cpu --devices 1", "cuda --devices 2").split()
    words = ["plan", "finetune_full", *words, "--precision", "bf16-true", "--format", "json"]
    int4, fsdp = ["--qat.weights", "int4"], ["--strategy", "fsdp"]
    found = []
    for options in ([], int4, [*int4, *fsdp], [*int4, *fsdp, "--objective.gather_weights", "false"]):
        assert main([*words, "--strategy", "ddp", *options]) == 0
        found.append(json.loads(capsys.readouterr().out)["memory_gb"].get("held_weights", 0.0))
    held = 2 * 16 * (2048 * (2048 + 2 * 512) + 2048 * 2048 + 3 * 2048 * 8192) / 1e9  # bf16, 16 blocks
    assert found == pytest.approx([0.0, held, held, 0.0], abs=1e-3)
