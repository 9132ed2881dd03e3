"""What "auto" chooses: the strategy and the micro-batch, from the memory that the run needs."""

import math
import re
from collections.abc import Callable
from dataclasses import replace
from unittest import mock

import pytest
import torch
from helpers.cases import check_each
from toolkit_plan.by_memory import choose_size
from toolkit_plan.measure import micro_step
from toolkit_plan.plan import plan_run, run_args_of
from torch import nn

from toolkit.commands import finetune_lora, pretrain
from toolkit.config.command import parse_object
from toolkit.data import TextFiles
from toolkit.data.sft.datasets import Alpaca
from toolkit.errors import UserError
from toolkit.planning import auto
from toolkit.planning.auto import resolve_auto
from toolkit.planning.compiler import choose_compiler
from toolkit.planning.limits import Limits
from toolkit.planning.resolve import DeviceSpec, ResolvedConfig
from toolkit.planning.run_args import with_options
from toolkit.planning.training_options import run_args
from toolkit.training.hyperparameters import resolved_hyperparameters

DDP = {"strategy": "ddp"}


class OfMatrices(torch.optim.SGD):
    needs_unsharded = True


def limits_of(steps: int | None) -> Limits:
    return Limits(steps, None, None, None, steps)


@pytest.fixture(scope="module")
def config_of() -> Callable[..., ResolvedConfig]:
    """Resolves a run with options by dotted names, on 8 GPUs of 80 GB."""
    given = {"model_name": "pythia-14m", "train": {"max_steps": 1}, "model_config": {"vocab_size": 50304}}
    base = run_args(**parse_object(pretrain.setup, given))

    def resolved(options: dict, gb=80.0, devices=8, nodes=1, device="cuda") -> ResolvedConfig:
        return resolve_auto(with_options(base, options), DeviceSpec(device, devices, nodes, gb * 1e9))

    return resolved


def test_gradients_are_sharded_where_the_data_sets_the_vocabulary():
    data = TextFiles(train_data_path="text", vocab_size=512)
    given = {"model_name": "pythia-70m", "data": data, "strategy": "fsdp", "precision": "32-true"}
    args = run_args(**parse_object(pretrain.setup, given | {"train": {"max_steps": 1, "micro_batch_size": 1}}))
    needed = plan_run(args, DeviceSpec("cuda", 8, 1, 80e9)).memory.total
    for memory, accumulate in ((1.01 * needed, "unsharded"), (0.99 * needed, "sharded")):
        assert resolve_auto(args, DeviceSpec("cuda", 8, 1, memory)).accumulate == accumulate
    with mock.patch.object(auto, "load_single", side_effect=AssertionError("small gradients need no estimate")):
        assert resolve_auto(args, DeviceSpec("cuda", 8, 1, 80e9)).accumulate == "unsharded"


def test_the_largest_micro_batch_that_fits_with_room_is_chosen():
    def check(needed: dict, length: int, chosen: tuple[int, str]) -> None:
        size, why = choose_size(needed.get, list(needed), 4, length, 100e9)
        assert (size, why) == chosen

    grows = {size: size * 10e9 for size in (1, 2, 4, 8, 16)}
    check_each(
        check,
        [
            (grows, 1024, (8, "takes 80.0 GB; 16 would take more than 85% of 100.0 GB")),
            (grows, 8192, (8, "65,536 tokens; takes 80.0 GB of 100.0 GB")),
            (grows, 65536, (1, "65,536 tokens; takes 10.0 GB of 100.0 GB")),
            ({1: 1e9, 2: 2e9}, 1024, (2, "a device's share of the global batch; takes 2.0 GB of 100.0 GB")),
            ({1: 90e9, 2: 95e9}, 1024, (1, "takes 90.0 GB; no size takes at most 85% of 100.0 GB")),
            # only without accumulation: --optimizer.in_backward
            (
                {1: math.inf, 2: math.inf, 64: 30e9},
                1024,
                (64, "a device's share of the global batch; takes 30.0 GB of 100.0 GB"),
            ),
            ({1: math.nan, 4: math.nan}, 1024, (4, "up to 4 if memory is unknown before the run")),
        ],
    )


