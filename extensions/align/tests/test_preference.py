"""DPO, ORPO and SimPO: formulas in fp64, the reference, one curve for every split, and mistakes."""

import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.cases import slow_except
from helpers.compare_runs import curve
from helpers.small_runs import write_base
from toolkit_align import reference
from toolkit_align.preference import Answers
from torch.nn.functional import log_softmax

from toolkit.cli import main
from toolkit.data.cache import find_prepared, load_or_prepare
from toolkit.data.loader import val_batches
from toolkit.errors import UserError
from toolkit.models.families import get_config
from toolkit.models.gpt import GPT
from toolkit.models.lora import add_lora
from toolkit.models.lora_config import LoRAConfig
from toolkit.objectives import DPO, ORPO, SimPO

RUN = (
    "--data Preference --data.json_path pairs.jsonl --data.prompt_style chatml --data.val_split_fraction 0.2 "
    "--data.cache_dir cache --accelerator cpu --train.global_batch_size 8 --train.max_steps 4 "
    "--train.lr_warmup_steps 0 --train.learning_rate 1e-3 --eval.interval 2 --eval.max_new_tokens 0"
)


def log_sigmoid(z: float) -> float:
    return -math.log1p(math.exp(-z))


def formulas(c: float, r: float, ref_c: float, ref_r: float, n_c: int, n_r: int) -> dict[str, float]:
    """Return the loss of a pair by name: the formulas of the papers."""
    margin, per_token = (c - ref_c) - (r - ref_r), (c - ref_c) / n_c - (r - ref_r) / n_r
    sigmoid = lambda z: 1 / (1 + math.exp(-z))  # noqa: E731
    odds = [math.exp(mean) / (1 - math.exp(mean)) for mean in (c / n_c, r / n_r)]
    return {
        "sigmoid": -log_sigmoid(0.3 * margin),
        "smoothed": -0.9 * log_sigmoid(0.3 * margin) - 0.1 * log_sigmoid(-0.3 * margin),
        "sft": -log_sigmoid(0.3 * margin) - 0.5 * c / n_c,
        "sigmoid_norm": -log_sigmoid(0.3 * per_token),
        "ipo": (per_token - 1 / 0.6) ** 2,
        "hinge": max(0.0, 1 - 0.3 * margin),
        "apo_zero": 1 - sigmoid(0.3 * (c - ref_c)) + sigmoid(0.3 * (r - ref_r)),
        "orpo": -c / n_c - 0.3 * log_sigmoid(math.log(odds[0] / odds[1])),
        "simpo": -log_sigmoid(2 * (c / n_c - r / n_r) - 0.6),
    }


OBJECTIVES = {
    **{name: DPO(0.3, name) for name in ("sigmoid", "sigmoid_norm", "ipo", "hinge", "apo_zero")},
    "smoothed": DPO(0.3, label_smoothing=0.1),
    "sft": DPO(0.3, sft_weight=0.5),
    "orpo": ORPO(0.3),
    "simpo": SimPO(2.0, 0.6),
}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_losses_are_the_formulas_of_the_papers(name):
    pairs = [(-3.1, -9.5, -4.0, -8.0, 5, 7), (-40.0, -2.0, -35.5, -2.5, 12, 2), (-0.01, -20.0, -5.0, -5.0, 1, 4)]
    columns = torch.tensor(pairs, dtype=torch.float64).unbind(1)
    chosen, rejected = (Answers(columns[i], columns[4 + i], columns[2 + i]) for i in range(2))
    found = OBJECTIVES[name].of_pairs(chosen, rejected)["loss"]
    assert found.tolist() == pytest.approx([formulas(*pair)[name] for pair in pairs], rel=1e-12)


class Pairs:
    """Pairs of random rows of different lengths."""

    group_size = 2

    def __len__(self):
        return 5

    def __getitem__(self, i):
        generator = torch.Generator().manual_seed(i)
        rows = []
        for length, prompt in ((6 + i, 3), (9 - i, 4)):
            ids = torch.randint(0, 100, (length + 1,), generator=generator)
            labels = ids[1:].clone()
            labels[: prompt - 1] = -100
            rows.append({"input_ids": ids[:-1], "labels": labels})
        return rows


