"""`toolkit.Trainer`: the arguments of `toolkit.train` one by one, and OpenLanguageModel's trainers' arguments."""

import types

import pytest
import torch
from helpers.cases import check_each
from lightning.fabric.strategies import FSDPStrategy
from torch import nn
from torch.utils.data import DataLoader

import toolkit
from toolkit.cli.parser import parse
from toolkit.errors import UserError
from toolkit.planning.start_checks import check_start
from toolkit.planning.training_options import run_args
from toolkit.training.run import Run
from toolkit.ui.loggers import read_metrics

MODEL = toolkit.ModelConfig(vocab_size=64, block_size=16, n_layer=1, n_embd=16, n_head=2)
ROWS = torch.arange(1000).unfold(0, 9, 9) % 64
RUN = {"accelerator": "cpu", "devices": 1}


def test_one_api_for_what_train_does(tmp_path, capsys):
    batch = {"global_batch_size": 8, "micro_batch_size": 4, "learning_rate": 1e-3}
    plain = toolkit.train(
        MODEL, ROWS, val_dataset=ROWS[:8], train=batch | {"max_steps": 3, "max_norm": 0.5}, optimizer=torch.optim.SGD,
        out_dir=tmp_path / "plain", **RUN,
    )  # fmt: skip
    trainer = toolkit.Trainer(
        model=MODEL, dataloader=ROWS, val_dataset=ROWS[:8], device="cpu", devices=1, optimizer=torch.optim.SGD,
        learning_rate=1e-3, batch_size=4, grad_accum_steps=2, grad_clip_norm=0.5, out_dir=tmp_path / "trainer",
    )  # fmt: skip
    seen = []

    class Sees(toolkit.Callback):
        def on_train_end(self, trainer: toolkit.Trainer) -> None:
            seen.append(trainer)

    with pytest.raises(UserError, match="the run has not started; call fit"):
        trainer.progress  # noqa: B018
    result = trainer.train(max_steps=3, callbacks=[Sees()])
    assert trainer.result == result and result.step == trainer.progress.step == 3
    assert seen == [trainer.run] and trainer.model is trainer.run.model and trainer.callbacks is trainer.run.callbacks
    first, second = (read_metrics(r.out_dir / "logs" / "metrics.csv") for r in (plain, result))
    for name in ("loss", "val_loss", "grad_norm"):
        assert [row[name] for row in first][-1] == [row[name] for row in second][-1]
    # a preset comes to the run, which says what it chose
    again = toolkit.Trainer(
        MODEL, ROWS, preset="memory", max_steps=1, global_batch_size=8, out_dir=tmp_path / "p", **RUN
    )
    again.fit()
    assert "Preset memory: --train.micro_batch_size 1, " in capsys.readouterr().out


def test_every_name_has_its_meaning():
    def fitted(dataset=ROWS, **options) -> dict:
        return toolkit.Trainer("pico-llama", dataset, **options).arguments()

    cases = [
        ({"context_length": 8}, {"train": {"max_seq_length": 8}}),
        ({"weight_decay": 0.1, "optimizer": "SGD"}, {"optimizer": {"name": "SGD", "weight_decay": 0.1}}),
        ({"grad_clip_norm": None}, {"train": {"max_norm": 0}}),
        ({"device": "cuda:0"}, {"accelerator": "cuda"}),
        ({"device": "cpu:auto"}, {"accelerator": "cpu"}),
        ({"use_amp": False}, {"precision": "32-true"}),
        ({"use_amp": True}, {"precision": "auto"}),
        ({"mixed_precision_policy": "bf16"}, {"precision": "bf16-mixed"}),
        ({"auto_wrap_policy": "size", "min_num_params": 5}, {"fsdp": {"auto_wrap": "size", "min_num_params": 5}}),
        ({"transformer_layer_cls": nn.Linear}, {"block_classes": [nn.Linear]}),
        ({"backward_prefetch": "BACKWARD_PRE"}, {"fsdp": {"backward_prefetch": "pre"}}),
        ({"sharding_strategy": "FULL_SHARD", "fsdp": {"cpu_offload": True}},
         {"fsdp": {"sharding_strategy": "FULL_SHARD", "cpu_offload": True}}),
        ({"state_dict_type": "sharded"}, {"fsdp": {"state_dict_type": "sharded"}}),
        ({"bucket_cap_mb": 5, "strategy": "ddp"}, {"ddp": {"bucket_cap_mb": 5}, "strategy": "ddp"}),
        ({"epochs": 2, "log_interval": 5, "train": {"min_lr": 0.0}},
         {"train": {"epochs": 2, "log_interval": 5, "min_lr": 0.0}}),
        ({"grad_accum_steps": 4, "devices": 2, "accelerator": "cpu", "dataset": DataLoader(ROWS, batch_size=3)},
         {"train": {"micro_batch_size": 3, "global_batch_size": 24}}),
        # without grad_accum_steps there is no accumulation
        ({"batch_size": 2, "devices": 2, "accelerator": "cpu"},
         {"train": {"micro_batch_size": 2, "global_batch_size": 4}}),
        ({"dataset": DataLoader(ROWS, batch_size=8), **RUN},
         {"train": {"micro_batch_size": 8, "global_batch_size": 8}}),
        ({"batch_size": 2, "train": {"global_batch_size": 8}, **RUN},
         {"train": {"micro_batch_size": 2, "global_batch_size": 8}}),
    ]  # fmt: skip

    def check(options: dict, expected: dict) -> None:
        found = fitted(**options)
        assert {name: found[name] for name in expected} == expected

    check_each(check, cases)