def test_strategies_of_runs(config_of):
    def check(options: dict, place: dict, strategy: str) -> None:
        found = str(config_of(options | {"train.micro_batch_size": 2}, **place).strategy)  # nothing else to choose
        assert found.startswith(strategy), found

    check_each(
        check,
        [
            ({}, {}, "fsdp FULL_SHARD, one unit per block, 8 shards (--fsdp.sharding_strategy HYBRID_SHARD on one"),
            ({}, {"nodes": 2}, "fsdp HYBRID_SHARD, one unit per block, 8 shards, 2 replicas"),
            ({}, {"nodes": 2, "devices": 1}, "fsdp NO_SHARD, one unit per block, 1 shard, 2 replicas (--fsdp.sharding"),
            ({}, {"devices": 1}, "one device (only one available)"),
            ({}, {"gb": math.inf}, "fsdp FULL_SHARD, one unit per block, 8 shards"),
            ({}, {"device": "cpu", "devices": 2}, "fsdp FULL_SHARD, one unit per block, 2 shards"),
            # what is given implies its strategy, also as the value that auto would take
            ({"strategy": "fsdp"}, {}, "fsdp FULL_SHARD"),
            ({"fsdp.sharding_strategy": "HYBRID_SHARD"}, {}, "fsdp FULL_SHARD"),
            ({"fsdp.state_dict_type": "sharded"}, {}, "fsdp FULL_SHARD"),
            ({"fsdp.sharding_strategy": "NO_SHARD"}, {}, "fsdp NO_SHARD, one unit per block, 1 shard, 8 replicas"),
            ({"ddp.bucket_cap_mb": 5.0}, {"gb": 1}, "ddp, 8 replicas (options of --ddp"),
            # which FSDP does not have
            ({"precision": "bf16-master"}, {"gb": math.inf},
             "ddp, 8 replicas (auto: --precision bf16-master is not supported with fsdp: under fsdp, bf16-mixed"),
            ({"optimizer.name": "Muon"}, {}, "fsdp FULL_SHARD"),
            ({"optimizer_class": OfMatrices}, {},
             "ddp, 8 replicas (auto: a user-provided or extension optimizer is not supported with fsdp: its needs_"),
        ],
    )  # fmt: skip
    with pytest.raises(UserError, match="--ddp.bucket_cap_mb 5.0 has no effect with fsdp"):
        config_of({"fsdp.shard_size": 8, "ddp.bucket_cap_mb": 5.0})


def test_a_variable_under_which_ddp_crashes_on_a_cpu_excludes_it(config_of, monkeypatch):
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    assert config_of({}, device="cpu", devices=2).strategy.kind == "fsdp"
    with pytest.raises(UserError, match="^TORCH_DISTRIBUTED_DEBUG=DETAIL is not supported with ddp on a CPU: "):
        config_of(DDP, device="cpu", devices=2)


MICRO_BATCHES = [
    ({}, {}, 64),
    ({"train.max_seq_length": 2048}, {}, 32),
    ({"model_name": "gpt2", "train.max_seq_length": 1024}, {}, 64),
    ({"train.micro_batch_size": 2}, {}, 2),
    ({"pipeline_parallel_size": 2}, {"devices": 2}, 8),  # four micro-batches per stage
    ({}, {"gb": math.inf}, 4),
]
MORE_MICRO_BATCHES = [
    ({"model_name": "gpt2", "train.max_seq_length": 1024}, {"gb": 24}, 32),
    ({}, {"devices": 8}, 8),
    ({"train.global_batch_size": 48}, {}, 48),
    ({"pipeline_parallel_size": 2, "train.global_batch_size": 4}, {"devices": 2, "device": "cpu"}, 1),
    ({}, {"device": "cpu"}, 4),
    ({"train.global_batch_size": 6}, {"device": "cpu"}, 3),
    ({"optimizer.in_backward": True, "train.max_norm": 0.0}, {}, 64),
]


@pytest.mark.parametrize("cases", [MICRO_BATCHES, pytest.param(MORE_MICRO_BATCHES, marks=pytest.mark.slow)], ids=len)
def test_micro_batches_of_runs(config_of, cases):
    def check(options: dict, place: dict, size: int) -> None:
        found = config_of({"train.max_seq_length": 512} | options, **{"devices": 1} | place)
        assert found.batch.micro_batch_size == size, found.reasons
        assert ("train.micro_batch_size" in found.reasons) == ("train.micro_batch_size" not in options)

    check_each(check, cases)


