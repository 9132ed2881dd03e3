"""Advice: changes that make a run fit, each of which the run would accept."""

from types import SimpleNamespace

import pytest
from toolkit_plan import advice as advice_module
from toolkit_plan.advice import advice_for, apply_steps
from toolkit_plan.plan import RunPlan, plan_run, run_args_of

from toolkit.commands import finetune_lora, pretrain
from toolkit.config.command import parse_object
from toolkit.planning.resolve import DeviceSpec

SMALL = {"n_layer": 4, "n_embd": 512, "n_head": 8, "vocab_size": 4096}
COMMANDS = {
    "pretrain": (pretrain.setup, {"model_name": "pythia-14m", "model_config": SMALL}),
    "finetune_lora": (finetune_lora.setup, {"checkpoint_dir": "pythia-160m"}),
}


def advise(command: str, devices: DeviceSpec, gb: float | None = None, **options) -> tuple[RunPlan, list[str]]:
    """Return the plan, and the changes for devices of this memory; by default, a little less than it takes."""
    setup, named = COMMANDS[command]
    with run_args_of(**parse_object(setup, named | options)) as args:
        plan = plan_run(args, devices)
        limit = gb or 0.99 * plan.memory.total / 1e9
        return plan, [advice.change for advice in advice_for(plan, limit)]


def test_gpus_without_bf16_get_no_advice_to_use_it():
    train = {"micro_batch_size": 1, "max_seq_length": 512, "activation_checkpointing": "full"}
    with_bf16, without = (
        str(advise("pretrain", DeviceSpec("cuda", 1, 1, has_bf16=has), precision="16-mixed", train=train)[1])
        for has in (True, False)
    )
    assert "--precision bf16" in with_bf16 and "--precision" not in without, (with_bf16, without)
    plan, _ = advise("finetune_lora", DeviceSpec("cuda", 1, 1, has_bf16=False), gb=10, quantize="bnb.nf4")
    assert plan.config.precision == "32-true"  # 16-mixed is not supported with 4 bits


def test_options_without_fsdp_are_given_up_where_only_a_copy_does_not_fit():
    for options, flags in (
        ({"precision": "bf16-master"}, "--precision bf16-mixed"),
        ({"optimizer": {"name": "Muon"}, "strategy": "ddp"}, "--strategy fsdp --fsdp.sharding_strategy FULL_SHARD"),
    ):
        train = {"micro_batch_size": 1, "global_batch_size": 8, "max_seq_length": 128}
        plan, changes = advise("pretrain", DeviceSpec("cuda", 8, 1, 0.75e9), 0.75, train=train, **options)
        assert (plan.config.strategy.kind, changes) == ("ddp", [flags])


@pytest.mark.slow
def test_a_smaller_model_is_the_last_resort():
    train = {"micro_batch_size": 1, "max_seq_length": 512}
    for gb, is_smaller in ((0.7, False), (0.57, True)):
        changes = advise("pretrain", DeviceSpec("cuda", 8, 1), gb, train=train)[1]
        assert changes[-1].startswith("a smaller model: --model_config.n_layer ") == is_smaller, changes
        assert str(changes).count("n_layer") == is_smaller


def test_a_change_of_less_than_two_percent_does_not_help(monkeypatch):
    """Bf16-master saves 1 % for Llama-3-8B on one device, and would rule out offloading, with which it fits."""

    def with_total(total: float, *_: object) -> SimpleNamespace:
        config = SimpleNamespace(devices=DeviceSpec("cuda", 1, 1))
        return SimpleNamespace(args=None, rows=None, config=config, memory=SimpleNamespace(total=total), node_memory=0)

    monkeypatch.setattr(advice_module, "plan_run", with_total)
    monkeypatch.setattr(advice_module, "with_options", lambda args, changes: changes["total"])
    for total, helps in ((19.9, False), (19.0, True), (10.0, True)):
        steps = [lambda _, total=total: [{"total": total}]]
        assert bool(apply_steps(steps, with_total(20), lambda plan: plan.memory.total / 10 - 1)) == helps, total
