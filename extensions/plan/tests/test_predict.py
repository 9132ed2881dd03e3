"""The predicted step of a run, and the faster settings that are suggested."""

import json
import math
import re
from dataclasses import replace

import pytest
from helpers.cases import check_each
from helpers.gpu_products import head_chunk_ms
from toolkit_plan.by_memory import flags_of
from toolkit_plan.measure import micro_step
from toolkit_plan.plan import plan_run
from toolkit_plan.predict import predict
from toolkit_plan.suggestions import _STEPS
from toolkit_plan.summary import format_plan, plan_summary, speed_summary

from toolkit.cli import main
from toolkit.commands import pretrain
from toolkit.config.command import parse_object
from toolkit.distributed.gpus import GPUS
from toolkit.errors import UserError
from toolkit.models.families import get_config
from toolkit.models.flops import flops_per_token
from toolkit.models.gpt import model_on_meta
from toolkit.planning.resolve import DeviceSpec
from toolkit.planning.run_args import with_options
from toolkit.planning.training_options import run_args

PRECISION, COMPILER, MICRO_BATCH, _, STRATEGY = _STEPS
LONG = {"max_steps": 10**5}


def planned_run(**options):
    given = {"model_name": "pico-llama", "model_config": {"vocab_size": 512}} | options
    return plan_run(run_args(**parse_object(pretrain.setup, given)), DeviceSpec("cuda", 1, 1, 85e9))


