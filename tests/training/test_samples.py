"""Samples during training: the prompt, the text, and that they do not affect training."""

import io
import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers.compare_runs import column, require_same
from helpers.groups import Case, run_group
from helpers.small_runs import write_base, write_rows
from torch import nn

from tests.inference.conftest import STYLES
from toolkit import api
from toolkit.checkpoints.folder import load_model
from toolkit.cli import main
from toolkit.data.base import PreparedData
from toolkit.data.tokenizer import Tokenizer
from toolkit.errors import GuardError, UserError
from toolkit.inference.generate import generate
from toolkit.inference.sampling import GREEDY
from toolkit.models.families import get_config
from toolkit.models.gpt import GPT
from toolkit.training.callbacks import samples as samples_module
from toolkit.training.callbacks.samples import Sampler, first_prompt, make_sampler
from toolkit.ui.console import PlainProgress

BY_DEFAULT = samples_module._NEW_TOKENS  # before conftest.py lowers it


@pytest.fixture(scope="module")
def base(tmp_path_factory, corpus) -> Path:
    folder = write_base(tmp_path_factory.mktemp("base"), corpus)
    write_rows(folder)
    return folder


@pytest.fixture(scope="module")
def shared(base) -> list[str]:
    return [
        str(base), "--accelerator", "cpu", "--data", "JSON", "--data.json_path", str(base / "rows.jsonl"),
        "--data.prompt_style", "plain", "--train.global_batch_size", "8", "--train.micro_batch_size", "2",
        "--train.max_steps", "6", "--train.learning_rate", "3e-2", "--eval.interval", "2",
    ]  # fmt: skip


def samples(printed: str) -> dict[int, tuple[str, str]]:
    """Return prompt and answer by step."""
    found = re.findall(r'^sample after step (\d+), to "(.*)":\n((?:    .*\n)+)', printed, re.M)
    return {int(step): (prompt, re.sub("^    ", "", answer, flags=re.M).rstrip("\n")) for step, prompt, answer in found}


def test_samples_do_not_affect_training_and_match_the_final_model(shared, tmp_path, capsys):
    """With dropout, whose random numbers a sample must not change."""
    flags = [*shared, "--lora_dropout", "0.2", "--eval.initial_validation", "true"]
    for name, length in (("with", "12"), ("without", "0")):
        more = ["--eval.max_new_tokens", length, "--out_dir", str(tmp_path / name)]
        assert main(["finetune_lora", *flags, *more]) == 0
        printed = capsys.readouterr().out
        if name == "with":
            shown = samples(printed)
        else:
            assert not samples(printed)
    require_same(tmp_path / "with", tmp_path / "without")
    assert column(tmp_path / "with", "val_loss") == column(tmp_path / "without", "val_loss")
    assert list(shown) == [0, 2, 4, 6]
    assert len({prompt for prompt, _ in shown.values()}) == 1 and shown[0][0].startswith("token")
    assert shown[0][1] != shown[6][1]  # the model has learned something
    final = tmp_path / "with" / "final"
    model, tokenizer = load_model(final).eval(), Tokenizer.load(final)
    prompt = torch.tensor(tokenizer.encode(shown[6][0]))
    again = tokenizer.decode(list(generate(model, prompt, max_new_tokens=12, sampling=GREEDY, eos_ids=[0])))
    assert shown[6][1] == again.strip()


def test_finetuning_samples_by_default_and_pretraining_does_not(shared, corpus, tmp_path, capsys):
    assert main(["finetune_full", *shared, "--out_dir", str(tmp_path / "full"), "--train.max_steps", "1"]) == 0
    assert list(samples(capsys.readouterr().out)) == [1]
    text = ["pico-llama", "--accelerator", "cpu", "--data", "TextFiles", "--data.train_data_path", str(corpus)]
    sizes = ["--train.max_seq_length", "48", "--train.max_steps", "1", "--train.global_batch_size", "4"]
    assert main(["pretrain", *text, *sizes, "--out_dir", str(tmp_path / "a")]) == 0
    assert not samples(capsys.readouterr().out)
    assert main(["pretrain", *text, *sizes, "--out_dir", str(tmp_path / "b"), "--eval.max_new_tokens", "9"]) == 0
    assert list(samples(capsys.readouterr().out)) == [1]


def test_without_a_tokenizer_samples_are_token_ids(tmp_path, capsys):
    flags = ["--data", "SyntheticTokens", "--train.max_seq_length", "16", "--train.max_steps", "1"]
    more = ["--accelerator", "cpu", "--train.global_batch_size", "4", "--eval.max_new_tokens", "3"]
    assert main(["pretrain", "pico-llama", *flags, *more, "--out_dir", str(tmp_path / "run")]) == 0
    ((prompt, answer),) = samples(capsys.readouterr().out).values()
    assert re.fullmatch(r"(\.\.\.)?[\d ]+", prompt) and re.fullmatch(r"\d+ \d+ \d+", answer)