def test_loss_and_gradients_equal_complete_logits_with_the_base_as_reference():
    torch.manual_seed(0)
    model, base = (GPT(get_config("pico-llama").with_vocab_size(100)) for _ in range(2))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    base.load_state_dict(model.state_dict())
    add_lora(model, LoRAConfig(r=4, alpha=8, dropout=0.0, query=True, value=True, mlp=True, head=True, dora=False))
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.1)
    batches = list(val_batches(Pairs(), micro_batch_size=3, rank=0, world_size=1, max_rows=None))
    assert batches[1].ids[-2:] == [-1, -1]  # a filler pair
    objective = DPO(0.5)
    sums = [objective.sums(model, batch, torch.device("cpu")) for batch in batches]
    loss = sum(part["loss"] for part in sums)
    (loss / 5).backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}
    model.zero_grad()

    total = torch.zeros(())
    for i in range(5):
        terms = []
        for row in Pairs()[i]:
            kept = row["labels"] >= 0
            log_p, log_ref = (
                log_softmax(m(row["input_ids"][None])[0].float(), -1)[kept, row["labels"][kept]].sum()
                for m in (model, base)
            )
            terms.append(log_p - log_ref.detach())
        total = total - torch.nn.functional.logsigmoid(0.5 * (terms[0] - terms[1]))
    (total / 5).backward()
    assert loss.item() == pytest.approx(total.item(), rel=1e-5)
    for name, p in model.named_parameters():
        if p.requires_grad:
            torch.testing.assert_close(gradients[name], p.grad, rtol=1e-4, atol=1e-6)
    assert all(not layer.adapters_off for layer in model.modules() if hasattr(layer, "adapters_off"))