def plan(capsys, *argv: str) -> dict:
    assert main(["plan", *argv, "--format", "json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.slow
def test_predictions_meet_measurements(monkeypatch):
    """Of GPT-2 with an odd vocabulary, whatever the run's head does about it: 16 chunks a step.

    The loss was torch.compile's, which reads the logits three times.
    """
    monkeypatch.setattr(micro_step, "LOSS_READS", 3)

    def step_ms(name, compiler, length, sizes, vocab_size):
        plan = planned_run(
            model_name=name, model_config={"vocab_size": vocab_size}, precision="bf16-mixed", compiler=compiler,
            train={"max_seq_length": length, "micro_batch_size": sizes[0], "global_batch_size": sizes[1]},
        )  # fmt: skip
        prediction = predict(plan, GPUS["H100"])
        assert any(note.startswith("the host launches") for note in prediction.notes) == (name == "pythia-160m")
        return 1e3 * prediction.seconds

    odd = 16 * (head_chunk_ms(50_257) - head_chunk_ms(50_304))

    def check(measured, tolerance, extra, *run):
        assert step_ms(*run) + extra == pytest.approx(measured, rel=tolerance)

    check_each(
        check,
        [
            (249, 0.03, odd, "gpt2", "torch", 1024, (32, 64), 50_304),
            (315, 0.03, odd, "gpt2", "none", 1024, (32, 64), 50_304),
            (906, 0.06, 0, "tiny-llama-1.1b", "torch", 2048, (8, 32), 32_000),
            (145, 0.03, 0, "gpt2", "torch", 1024, (32, 64), 50_304),
            (77.3, 0.17, 0, "pythia-160m", "none", 1024, (8, 16), 50_304),
        ],
    )


def test_plan_predicts_a_step(capsys):
    """The parts add up to the step; MFU is N8's; packed rows, 4-bit weights and several nodes are predicted, too."""
    argv = ["pretrain", "pythia-14m", "--train.max_seq_length", "128", "--speed", "h200", "--compiler", "none"]
    argv += ["--train.micro_batch_size", "4"]
    planned = plan(capsys, *argv)
    speed, config = planned["speed"], get_config("pythia-14m")
    assert sum(speed["parts_ms"].values()) == pytest.approx(speed["step_ms"], abs=0.05)
    assert speed["tokens_per_sec"] == pytest.approx(planned["tokens_per_step"] / speed["step_ms"] * 1e3, rel=1e-3)
    flops = flops_per_token(model_on_meta(config), config, 128)
    assert speed["mfu"] == pytest.approx(flops * speed["tokens_per_sec"] / 989e12, abs=1e-4)  # rounded
    assert (speed["gpu"], speed["measured"], planned["device_memory_gb"]) == ("H200", False, 150.1)
    gains = [v["gain"] for v in speed["variants"][:-1]]
    assert gains == sorted(gains, reverse=True) and "--compiler torch" in speed["variants"][-1]["change"]
    samples = speed["tokens_per_sec"] / 128
    assert f" tokens/s, {samples:,.3g} samples/s, MFU" in format_plan(planned)
    assert "(prediction; not measured on a GPU)\n" in format_plan(planned)
    assert "Fits into 150.1 GB (140 GiB of the 141 GB H200)." in format_plan(planned)
    moved = (2 + 3 + 2 * 2) * 4 * sum(p.numel() for p in model_on_meta(config).parameters())
    # fused AdamW reads gradients, weights and moments, and writes weights and moments; the norm is before it
    assert speed["parts_ms"]["optimizer"] == pytest.approx(1e3 * moved / (4.8e12 * 0.88), abs=0.006)
    assert any(note.startswith("the host launches for ") for note in speed["notes"])
    assert speed["parts_ms"]["launch"] > 1  # the GPU waits for the host in micro-batches, too, not only once per step
    assert speed["run_seconds"] > 0 and "\n  run " in format_plan(planned)  # the default length


def test_times_are_shown_in_readable_units():
    """From a plan's values: seconds for long steps, the time of the run, and that the run does not fit."""
    plan = planned_run(train={"max_steps": 200, "micro_batch_size": 4, "max_seq_length": 64})
    prediction = predict(plan, GPUS["H200"])
    slow = replace(prediction, parts=prediction.parts | {"products": 30.0})
    summary = plan_summary(plan, 1e-3, math.inf, []) | {
        "speed": speed_summary("H200", 141, slow, [], plan.config.steps)
    }
    shown = format_plan(summary)
    assert "(prediction; not measured on a GPU; does not fit in memory)\n" in shown
    assert (
        re.search(r"\n  step +30\.\d  s: [\d,]+ tokens/s, 2\.1\d* samples/s, MFU", shown)
        and "\n  products             30.0  matrix" in shown
    )
    assert re.search(r"\n  run +100\.\d  min: 200 steps", shown)
    assert summary["speed"]["run_seconds"] == pytest.approx(200 * slow.seconds, abs=0.1)


def test_changes_that_auto_would_not_take_are_not_suggested():
    """To compile a short run; and what it would take instead of fp32 is."""

    for train, changes in (LONG, [{"compiler": "torch"}]), ({"max_steps": 50}, []):
        assert list(COMPILER(planned_run(compiler="none", train=train))) == changes
    assert list(PRECISION(planned_run(precision="32-true"))) == [{"precision": "bf16-mixed"}]
    plan = planned_run(train=LONG)
    assert not list(PRECISION(plan)) and not list(COMPILER(plan))
    assert plan_run(plan.config.args, plan.config.devices).compiler[0] == plan.compiler[0] == "torch"


@pytest.mark.slow
def test_variants_are_runs_that_start():
    """Without options that the change makes refused; and no larger than what "auto" would take."""

    def texts(change, options, gb=85.0):
        given = {"model_name": "pythia-14m", "train": {"max_steps": 1, "micro_batch_size": 4, "max_seq_length": 64}}
        args = run_args(**parse_object(pretrain.setup, given | options))
        planned = plan_run(args, DeviceSpec("cuda", 2, 1, gb * 1e9))
        planned = replace(planned, args=planned.config.args)
        return [flags_of(changes) for changes in change(planned) if can_start(changes, planned)], planned

    def can_start(changes, planned):
        try:
            return bool(plan_run(with_options(planned.args, changes), planned.config.devices))
        except UserError:
            return False

    found, _ = texts(MICRO_BATCH, {"strategy": "fsdp", "fsdp": {"accumulate": "sharded"}})
    assert found == ["--train.micro_batch_size 8", "--train.micro_batch_size 16"]  # 32 accumulate nothing
    # the strategy that the run has costs as much as the run
    assert texts(STRATEGY, {"strategy": "fsdp", "fsdp": {"accumulate": "sharded"}})[0] == [
        "--fsdp.sharding_strategy SHARD_GRAD_OP",
        "--strategy fsdp",
    ]
    assert texts(STRATEGY, {"strategy": "fsdp"})[0][0] == "--strategy ddp"
    assert texts(STRATEGY, {"ddp": {"bucket_cap_mb": 5.0}})[0] == ["--strategy ddp"]
    gb = texts(MICRO_BATCH, {"strategy": "ddp"})[1].memory.total / 1e9
    assert not texts(MICRO_BATCH, {"strategy": "ddp"}, 1.05 * gb)[0]


def test_gpus_without_bf16_train_in_fp16(capsys, refusal):
    v100 = ["--speed", "V100"]
    assert GPUS["V100"].generation.forward < GPUS["A10"].generation.forward  # nor FlashAttention 2
    assert plan(capsys, "pretrain", "pico-llama", *v100)["precision"] == "16-mixed"
    assert "--precision bf16-mixed: this GPU has no bfloat16; use auto, 16-mixed" in refusal(
        "plan", "pretrain", "pico-llama", *v100, "--precision", "bf16-mixed"
    )


@pytest.mark.slow
def test_every_kind_of_run_is_predicted(capsys):
    cases = [
        "finetune_full Llama-3.2-1B --train.max_seq_length 256 --precision 32-true",
        "finetune_lora Llama-3.2-1B --train.max_seq_length 256 --data JSON --data.json_path x --data.packing best_fit",
        "finetune_lora Llama-3.2-1B --train.max_seq_length 256 --quantize bnb.nf4 --lora_dora true",
        "pretrain Qwen3-30B-A3B --train.max_seq_length 256 --train.max_steps 1 --devices 8 --num_nodes 2",
        "pretrain gemma-2-2b --train.max_seq_length 256 --train.max_steps 1 --strategy ddp --devices 2",
        "pretrain DeepSeek-V2-Lite --train.max_seq_length 256 --train.activation_checkpointing full",
        "pretrain smollm2-135m --optimizer.name Adafactor --precision 16-mixed",
        "pretrain smollm2-135m --devices 8 --fsdp.sharding_strategy SHARD_GRAD_OP --compiler torch",
    ]
    for case in cases:
        speed = plan(capsys, *case.split(), "--speed", "H100")["speed"]
        assert speed["step_ms"] > 0 and (speed["mfu"] is None) == ("32-true" in case), case
        assert speed["mfu"] is None or speed["mfu"] < 0.8, (case, speed)