def test_samples_of_a_user_provided_module_are_an_error(tmp_path):
    module = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8))
    rows = [torch.arange(5) for _ in range(8)]
    options = {"train": {"max_steps": 1, "max_seq_length": 4, "global_batch_size": 4}, "accelerator": "cpu"}
    with pytest.raises(UserError, match="eval.max_new_tokens 5: is not supported with a user-provided model"):
        api.train(module, rows, eval={"max_new_tokens": 5}, out_dir=tmp_path / "run", **options)
    assert not (tmp_path / "run" / "logs").exists()


def row(ids, labels, **more):
    return [{k: torch.tensor(v) for k, v in {"input_ids": ids, "labels": labels, **more}.items()}]


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (row([5, 6, 7, 8, 9], [-100, -100, 8, 9, 1]), [5, 6, 7]),  # the answer begins with 8
        (row([5, 6, 7, 8], [6, 7, 8, 9]), [5, 6]),  # text: at most half of the row
        (row(list(range(100)), list(range(1, 101))), list(range(32))),
        (row([5], [6]), [5]),
        (row([5, 6, 7], [-100, -100, -100]), [5, 6, 7]),  # a prompt
        (row([1, 2, 3, 4, 5], [2, 3, -100, 4, 5], documents=[0, 0, 1, 1, 1]), [1]),  # text in a packed row
        (row([1, 2, 3, 4, 5], [-100, 3, 9, 4, 5], documents=[0, 0, 0, 1, 1]), [1, 2]),
    ],
)
def test_prompt_selection(rows, expected):
    assert first_prompt(rows) == expected


def test_long_prompt_is_truncated_on_the_left(monkeypatch):
    rows = row(list(range(8)), [-100] * 7 + [9])
    config = replace(get_config("pico-llama"), block_size=8)
    for length, expected in ((3, [3, 4, 5, 6, 7]), (7, [7])):
        sampler = make_sampler(PreparedData(rows, None, None, "key", ""), config, length)
        assert sampler.prompt == expected
    with pytest.raises(UserError, match="--eval.max_new_tokens 8: must be less than 8"):
        make_sampler(PreparedData(rows, None, None, "key", ""), config, 8)
    monkeypatch.setattr(samples_module, "_NEW_TOKENS", BY_DEFAULT)
    by_default = make_sampler(PreparedData(rows, None, None, "key", ""), config, "auto")
    assert by_default.max_new_tokens == 4 and by_default.prompt == [4, 5, 6, 7]
    long = make_sampler(PreparedData(rows, None, None, "key", ""), replace(config, block_size=1000), "auto")
    assert long.max_new_tokens == 64


def test_n7_nan_weights_stop_the_run():
    model = GPT(get_config("pico-llama").with_vocab_size(64))
    with torch.no_grad():
        model.lm_head.weight[3] = float("nan")
    display = SimpleNamespace(phase=lambda text: None, message=lambda text: None)
    with pytest.raises(GuardError, match="not finite"):
        Sampler([1, 2], 3, None).generate(model, display)


def test_control_characters_are_escaped(tmp_path):
    display = PlainProgress(file := io.StringIO())
    model = GPT(get_config("pico-llama").with_vocab_size(64))
    tokenizer = SimpleNamespace(
        decode=lambda ids: "a\x1b[2Jb\nc", eos_id=None, settings=lambda file: {}, name="it", files={}
    )
    weights = {"evaluation_weights": nullcontext, "model": model}
    run = SimpleNamespace(display=display, out_dir=tmp_path, progress=SimpleNamespace(step=7), **weights)
    Sampler([1, 2], 3, tokenizer).on_validation_end(run, {})
    shown = 'sample after step 7, to "a\\x1b[2Jb | c":\n    a\\x1b[2Jb\n    c\n'
    assert file.getvalue().partition("sample")[1:] == ("sample", shown.removeprefix("sample"))
    assert model.training


@pytest.mark.slow
@pytest.mark.parametrize("style", ["llama", "qwen3_5"])
def test_s6_all_ranks_sample_together(style, shared, corpus, tmp_path, capsys):
    """Two ranks under fsdp generate the same text as one; training is bit-equal to that without samples."""
    (folder := tmp_path / "base").mkdir()
    shared = [str(write_base(folder, corpus, **STYLES[style] | {"padded_vocab_size": None})), *shared[1:]]
    lengths, fsdp = {"with": "10", "without": "0"}, ["--strategy", "fsdp", "--eval.max_new_tokens"]
    assert main(["finetune_lora", *shared, "--eval.max_new_tokens", "10", "--out_dir", str(tmp_path / "one")]) == 0
    one = samples(capsys.readouterr().out)
    run_group(tmp_path, 2, [Case(n, [*fsdp, k], command="finetune_lora") for n, k in lengths.items()], shared)
    require_same(tmp_path / "with", tmp_path / "without")
    assert column(tmp_path / "with", "val_loss") == column(tmp_path / "without", "val_loss")
    first, second = (samples((tmp_path / "group-of-2-0" / f"{rank}.out").read_text()) for rank in (0, 1))
    assert list(one) == [2, 4, 6] and first == one and not second
