"""Thunder's strategies on two real gloo processes, with plain Fabric and through the command line."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.groups import Case, free_port, losses, run_group
from torch.nn import functional as F

from toolkit.checkpoints.weights import load_weights

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("thunder") is None, reason="lightning-thunder is not installed"),
]

RANKS = Path(__file__).with_name("ranks.py")


def load_ranks():
    spec = importlib.util.spec_from_file_location("ranks", RANKS)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def fabric_runs(tmp_path_factory):
    """Run all cases of ranks.py in one group of two processes, as two nodes of one device."""
    folder, names = tmp_path_factory.mktemp("fabric"), list(load_ranks().cases())
    words = [sys.executable, str(RANKS)]
    port = str(free_port())
    processes = [subprocess.Popen([*words, str(rank), "2", port, str(folder), *names]) for rank in range(2)]
    assert [process.wait() for process in processes] == [0, 0]
    return {name: [json.loads((folder / name / f"{rank}.json").read_text()) for rank in range(2)] for name in names}, {
        name: torch.load(folder / name / "weights.pt", weights_only=True) for name in names
    }


@pytest.fixture(scope="module")
def reference():
    """The same steps on one process with plain torch: gradient norms and weights."""
    ranks = load_ranks()
    model, norms = ranks.Toy(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(ranks.STEPS):
        ids, labels = ranks.batch(step)
        F.cross_entropy(model(ids).flatten(0, 1), labels.flatten()).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
        optimizer.step()
        optimizer.zero_grad()
    return norms, model.state_dict()


NAMES = ["zero3", "zero2 by layer", "zero3 by block", "zero3 as a whole", "eager", "ddp", "ddp as a whole", "ddp eager"]


@pytest.mark.parametrize("name", NAMES)
def test_fabric_equals_one_process(name, fabric_runs, reference):
    (seen, weights), (norms, expected) = fabric_runs, reference
    for rank in seen[name]:
        assert rank["norms"][:3] == pytest.approx(norms, rel=1e-5)
        assert rank["bit_equal"] and rank["norms"][3] == rank["norms"][2]  # after fabric.load, of the optimizer too
        assert rank["nodes"] == 2 and rank["sampler"]["num_replicas"] == 2
    assert weights[name].keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(weights[name][key], value, rtol=1e-5, atol=1e-5)


def test_fsdp_shards_and_gathers(fabric_runs):
    seen, _ = fabric_runs
    unsharded = seen["ddp"][0]["local"]
    for name in ("zero3", "zero2 by layer", "zero3 by block", "zero3 as a whole", "eager"):
        own = [rank["local"] for rank in seen[name]]
        assert sum(own) == unsharded and max(own) < 0.55 * unsharded
    gathers = {name: ranks[0]["gathers"] for name, ranks in seen.items()}
    # forward and backward of a block with six parameters in three layers; the backward needs no biases
    assert gathers["zero3"][0] == 6 and gathers["zero3"][1] > 0
    assert gathers["zero2 by layer"] == [3, 0]
    assert gathers["zero3 by block"][0] == 1
    assert gathers["ddp"] == [0, 0]
    assert [seen[name][0]["is_folder"] for name in ("zero3", "zero2 by layer", "ddp")] == [True, False, False]


SHARED = [
    "pico-llama", "--accelerator", "cpu", "--data", "SyntheticTokens", "--train.global_batch_size", "4",
    "--train.micro_batch_size", "1", "--train.max_seq_length", "16", "--train.max_steps", "4",
    "--train.learning_rate", "1e-3", "--model_config.n_layer", "2", "--train.save_interval", "2",
]  # fmt: skip
FSDP = ["--strategy", "thunder_fsdp", "--thunder.bucketing_strategy", "BLOCK"]
CASES = [
    Case("fsdp", FSDP),
    Case("sharded", [*FSDP, "--fsdp.state_dict_type", "sharded"]),
    Case("ddp", ["--strategy", "thunder_ddp"]),
    Case("compiled", ["--strategy", "fsdp", "--compiler", "thunder"]),
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    run_group(folder, 1, [Case("one", [])], SHARED)
    run_group(folder, 2, CASES, SHARED)
    again = [
        Case(f"{name} resumed", [*flags, "--resume", str(folder / name / "step-00000002")])
        for name, flags in (("fsdp", CASES[0].flags), ("sharded", CASES[1].flags))
    ]
    run_group(folder, 2, again, SHARED)
    return folder


@pytest.mark.parametrize("name", [case.name for case in CASES])
def test_n3_run_equals_one_process(name, runs):
    assert losses(runs / name) == pytest.approx(losses(runs / "one"), rel=1e-5)
    weights, expected = load_weights(runs / name / "final"), load_weights(runs / "one" / "final")
    if name == "sharded":
        del expected["lm_head.weight"]  # tied: stored once
    assert weights.keys() == expected.keys()
    for key, value in expected.items():
        assert (weights[key] - value).norm() <= 2e-4 * value.norm(), key


@pytest.mark.parametrize("name", ["fsdp", "sharded"])
def test_s2_resume_is_exact(name, runs):
    weights, resumed = (load_weights(runs / folder / "final") for folder in (name, f"{name} resumed"))
    assert all(torch.equal(weights[key], resumed[key]) for key in weights)
