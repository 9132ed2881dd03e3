"""`toolkit.finetune`, `generate` and `load` of adapters, and training of a checkpoint on rows of tokens."""

import shutil
from pathlib import Path

import pytest
import torch

import toolkit
from toolkit.checkpoints.weights import load_weights
from toolkit.cli import main
from toolkit.data import JSON, SyntheticTokens
from toolkit.errors import UserError
from toolkit.training import python_args

TRAIN = {"max_steps": 2, "global_batch_size": 4, "micro_batch_size": 2, "max_seq_length": 32, "learning_rate": 1e-2}
OPTIONS = {"train": TRAIN, "accelerator": "cpu", "devices": 1}
ROWS = [torch.randint(0, 64, (25,), generator=torch.Generator().manual_seed(i)) for i in range(12)]


@pytest.fixture(scope="module")
def base(corpus, tmp_path_factory) -> Path:
    """A trained pico model with a tokenizer."""
    data = toolkit.data.TextFiles(train_data_path=str(corpus), vocab_size=300)
    return toolkit.train("pico-llama", data, out_dir=tmp_path_factory.mktemp("base") / "run", **OPTIONS).checkpoint


@pytest.fixture(scope="module")
def questions(tmp_path_factory) -> JSON:
    file = tmp_path_factory.mktemp("data") / "questions.jsonl"
    file.write_text("".join(f'{{"prompt": "the token {i}", "completion": "reads a line"}}\n' for i in range(12)))
    return JSON(json_path=str(file), prompt_style="plain", val_split_fraction=0.0)


@pytest.fixture(scope="module")
def adapted(base, questions, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("lora") / "run"
    return toolkit.finetune(base, questions, lora=True, lora_r=2, out_dir=out, **OPTIONS).checkpoint


def test_lora_trains_adapters_and_load_reads_them_with_their_base(base, adapted, tmp_path):
    assert {path.name for path in adapted.iterdir()} >= {"lit_model.pth.lora", "adapter.yaml"}
    model = toolkit.load(adapted)
    assert any(".lora.query.A" in name for name, _ in model.named_parameters())
    moved = shutil.copytree(base, tmp_path / "moved")
    again = toolkit.load(adapted, base_checkpoint_dir=moved).state_dict()
    assert all(torch.equal(value, again[name]) for name, value in model.state_dict().items())
    with pytest.raises(UserError, match="base_checkpoint_dir .*: has no effect"):
        toolkit.load(base, base_checkpoint_dir=moved)


def test_full_finetuning_is_that_of_the_command(base, questions, tmp_path):
    result = toolkit.finetune(base, questions, out_dir=tmp_path / "python", **OPTIONS)
    assert result.step == 2
    flags = [word for name, value in TRAIN.items() for word in (f"--train.{name}", str(value))]
    words = ["finetune_full", str(base), "--data.json_path", questions.json_path, "--data.prompt_style", "plain"]
    words += ["--data.val_split_fraction", "0", "--accelerator", "cpu", "--devices", "1"]
    assert main([*words, *flags, "--out_dir", str(tmp_path / "command")]) == 0
    first, second = load_weights(result.checkpoint), load_weights(tmp_path / "command" / "final")
    assert all(torch.equal(first[name], second[name]) for name in first | second)


def test_finetuning_has_the_defaults_of_its_command(base, questions, monkeypatch):
    seen = []
    monkeypatch.setattr(toolkit.api, "run_training", lambda args, callbacks: seen.append(args))
    monkeypatch.setattr(python_args, "read_result", lambda out_dir: None)
    toolkit.finetune(base, questions, lora=True, train={"max_steps": 3}, accelerator="cpu")
    (args,) = seen
    assert (args.train.learning_rate, args.train.global_batch_size, args.train.max_steps) == (2e-4, 16, 3)
    assert (args.out_dir, args.eval.max_new_tokens, args.command) == ("out/finetune/lora", "auto", "finetune_lora")


def test_rows_of_tokens_need_no_tokenizer_in_the_checkpoint(tmp_path):
    options = OPTIONS | {"train": TRAIN | {"max_seq_length": 24}}
    first = toolkit.train("pico-llama", ROWS, model_config={"vocab_size": 64}, out_dir=tmp_path / "a", **options)
    assert not (first.checkpoint / "tokenizer.json").exists()
    more = toolkit.train(None, ROWS, initial_checkpoint_dir=first.checkpoint, out_dir=tmp_path / "b", **options)
    full = toolkit.finetune(first.checkpoint, ROWS, eval={"max_new_tokens": 0}, out_dir=tmp_path / "c", **options)
    assert more.step == full.step == 2 and more.metrics["loss"] != first.metrics["loss"]
    with pytest.raises(UserError, match=r"checkpoint_dir .*tokenizer\.json"):
        data = toolkit.data.TextFiles(train_data_path=__file__)
        toolkit.train(None, data, initial_checkpoint_dir=first.checkpoint, out_dir=tmp_path / "d", **options)


def test_generate_is_that_of_the_command(base, capsys):
    texts = toolkit.generate(base, "the token", max_new_tokens=8, num_samples=2, accelerator="cpu")
    capsys.readouterr()
    words = ["--prompt", "the token", "--max_new_tokens", "8", "--num_samples", "2", "--accelerator", "cpu"]
    assert main(["generate", str(base), *words]) == 0
    assert capsys.readouterr().out == "".join(f"the token{text}\n" for text in texts)
    model = toolkit.load(base)
    assert toolkit.generate(model, "the token", max_new_tokens=8, num_samples=2, tokenizer_dir=base) == texts


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda base: toolkit.generate(base, "x", num_samples=0), "^num_samples 0: must be greater than zero"),
        (lambda base: toolkit.generate(base, "x", temperature="warm"), "^temperature 'warm': must be a number"),
        (lambda base: toolkit.generate(base, "x", precison="32-true"), "precison: no such option; did you mean"),
        (lambda base: toolkit.generate(toolkit.load(base), "x"), "tokenizer_dir: must be set"),
        (lambda base: toolkit.generate(toolkit.load(base), "x", precision="32-true"), "precision: has no effect"),
        (lambda base: toolkit.finetune(base), "dataset: must be a DataModule"),
        (lambda base: toolkit.finetune(base, SyntheticTokens(), lora_r=4), "lora_r: no such option"),
        (lambda base: toolkit.finetune(base, ROWS, callbacks=[1]), "callbacks int: must be objects"),
        (lambda base: toolkit.finetune(base, ROWS, train={"max_steps": 0}), "train.max_steps 0: must be greater than"),
    ],
)
def test_user_errors(base, call, message):
    with pytest.raises(UserError, match=message):
        call(base)
