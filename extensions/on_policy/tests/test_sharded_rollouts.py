"""Rollouts under FSDP: the weights are gathered once, and each rank answers its own prompts."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
from helpers.compare_runs import curve
from helpers.on_policy import GRPO_RUN, rollouts_of, run
from toolkit_metric.answerer import Answerer
from toolkit_on_policy.grpo import GRPO

from toolkit.cli import main
from toolkit.models.families import get_config
from toolkit.training.checkpoint_meta import objective_fingerprint

MANY = f"{GRPO_RUN} --eval.interval 3".replace("answers 4", "answers 40")  # several batches
LOCKSTEP = "--objective.gather_weights false"


@pytest.mark.slow
@pytest.mark.parametrize("command", ["finetune_full", "finetune_lora"])
def test_gathered_weights_give_the_answers_and_the_curve_of_lockstep_and_of_one_process(folder, command):
    prompts = [{"prompt": "token " * (1 + i % 5), "completion": f"reads {i}"} for i in range(16)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    assert run(MANY, "one", command) == 0
    for name, more in (("gathered", ""), ("lockstep", LOCKSTEP)):
        words = f"{MANY} --devices 2 --strategy fsdp --out_dir {name} {more}".split()
        subprocess.run([sys.executable, "-m", "toolkit", command, *words], check=True)
    assert len(rollouts_of("one", 0)) == 160
    for step in range(3):
        for a, b in zip(rollouts_of("gathered", step), rollouts_of("lockstep", step), strict=True):
            assert a["tokens"] == b["tokens"]
            assert a["log_probs"] == pytest.approx(b["log_probs"], abs=1e-6)
    for a, b in zip(rollouts_of("gathered", 0), rollouts_of("one", 0), strict=True):
        assert a["tokens"] == b["tokens"]
        assert a["log_probs"] == pytest.approx(b["log_probs"], abs=1e-6)  # in batches of other sizes
    for a, b in zip(curve("gathered"), curve("lockstep"), strict=True):
        for name in ("loss", "grad_norm", "reward", "val_reward"):
            assert a.get(name, 0) == pytest.approx(b.get(name, 0), rel=1e-6, abs=1e-7, nan_ok=True), (name, a, b)
    assert all(row["logprob_difference_largest"] < 1e-5 for row in curve("gathered"))


def test_no_rank_is_idle(monkeypatch):
    class Divided(Answerer):
        def _map(self, items, size, compute):
            sizes.append(size)
            return items

    model = SimpleNamespace(is_row_independent=True, make_cache=lambda *_: SimpleNamespace(nbytes=1))
    sizes: list[int] = []
    for n_ranks, n in ((1, 160), (2, 16), (8, 128), (8, 1000), (8, 3)):
        monkeypatch.setattr("toolkit.distributed.ranks.world_size", lambda n_ranks=n_ranks: n_ranks)
        Divided(model, "cpu", is_divided=True).sample([[1]] * n, range(n), [], max_new_tokens=1)
    assert sizes == [54, 8, 16, 63, 1]


def test_a_resumed_run_may_gather_otherwise():
    runs = [
        SimpleNamespace(objective=GRPO(rewards_by="f", gather_weights=gathers), reference_dir=None)
        for gathers in (True, False)
    ]
    first, second = map(objective_fingerprint, runs)
    assert first == second


def test_the_plan_counts_gathered_weights_and_kv_cache_or_the_step(folder, capsys):
    """Whichever is more: gradients and activations are not in memory while answers are generated."""

    def plan(*more: str) -> tuple[dict[str, float], list[str]]:
        words = GRPO_RUN.replace("base", "Llama-3.2-1B").replace("cpu", "cuda").replace("length 64", "length 2048")
        words = [*words.split(), "--devices", "8", "--strategy", "fsdp", "--precision", "bf16-true", "--format", "json"]
        words += ["--train.global_batch_size", "8", "--train.micro_batch_size", "1", *more]
        assert main(["plan", "finetune_full", *words]) == 0
        planned = json.loads(capsys.readouterr().out)
        return planned["memory_gb"], [advice["change"] for advice in planned["advice"]]

    full = ["--train.activation_checkpointing", "full"]
    rollout, _ = plan(*full)
    config = get_config("Llama-3.2-1B")
    row_bytes = 2 * 2 * config.n_layer * config.n_query_groups * config.head_size * 2049
    assert rollout["kv_cache"] == pytest.approx((4 << 30) // row_bytes * row_bytes / 1e9, abs=1e-3)
    assert rollout["gathered_weights"] == pytest.approx(8 * rollout["weights"], abs=0.01)
    stay = ("weights", "optimizer", "context")
    others = sum(rollout[name] for name in stay)
    assert rollout["total"] == pytest.approx(others + rollout["gathered_weights"] + rollout["kv_cache"], abs=0.01)
    step, _ = plan()
    assert step["total"] > rollout["total"] and step["gathered_weights"] == rollout["gathered_weights"]
    lockstep, _ = plan(*full, *LOCKSTEP.split())
    assert lockstep["total"] < rollout["total"] - 0.5 and lockstep["gathered_weights"] == 0
    _, advice = plan(*full, "--device_memory_gb", "7")
    assert LOCKSTEP in advice, advice