def test_names_of_other_libraries_are_answered():
    with pytest.raises(UserError, match="^strategy FSDPStrategy: give a name, such as 'fsdp'"):
        toolkit.train("pico-llama", ROWS, strategy=FSDPStrategy())
    assert not hasattr(toolkit, "nothing")
    for kind, strategy in (
        (toolkit.DDPTrainer, "ddp"), (toolkit.FSDPTrainer, "fsdp"), (toolkit.AutoTrainer, "auto")
    ):  # fmt: skip
        assert kind(nn.Linear(2, 2), ROWS).arguments().get("strategy", "auto") == strategy
    with pytest.raises(UserError, match="^HFTokenizer gpt2: no such folder or file; .*toolkit download"):
        toolkit.HFTokenizer("gpt2")
    for trainer in (toolkit.Trainer(nn.Linear(2, 2), ROWS), object.__new__(Run)):
        with pytest.raises(UserError, match=r"save_checkpoint: .*trainer.save\(name\)"):
            trainer.save_checkpoint("x.pt", state_dict_type="full")
    with pytest.raises(UserError, match="^strategy FSDPStrategy: give a name, such as 'fsdp'"):
        toolkit.finetune("x", ROWS, strategy=FSDPStrategy())
    for strategy, hint in (
        ("zero2", "SHARD_GRAD_OP"),
        ("zero3", "use fsdp"),
        ("deepspeed", "use fsdp"),
        ("fsdp1", "use fsdp, which resumes its checkpoints"),
    ):
        with pytest.raises(UserError, match=f"strategy {strategy}: must be .*; .*{hint}"):
            toolkit.train("pico-llama", ROWS, strategy=strategy)
    with pytest.raises(UserError, match=r"ModelConfig\(hidden_dim=...\): no such field; did you mean n_embd\?"):
        toolkit.ModelConfig(hidden_dim=3)
    with pytest.raises(UserError, match=r"ModelConfig\(latent_dim=...\): no such field; an extension's options are in"):
        toolkit.ModelConfig(latent_dim=64)
    loader = DataLoader([torch.arange(9)])
    trainer = toolkit.Trainer(nn.Linear(2, 2), torch.optim.SGD, loader)
    assert trainer.arguments()["dataset"] is loader and trainer.arguments()["optimizer"] is torch.optim.SGD
    for words, text in (
        ("--fsdp.sharding_strategy ZERO2", "use SHARD_GRAD_OP"),
        ("--fsdp.sharding_strategy zero3", "use FULL_SHARD"),
        ("--strategy zero3", "use fsdp, which shards like ZeRO 3"),
        ("--data Alpaca2k", "--tokenizer_dir"),
    ):
        with pytest.raises(UserError, match=text):
            check_start(run_args(**parse("pretrain", words.split())))


def test_imports_of_guides(capsys):
    from toolkit import AutoTrainer, DataLoader, FineWebEduDataset, get_backend, print_rank_0
    from toolkit.model import Block

    print_rank_0("step", 3)
    assert capsys.readouterr().out == "step 3\n"
    assert issubclass(AutoTrainer, toolkit.Trainer) and Block is toolkit.models.block.Block
    loader = DataLoader(ROWS, batch_size=4, num_workers=0, distributed=True)
    assert (loader.sampler.num_replicas, loader.sampler.rank, loader.sampler.shuffle) == (1, 0, True)
    assert AutoTrainer(nn.Linear(2, 2), loader, **RUN).arguments()["train"]["global_batch_size"] == 4
    with pytest.raises(UserError, match="^DataLoader SyntheticTokens: give it to the Trainer itself"):
        DataLoader(toolkit.data.SyntheticTokens(), batch_size=4)
    for use, hint in (
        (lambda: get_backend(), "toolkit chooses nccl or gloo"),
        (lambda: FineWebEduDataset("tokenizer", streaming=True), "use toolkit.data.HuggingFaceText"),
        (lambda: types.new_class("Mine", (toolkit.GPT2,)), 'use model="gpt2"'),
        (lambda: isinstance(loader, toolkit.GPT2), 'use model="gpt2"'),
        (lambda: toolkit.GPT2.from_pretrained("gpt2"), 'use model="gpt2"'),
        (lambda: toolkit.save_checkpoint("x"), "in a callback use trainer.save"),
    ):
        with pytest.raises(UserError, match=f"^toolkit.*: does not exist; .*{hint}"):
            use()


def test_names_that_are_unknown_or_given_twice():
    cases = [
        ({"learning_rat": 1}, "learning_rat: no such argument; did you mean 'learning_rate'"),
        ({"steps_per_epoch": 5}, "steps_per_epoch: no such argument"),
        ({"max_steps": 1, "train": {"max_steps": 2}}, "max_steps: train.max_steps is also given"),
        (
            {"grad_accum_steps": 2, "global_batch_size": 8, **RUN},
            "grad_accum_steps: train.global_batch_size is also given",
        ),
        ({"state_dict_type": "FULL_STATE_DICT"}, "^fsdp.state_dict_type 'FULL_STATE_DICT': must be .*; use full$"),
        ({"learning_rate": -1}, "^train.learning_rate -1.0: must be greater than zero"),
        ({"device": "cuda:3"}, "device cuda:3: each process uses the device of its local rank .0.; use cuda"),
        ({"device": "cpu", "accelerator": "cpu"}, "device: accelerator is also given"),
        ({"dataloader": ROWS}, "dataloader: a dataset is also given"),
    ]

    def check(options: dict, message: str) -> None:
        with pytest.raises(UserError, match=message):
            toolkit.Trainer("pico-llama", ROWS, **options)

    check_each(check, cases)
    with pytest.raises(UserError, match="max_steps: is already an argument of Trainer"):
        toolkit.Trainer("pico-llama", ROWS, max_steps=1).fit(max_steps=2)
