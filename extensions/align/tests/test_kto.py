"""KTO: the loss with its estimate of the divergence, one curve for every split and layout, and its reference."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.cases import slow_except
from helpers.compare_runs import curve
from helpers.small_runs import write_base
from torch.nn.functional import log_softmax

from toolkit.cli import main
from toolkit.data.loader import val_batches
from toolkit.data.sft.prepare_sft import RatedDataset
from toolkit.models.families import get_config
from toolkit.models.gpt import GPT
from toolkit.models.lora import add_lora
from toolkit.models.lora_config import LoRAConfig
from toolkit.objectives import KTO

RUN = (
    "--objective KTO --data Preference --data.json_path rated.jsonl --data.prompt_style chatml --accelerator cpu "
    "--data.val_split_fraction 0.2 --data.cache_dir cache --train.global_batch_size 8 --train.max_steps 4 "
    "--train.lr_warmup_steps 0 --train.learning_rate 1e-2 --eval.interval 2 --eval.max_new_tokens 0"
)


class Rated(RatedDataset):
    """Random rated rows of different lengths."""

    statistics = {"max_seq_length": 12}

    def __init__(self):
        pass

    def __len__(self):
        return 7

    def __getitem__(self, i):
        generator = torch.Generator().manual_seed(i)
        prompt, length = 2 + i % 3, 6 + i
        ids = torch.randint(0, 100, (length + 1,), generator=generator)
        labels = ids[1:].clone()
        labels[: prompt - 1] = -100
        return {"input_ids": ids[:-1], "labels": labels, "values": {"label": i % 2}}


def test_loss_and_gradients_equal_the_formula_on_complete_logits():
    torch.manual_seed(3)
    model, base = (GPT(get_config("pico-llama").with_vocab_size(100)) for _ in range(2))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    base.load_state_dict(model.state_dict())
    add_lora(model, LoRAConfig(r=4, alpha=8, dropout=0.0))
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    for parameter in trained.values():
        torch.nn.init.normal_(parameter, std=0.3)
    objective, rows = KTO(0.5, desirable_weight=1.5, undesirable_weight=0.7), Rated()
    batches = list(val_batches(rows, micro_batch_size=3, rank=0, world_size=1, max_rows=None))
    assert batches[-1].ids.count(-1) == 4  # two fillers
    one = val_batches(rows, micro_batch_size=1, rank=0, world_size=1, max_rows=1)
    objective.look_ahead(model, one, torch.device("cpu"))
    assert objective._kl == 0  # its partner is the sample itself
    objective.look_ahead(model, batches, torch.device("cpu"))
    supervised = sum(int((rows[i]["labels"] >= 0).sum()) for i in range(7))
    assert sum(objective.count(batch)["tokens"] for batch in batches) == supervised
    sums = [objective.sums(model, batch, torch.device("cpu")) for batch in batches]
    loss = sum(part["loss"] for part in sums)
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in trained.items()}
    model.zero_grad()

    def ratio(row):
        kept = row["labels"] >= 0
        logits = (m(row["input_ids"][None])[0] for m in (model, base))
        log_p, log_ref = (log_softmax(z, -1)[kept, row["labels"][kept]].sum() for z in logits)
        return log_p - log_ref.detach()

    mismatched = []
    for i in range(7):
        row, other = rows[i], rows[(i - 1) % 7]
        prompt, skipped = 2 + i % 3, 2 + (i - 1) % 7 % 3
        ids = torch.cat([row["input_ids"][:prompt], other["input_ids"][skipped:], other["labels"][-1:]])
        labels = ids[1:].clone()
        labels[: prompt - 1] = -100
        mismatched.append({"input_ids": ids[:-1][:12], "labels": labels[:12]})
    kl = torch.stack([ratio(row).detach() for row in mismatched]).mean().clamp(min=0)
    assert kl > 0.01
    total = torch.zeros(())
    for i in range(7):
        z = 0.5 * (ratio(rows[i]) - kl)
        total = total + (1.5 * (1 - z.sigmoid()) if i % 2 else 0.7 * (1 - (-z).sigmoid()))
    total.backward()
    assert loss.item() == pytest.approx(total.item(), rel=1e-5)
    assert sum(part["kl"] for part in sums).item() / 7 == pytest.approx(kl.item(), rel=1e-4)
    for name, p in trained.items():
        torch.testing.assert_close(gradients[name], p.grad, rtol=1e-4, atol=1e-6)


@pytest.fixture
def base(tmp_path, monkeypatch):
    """A base model and rated rows in the current folder."""
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "a.txt").write_text("Say something nice or bad about a number, please. " * 20)
    (tmp_path / "base").mkdir()
    monkeypatch.chdir(tmp_path)
    rows = [
        {"prompt": f"number {i}", "completion": ("bad ", "nice ")[i % 2] * (1 + i % 3), "label": bool(i % 2)}
        for i in range(30)
    ]
    Path("rated.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return write_base(tmp_path / "base", tmp_path / "corpus", vocab_size=280, block_size=160)


def run(command: str, words: str) -> list[dict[str, float]]:
    assert main([command, "base", *RUN.split(), *words.split()]) == 0
    return curve(words.split()[-1])


@pytest.mark.parametrize("command", slow_except(["finetune_lora"], ["finetune_lora", "finetune_full"]))
def test_n2_kto_is_one_curve_in_every_split_and_resumed_bit_equal(base, command):
    whole = run(command, f"--train.micro_batch_size 8 --out_dir {command}")
    assert whole[0]["loss"] == pytest.approx(0.5) and whole[0]["kl"] == 0 < max(row["kl"] for row in whole)
    assert whole[-1]["val_reward_chosen"] > whole[-1]["val_reward_rejected"]
    split = f"--train.micro_batch_size 2 --train.save_interval 2 --out_dir {command}-split"
    again = run(command, split)
    for row, expected in zip(again, whole, strict=True):
        assert row == pytest.approx(expected, rel=1e-4, abs=1e-5, nan_ok=True)
    shutil.rmtree(f"{command}-split/final")
    assert repr(run(command, f"--resume {command}-split/step-00000002 {split}")) == repr(again)
    assert "lm_head" not in str(sorted(torch.load(f"{command}/final/trainer/state.pth", weights_only=True)))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp", "ddp"])
def test_n2_kto_on_two_ranks(base, strategy):
    for command in ("finetune_lora", "finetune_full"):
        whole = run(command, f"--train.micro_batch_size 4 --out_dir {command}")
        words = f"--devices 2 --strategy {strategy} --out_dir {command}-two"
        subprocess.run([sys.executable, "-m", "toolkit", command, "base", *RUN.split(), *words.split()], check=True)
        for row, expected in zip(curve(f"{command}-two"), whole, strict=True):
            assert row == pytest.approx(expected, rel=1e-4, abs=1e-5, nan_ok=True)