def test_compilers_of_runs(config_of):
    def check(options: dict, place: dict, is_ragged: bool, steps: int | None, chosen: tuple[str, str]) -> None:
        sizes = {"train.max_seq_length": 512, "train.micro_batch_size": 8}
        config = config_of(sizes | options, **{"devices": 1} | place)
        name, reason = choose_compiler(replace(config, is_ragged=is_ragged, limits=limits_of(steps)))
        assert name == chosen[0] and re.fullmatch(chosen[1], reason), (name, reason)

    wrapped = {"strategy": "fsdp", "fsdp.auto_wrap": "size"}
    short, long = r"auto: compilation takes about 10s and saves about \ds.*", r"auto: .* about \d+[dhm] \d\d[hms].*"
    check_each(
        check,
        [
            ({}, {}, False, 100_000, ("torch", long)),
            ({}, {"devices": 8}, False, None, ("torch", "auto: rows of one length")),
            ({}, {}, False, 100, ("none", short)),
            ({}, {}, True, 100_000, ("none", "auto: rows differ in length")),
            ({"train.max_time": 0.2}, {}, False, None, ("none", short)),
            ({"train.max_time": 0.2}, {}, False, 100_000, ("none", short)),
            ({"train.max_time": 60.0}, {}, False, None, ("torch", long)),
            ({"module": nn.Linear(1, 1), "strategy": "ddp"}, {}, False, None, ("none", "auto: a user-provided model")),
            (wrapped, {"devices": 2}, False, None, ("none", "auto: --fsdp.auto_wrap size")),
            ({"compiler": "torch"}, {"device": "cpu"}, True, 1, ("torch", "")),
            ({"compiler": "none"}, {}, False, 2000, ("none", "")),
        ],
    )  # fmt: skip


def test_a_cpu_predicts_nothing_before_it_starts(config_of, monkeypatch):
    monkeypatch.setattr(micro_step, "trace_micro_step", lambda *_: pytest.fail("traced"))
    config = config_of({}, devices=1, device="cpu")
    assert choose_compiler(replace(config, limits=limits_of(10**6))) == ("none", "auto: on cpu")


def test_compilation_is_weighed_in_seconds_of_the_gpu(config_of):
    """Not in steps: a slow GPU needs fewer of them; an unknown GPU counts as an A100."""

    config = config_of({"train.max_seq_length": 512}, devices=1)

    def min_steps(gpu: str) -> int:
        on_gpu = replace(config, devices=replace(config.devices, gpu=gpu))
        possible = (2**i for i in range(14))
        return next(n for n in possible if choose_compiler(replace(on_gpu, limits=limits_of(n)))[0] != "none")

    assert min_steps("NVIDIA A100-SXM4-80GB") == min_steps("GTX 9999") == min_steps("")
    assert min_steps("Tesla T4") < min_steps("NVIDIA H100 80GB HBM3")


def test_what_was_chosen_is_saved(config_of):
    saved = resolved_hyperparameters(config_of({}))
    assert (saved["strategy"], saved["train"]["micro_batch_size"]) == ("fsdp", 8)
    assert resolved_hyperparameters(config_of({}, devices=1))["strategy"] == "auto"
    options = {"eps": 1e-7, "betas": (0.9, 0.9), "amsgrad": True}
    saved = resolved_hyperparameters(config_of({"optimizer.options": options}))["optimizer"]
    assert (saved["eps"], saved["betas"], saved["options"]) == ("auto", "auto", options)  # each once


def test_adapters_of_a_large_model_are_trained_without_accumulation():
    given = {"checkpoint_dir": "Llama-3-8B", "train": {"max_seq_length": 512}, "data": Alpaca()}
    with run_args_of(**parse_object(finetune_lora.setup, given)) as args:
        plan = plan_run(args, DeviceSpec("cuda", 8, 1, 80e9))
    assert plan.config.strategy.kind == "fsdp" and plan.config.batch.micro_batch_size == 2