@pytest.fixture
def base(tmp_path, monkeypatch):
    """A base model and pairs in the current folder."""
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    (corpus / "a.txt").write_text("Say something nice or bad about a number, please. " * 20)
    (tmp_path / "base").mkdir()
    monkeypatch.chdir(tmp_path)
    rows = [
        {"prompt": f"number {i}", "chosen": "nice " * (1 + i % 3), "rejected": f"bad {i}" * (1 + i % 2)}
        for i in range(20)
    ]
    Path("pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return write_base(tmp_path / "base", corpus, vocab_size=280, block_size=160)


def run(command: str, words: str) -> list[dict[str, float]]:
    assert main([command, "base", *RUN.split(), *words.split()]) == 0
    return curve(words.split()[-1])


@pytest.mark.parametrize("command", slow_except(["finetune_lora"], ["finetune_lora", "finetune_full"]))
def test_n2_dpo_is_one_curve_in_every_split_and_resumed_bit_equal(base, command):
    whole = run(command, f"--objective DPO --train.micro_batch_size 8 --out_dir {command}")
    assert whole[0]["loss"] == pytest.approx(math.log(2), rel=1e-6) and whole[0]["reward_margin"] == 0
    assert whole[-1]["val_accuracy"] > 0.5 and whole[-1]["reward_margin"] > 0.005
    assert whole[-1]["val_loss"] < math.log(2) and math.isnan(whole[-1]["val_ppl"])
    shutil.rmtree("cache")  # the reference of a resumed run is computed again, from the initial weights
    split = f"--objective DPO --train.micro_batch_size 2 --train.save_interval 2 --out_dir {command}-split"
    again = run(command, split)
    for row, expected in zip(again, whole, strict=True):
        assert row == pytest.approx(expected, rel=1e-4, abs=1e-6, nan_ok=True)
    shutil.rmtree(f"{command}-split/final")
    shutil.rmtree("cache")
    resumed = run(command, f"--resume {command}-split/step-00000002 {split}")
    assert repr(resumed) == repr(again)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp", "ddp", "fsdp --tensor_parallel_size 2"])
def test_n2_dpo_on_two_ranks(base, strategy):
    for command in ("finetune_lora", "finetune_full"):
        whole = run(command, f"--objective DPO --train.micro_batch_size 4 --out_dir {command}")
        words = f"--objective DPO --devices 2 --strategy {strategy} --out_dir {command}-two"
        subprocess.run([sys.executable, "-m", "toolkit", command, "base", *RUN.split(), *words.split()], check=True)
        rows = curve(f"{command}-two")
        rows[0]["accuracy"] = 0.0  # rounding decides: the model is the reference
        for row, expected in zip(rows, whole, strict=True):
            assert row == pytest.approx(expected, rel=1e-4, abs=1e-5, nan_ok=True)


def test_orpo_and_simpo_need_no_reference(base, capsys):
    for name in ("ORPO", "SimPO"):
        rows = run("finetune_full", f"--objective {name} --out_dir {name}")
        assert rows[-1]["loss"] < rows[0]["loss"] and "log-probabilities" not in capsys.readouterr().out
    assert not list(Path("cache").glob("reference-*"))


@pytest.mark.slow
def test_another_reference_is_that_of_its_weights(base, capsys):
    shutil.copytree("base", "other")
    words = "--objective DPO --objective.reference_dir other --out_dir out"
    first = run("finetune_lora", words)
    live = run("finetune_lora", "--objective DPO --out_dir live")
    assert "log-probabilities of other" in capsys.readouterr().out
    for row, expected in zip(first, live, strict=True):
        assert row == pytest.approx(expected, rel=1e-4, abs=1e-6, nan_ok=True)


def test_defaults_of_preferences(base):
    options = RUN.replace("--train.learning_rate 1e-3", "").replace("--train.max_steps 4", "")
    for command, rate in (("finetune_lora", 5e-6), ("finetune_full", 5e-7)):
        assert main([command, "base", *options.split(), "--objective", "DPO", "--out_dir", f"{command}-default"]) == 0
        rows = curve(f"{command}-default")
        assert rows[0]["learning_rate"] == rate and len(rows) == 2  # one epoch of 16 pairs


def test_the_cache_of_the_reference_knows_the_architecture(base):
    """Other frequencies with the same weights are another model."""
    shutil.copytree("base", "rope")
    config = Path("rope/model_config.yaml")
    text = config.read_text()
    config.write_text(re.sub(r"rope_base: .*", "rope_base: 37", text))
    assert config.read_text() != text
    for folder in ("base", "rope"):
        words = f"--objective DPO --train.micro_batch_size 8 --train.max_steps 1 --out_dir out-{folder}"
        assert main(["finetune_full", folder, *RUN.split(), *words.split()]) == 0
        assert curve(f"out-{folder}")[0]["loss"] == pytest.approx(math.log(2), rel=1e-6)
    assert len(list(Path("cache").glob("reference-*"))) == 2


def test_a_cached_reference_that_lacks_a_split_or_rows_is_computed_again(tmp_path):
    """With right checksums, as after an interrupted experiment with the cache."""
    cached, rows = tmp_path / "reference", [0, 1, 2]

    def read(parts):
        return reference._read(cached, "key", parts)

    def make(folder):
        reference._write("key", {"train": np.zeros((3, 1))}, folder)

    values, _ = load_or_prepare(cached, "test", lambda: read({"train": rows}), make, print)
    assert values["train"].shape == (3, 1)
    for parts in ({"train": rows, "val": rows}, {"train": rows[:2]}):
        values, reason = find_prepared(cached, lambda parts=parts: read(parts))
        assert values is None and "the cached data is damaged" in reason, parts


def test_a_batch_without_the_reference_is_an_error():
    batch = next(val_batches(Pairs(), micro_batch_size=2, rank=0, world_size=1, max_rows=None))
    with pytest.raises(KeyError):
        DPO().sums(GPT(get_config("pico-llama").with_vocab_size(100)), batch, torch.device("cpu"))
    with pytest.raises(UserError, match=r"--objective.loss_type foo: must be one of sigmoid, "):
        DPO(loss_type="foo")


def test_help_shows_the_values_of_options(capsys):
    for name in ("DPO", "KTO", "ORPO", "SimPO"):
        assert main(["finetune_lora", "x", "--objective", name, "--help", "objective"]) == 0
        shown = " ".join(capsys.readouterr().out.split())
        assert "(a number; default: " in shown and ("one of sigmoid, sigmoid_norm, ipo" in shown) == (name == "DPO")


def test_mistakes_are_one_line(base, refusal):
    shutil.copytree("base", "larger")
    shutil.copytree("base", "adapters")
    Path("adapters/lit_model.pth").rename("adapters/lit_model.pth.lora")
    shutil.copytree("base", "renamed")
    tokenizer = json.loads(Path("base/tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["!"], vocabulary["#"] = vocabulary["#"], vocabulary["!"]
    Path("renamed/tokenizer.json").write_text(json.dumps(tokenizer))
    config = Path("larger/model_config.yaml")
    config.write_text(config.read_text().replace("vocab_size: 280", "vocab_size: 281", 1))
    cases = {
        "finetune_lora base --objective NextToken": "--data Preference is not supported with --objective NextToken",
        "finetune_lora base --objective DPO --objective.beta 0": "--objective.beta 0.0: must be greater than zero",
        "finetune_lora base --objective DPO --objective.loss_type ipo --objective.label_smoothing 0.1": "has no effect",
        "finetune_lora base --objective DPO --objective.reference_dir none": "--objective.reference_dir none: no such",
        "finetune_lora base --objective DPO --objective.reference_dir adapters": "run `toolkit merge_lora` on it first",
        "finetune_lora base --objective DPO --objective.reference_dir renamed": "has another vocabulary than base: of ",
        "finetune_lora base --objective DPO --objective.reference_dir larger": "has 281 tokens, but",
        "finetune_lora base --objective DPO --data.packing best_fit": "packing best_fit: is not supported with pref",
        "pretrain pico-llama --objective DPO --tokenizer_dir base": "--objective DPO is not supported with pretrain",
        "finetune_lora base --objective DPO --data PythonStdlib": "use --data Preference",
    }
    for words, message in cases.items():
        command, *rest = words.replace("''", "").split(" ")
        options = ["--out_dir", "out", *([] if "PythonStdlib" in rest else RUN.split()[:6])]
        assert message in refusal(command, *rest[:1], *options, *rest[1:], "--accelerator", "cpu")
    assert "evaluate needs answers, not preferences or labels" in refusal(
        "evaluate", "base", "--data", "Preference", "--data.json_path", "pairs.jsonl"
    )
