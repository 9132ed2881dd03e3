"""`--preset`: a plan in one word, from the memory of the run."""

import math

import pytest

from toolkit.cli import main
from toolkit.commands import pretrain
from toolkit.config.command import parse_object
from toolkit.errors import UserError
from toolkit.planning.auto import resolve_auto
from toolkit.planning.resolve import DeviceSpec
from toolkit.planning.training_options import run_args
from toolkit.training.hyperparameters import resolved_hyperparameters

EIGHT = DeviceSpec("cuda", 8, 1, memory=40e9)


def config_of(preset: str, devices: DeviceSpec = EIGHT, **options):
    train = {"max_steps": 1} | options.pop("train", {})
    options = {"model_name": "pythia-14m", "model_config": {"vocab_size": 50304}} | options
    arguments = parse_object(pretrain.setup, options | {"preset": preset, "train": train})
    return resolve_auto(run_args(**arguments), devices)


def test_each_preset_does_what_it_says():
    plans = {preset: config_of(preset) for preset in ("balanced", "memory", "speed")}
    balanced, memory, speed = plans.values()
    assert (balanced.strategy.kind, balanced.batch.micro_batch_size, balanced.preset) == ("fsdp", 8, "")
    assert (memory.strategy.kind, memory.batch.micro_batch_size) == ("fsdp", 1)
    assert memory.args.train.activation_checkpointing == "full"
    assert (speed.strategy.sharding, speed.batch.micro_batch_size) == ("SHARD_GRAD_OP", 8)
    assert speed.args.train.activation_checkpointing == "none"
    assert memory.preset.startswith("memory: --strategy fsdp, --train.micro_batch_size 1, ")
    assert "GB by default" in memory.preset
    # what was chosen is saved in the place of the preset
    saved = resolved_hyperparameters(speed)
    assert (saved["preset"], saved["strategy"], saved["train"]["micro_batch_size"]) == ("balanced", "fsdp", 8)


@pytest.mark.slow
def test_memory_takes_what_the_precision_and_the_nodes_support():
    assert config_of("memory", precision="bf16-master").strategy.kind == "ddp"  # the only one that supports it
    nodes = config_of("memory", DeviceSpec("cuda", 8, 2, memory=40e9))
    assert str(nodes.strategy).startswith("fsdp FULL_SHARD, one unit per block, 16 shards")


@pytest.mark.slow
def test_speed_takes_what_fits():
    large = {"model_name": "Llama-3-8B", "model_config": {}}
    least = config_of("speed", **large)
    assert least.strategy.sharding == "FULL_SHARD" and least.batch.micro_batch_size == 1
    gathered = config_of("speed", DeviceSpec("cuda", 8, 1, memory=140e9), train={"max_seq_length": 1024}, **large)
    assert gathered.strategy.sharding == "SHARD_GRAD_OP" and gathered.batch.micro_batch_size >= 4
    unknown = config_of("speed", DeviceSpec("cuda", 8, 1, memory=math.inf))
    assert "--strategy fsdp, --train.micro_batch_size 4" in unknown.preset
    given = config_of("speed", strategy="ddp", train={"micro_batch_size": 2})
    assert given.preset == "speed: nothing to change"
    cpu = config_of("speed", DeviceSpec("cpu", 1, 1, memory=40e9))
    assert cpu.batch.micro_batch_size > 4


def test_given_values_stay():
    given = config_of("memory", train={"micro_batch_size": 2, "activation_checkpointing": "selective"})
    assert (given.batch.micro_batch_size, given.args.train.activation_checkpointing) == (2, "selective")
    assert config_of("speed", strategy="fsdp").strategy.kind == "fsdp"
    assert config_of("speed", fsdp={"shard_size": 8}).strategy.kind == "fsdp"  # which ddp does not have


@pytest.mark.slow
def test_a_batch_that_only_the_preset_divides():
    batch = config_of("memory", DeviceSpec("cpu", 2, 1), train={"global_batch_size": 6}).batch
    assert batch.micro_batch_size * batch.accumulation == 3  # the default of 8 does not divide it


def test_a_run_that_no_variant_can_start_has_its_own_error():
    with pytest.raises(UserError, match="--optimizer.name LBFGS: evaluates the loss several times"):
        config_of("memory", optimizer={"name": "LBFGS"})


def test_plan_shows_the_preset(capsys, refusal):
    argv = ["plan", "pretrain", "pythia-14m", "--devices", "8", "--preset", "memory"]
    line = "\nPreset     memory: --strategy fsdp, --train.micro_batch_size 1, "
    assert main(argv) == 0 and line in capsys.readouterr().out
    assert "--preset memry: must be one of" in refusal(*argv[:-1], "memry")
