"""Finetuning from arguments to disk: trained and saved weights, resume, export."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from helpers.cases import slow_except
from helpers.compare_runs import assert_same_weights, losses, require_same
from helpers.small_runs import write_base
from torch.nn import functional as F

from toolkit.checkpoints.adapters import read_adapter
from toolkit.checkpoints.folder import load_model, read_model_config
from toolkit.checkpoints.merge import merge_in_place
from toolkit.checkpoints.store import ADAPTERS
from toolkit.checkpoints.weights import load_state, load_weights
from toolkit.cli import main
from toolkit.cli.parser import parse
from toolkit.commands import finetune_full, finetune_lora
from toolkit.config import EvalArgs, FSDPArgs
from toolkit.data import JSON
from toolkit.data.loader import train_batches
from toolkit.data.order import ShuffledOrder
from toolkit.data.tokenizer import Tokenizer, train_bpe
from toolkit.errors import UserError
from toolkit.models.lora import is_adapter
from toolkit.planning.auto import resolve_auto
from toolkit.planning.resolve import DeviceSpec
from toolkit.planning.training_options import run_args
from toolkit.training import engine, launch
from toolkit.training.engine import run_training

COMPANIONS = {
    "added_tokens.json": "{}",
    "special_tokens_map.json": '{"eos_token": "<|endoftext|>"}',
    "chat_template.jinja": "{% for m in messages %}{{ m['content'] }}{{ eos_token }}{% endfor %}",
    "generation_config.json": json.dumps({"eos_token_id": [0], "bos_token_id": 0, "temperature": 0.7}, indent=2) + "\n",
}


@pytest.fixture(scope="module")
def base(tmp_path_factory, corpus) -> Path:
    """A small random model with a tokenizer and all its companion files."""
    # the size is a multiple of 64, for QLoRA
    return write_base(tmp_path_factory.mktemp("base"), corpus, 400, COMPANIONS, intermediate_size=192)


@pytest.fixture(scope="module")
def questions(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("data") / "questions.jsonl"
    rows = [{"prompt": f"the token {i}", "completion": "reads a line " * (1 + i % 5)} for i in range(40)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def arguments(command, base, questions, out, *flags):
    words = [
        str(base), "--data", "JSON", "--data.json_path", str(questions), "--data.prompt_style", "plain",
        "--out_dir", str(out), "--accelerator", "cpu", "--train.global_batch_size", "8", "--train.micro_batch_size",
        "2", "--train.max_steps", "6", "--train.learning_rate", "1e-2", *flags,
    ]  # fmt: skip
    return run_args(**parse(command.__name__.rpartition(".")[2], words))


@pytest.fixture(scope="module")
def tuned(base, questions, tmp_path_factory) -> Path:
    """A finished run of finetune_lora, to be read only."""
    out = tmp_path_factory.mktemp("tuned") / "run"
    run_training(arguments(finetune_lora, base, questions, out))
    return out


@pytest.mark.parametrize("precision", slow_except(["bf16-true"], ["32-true", "bf16-true", "bf16-mixed"]))
def test_only_adapters_are_trained_and_saved(base, questions, tmp_path, precision, capsys):
    out = tmp_path / "run"
    run_training(arguments(finetune_lora, base, questions, out, "--precision", precision, "--lora_mlp", "true"))
    final = out / "final"
    last_lines = capsys.readouterr().out.partition("finished after")[2]
    assert f"toolkit chat {final}\n" in last_lines and "toolkit generate" not in last_lines  # it has a chat template
    assert not (final / "lit_model.pth").exists() and (final / "tokenizer.json").exists()
    adapters = load_state(final / ADAPTERS)
    assert all(is_adapter(name) and tensor.dtype == torch.float32 for name, tensor in adapters.items())
    assert all(tensor.abs().max() > 0 for name, tensor in adapters.items() if name.endswith(".B"))
    kept = load_state(final / "trainer" / "state.pth")["optimizer"]["adapters"]
    assert kept.keys() == adapters.keys()
    assert read_adapter(final).lora.mlp
    model = load_model(final)
    for name, weight in load_weights(base).items():
        assert torch.equal(model.state_dict()[name], weight), name
    assert losses(out)[-1] < losses(out)[0]


PACKED = ["--data.packing", "best_fit", "--train.max_seq_length", "64", "--train.global_batch_size", "2"]


@pytest.mark.parametrize(
    ("command", "more"),
    [
        (finetune_lora, ["--lora_dropout", "0.2"]),
        pytest.param(finetune_full, [], marks=pytest.mark.slow),
        pytest.param(finetune_full, PACKED, marks=pytest.mark.slow),
    ],
    ids=["lora", "full", "packed"],
)
def test_s2_interrupted_run_is_bit_equal(base, questions, tmp_path, command, more):
    """With dropout, ragged or packed rows and an epoch end: 3 steps, then 6, against 6 uninterrupted."""
    options = ["--train.save_interval", "3", *more]
    schedule = ["--train.max_steps", "3", "--train.lr_schedule", "constant"]
    constant = ["--train.lr_schedule", "constant"]
    run_training(arguments(command, base, questions, tmp_path / "a", *options, *constant))
    run_training(arguments(command, base, questions, tmp_path / "b", *options, *schedule))
    run_training(arguments(command, base, questions, tmp_path / "b", *options, *constant, "--resume", "auto"))
    require_same(tmp_path / "a", tmp_path / "b")


def test_n2_losses_do_not_depend_on_the_micro_batch_size(base, questions, tmp_path):
    for micro in (1, 2, 8):
        flags = ["--train.micro_batch_size", str(micro)]
        run_training(arguments(finetune_full, base, questions, tmp_path / str(micro), *flags))
    one, two, eight = (losses(tmp_path / str(micro)) for micro in (1, 2, 8))
    assert one == pytest.approx(eight, rel=1e-5) and two == pytest.approx(eight, rel=1e-5)


@torch.no_grad()
def test_n9_packed_and_unpacked_samples_have_equal_token_losses(base, questions, tmp_path):
    model, tokenizer = load_model(base), Tokenizer.load(base)
    found = {}
    for packing in ("none", "best_fit"):
        data = JSON(json_path=str(questions), prompt_style="plain", packing=packing, val_split_fraction=0.0)
        rows = data.prepare(tokenizer=tokenizer, max_seq_length=64, report=lambda line: None).train
        found[packing] = []
        for (batch,) in train_batches(
            rows, ShuffledOrder(len(rows), 0), start_position=0, total_positions=len(rows), global_batch_size=4,
            micro_batch_size=4, rank=0, world_size=1, num_workers=0,
        ):  # fmt: skip
            inputs = batch.inputs(torch.device("cpu"))
            labels = inputs.pop("labels")
            each = F.cross_entropy(model(**inputs).flatten(0, 1), labels.flatten(), reduction="none")
            found[packing] += each[labels.flatten() >= 0].tolist()
    assert len(found["none"]) == len(found["best_fit"]) > 100
    assert sorted(found["best_fit"]) == pytest.approx(sorted(found["none"]), rel=1e-4, abs=1e-5)


@pytest.mark.slow
def test_hyperparameters_yaml_repeats_the_run(base, questions, tmp_path):
    run_training(arguments(finetune_lora, base, questions, tmp_path / "a", "--lora_r", "4", "--lora_key", "true"))
    config = tmp_path / "a" / "final" / "hyperparameters.yaml"
    assert yaml.safe_load(config.read_text())["lora_r"] == 4
    words = ["--config", str(config), "--out_dir", str(tmp_path / "b")]
    run_training(run_args(**parse("finetune_lora", words)))
    assert_same_weights(tmp_path / "a" / "final", tmp_path / "b" / "final")


def test_all_tokenizer_files_are_copied_to_every_output(base, questions, tmp_path):
    """Into the checkpoint, the merged one, the adapters for peft and the export (a chat template most of all)."""
    words = arguments(finetune_lora, base, questions, tmp_path / "run", "--data.prompt_style", "null")
    run_training(words)
    final = tmp_path / "run" / "final"
    assert main(["merge_lora", str(final), "--out_dir", str(tmp_path / "merged")]) == 0
    assert main(["convert_to_hf", str(tmp_path / "merged"), str(tmp_path / "hf")]) == 0
    assert main(["convert_to_peft", str(final), str(tmp_path / "peft")]) == 0
    for folder in (final, tmp_path / "merged", tmp_path / "hf", tmp_path / "peft"):
        for name in ("tokenizer.json", *COMPANIONS):
            if not (folder.name == "peft" and name == "generation_config.json"):  # the base's, as with peft itself
                assert (folder / name).read_bytes() == (base / name).read_bytes(), folder / name


def test_a_tokenizer_with_more_tokens_than_the_model_embeds_is_refused(base, questions, tmp_path):
    train_bpe([Path(torch.__file__).read_text()], 500).save(tmp_path / "larger")
    flags = ["--tokenizer_dir", str(tmp_path / "larger")]
    with pytest.raises(UserError, match=r"--tokenizer_dir: has 500 .* token ids up to \d\d\d, .* embeds only 0 to"):
        run_training(arguments(finetune_lora, base, questions, tmp_path / "run", *flags))


def test_a_tokenizer_may_have_a_token_that_is_not_in_the_data(base, questions, tmp_path):
    """As Gemma 3's has one for images."""
    shutil.copytree(base, tmp_path / "base")
    file = tmp_path / "base" / "tokenizer.json"
    content, embedded = json.loads(file.read_text()), read_model_config(base).padded_vocab_size
    first, names = Tokenizer.load(base).vocab_size, {embedded: "<image_soft_token>"}
    content["added_tokens"] += [
        content["added_tokens"][0] | {"id": i, "content": names.get(i, f"<unused{i}>")}
        for i in range(first, embedded + 1)
    ]
    file.write_text(json.dumps(content))
    run_training(arguments(finetune_lora, tmp_path / "base", questions, tmp_path / "run"))
    with_one = tmp_path / "with_one.jsonl"
    row = json.dumps({"prompt": "What is in <image_soft_token>?", "completion": "A cat."}) + "\n"
    with_one.write_text(questions.read_text() + row)
    with pytest.raises(UserError, match=rf"has token ids up to {embedded}, but the model embeds only 0 to"):
        run_training(arguments(finetune_lora, tmp_path / "base", with_one, tmp_path / "other"))


@pytest.mark.parametrize("name", slow_except(["HF_TOKEN"], ["HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY"]))
def test_s4_no_secret_is_an_option_or_is_saved(base, questions, tmp_path, name, monkeypatch, capfd):
    monkeypatch.setenv(name, "hf_verysecret")
    run_training(arguments(finetune_lora, base, questions, tmp_path / "run"))
    written = b"".join(path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file())
    assert b"verysecret" not in written and "verysecret" not in "".join(capfd.readouterr())
    options = "\n".join((tmp_path / "run/final/hyperparameters.yaml").read_text().splitlines()).lower()
    assert not re.search(r"(secret|password|api_key|auth|(hf|access)_token)[a-z_]*:", options)


def test_defaults_are_three_epochs_and_those_of_the_command(base, questions):
    words = [str(base), "--data.json_path", str(questions), "--accelerator", "cpu"]
    args = run_args(**parse("finetune_lora", words))
    resolved = resolve_auto(args, DeviceSpec("cpu", 1, 1))
    assert args.train.learning_rate == 2e-4 and args.train.epochs is None and resolved.args.train.epochs == 3
    assert resolved.optimizer == {"name": "AdamW", "weight_decay": 0.0, "betas": (0.9, 0.999)}
    assert EvalArgs().interval == "auto" and args.eval.max_new_tokens == "auto"
    assert isinstance(args.data, JSON) and args.lora.query and not args.lora.key


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--lora_query", "false", "--lora_value", "false"], "--lora_query false .*selects nothing"),
        (["--fsdp.state_dict_type", "sharded"], "--fsdp.state_dict_type sharded"),
        (["--train.tie_embeddings", "true"], "--train.tie_embeddings true"),
        (["--lora_r", "0"], "--lora_r 0"),
        (["--data.prompt_style", "alpaka"], "--data.prompt_style alpaka.*alpaca"),
        (["--from_peft", "nowhere"], "nowhere"),
        (["--eval.max_new_tokens", "128"], "--eval.max_new_tokens 128: must be less than 128"),
        (["--train.max_seq_length", "256"], "--train.max_seq_length 256: .* takes at most 128 tokens"),
        (
            ["--train.global_batch_size", "64", "--train.micro_batch_size", "8"],
            "has only 38 rows of at most 128 tokens; lower it, hold out less .--data.val_split_fraction., or add data",
        ),
    ],
)
def test_user_errors_are_reported_before_the_first_step(base, questions, tmp_path, flags, message):
    with pytest.raises(UserError, match=message):
        run_training(arguments(finetune_lora, base, questions, tmp_path / "run", *flags))
    assert not (tmp_path / "run" / "logs").exists()


def test_resume_with_changed_adapter_options_is_an_error(base, questions, tuned, tmp_path):
    again = arguments(finetune_lora, base, questions, tuned, "--resume", "true", "--lora_alpha", "32")
    with pytest.raises(UserError, match=r"--lora_alpha 32.*16"):
        run_training(again)
    full = arguments(finetune_full, base, questions, tuned, "--resume", "true")
    with pytest.raises(UserError, match=r"--resume .*: was written by finetune_lora; resume it with that command"):
        run_training(full)
    flags = ["--resume", "true", "--data.prompt_style", "alpaca"]
    with pytest.raises(UserError, match="--data: .* was trained with other data: .* the template"):
        run_training(arguments(finetune_lora, base, questions, tuned, *flags))
    shutil.copytree(base, tmp_path / "other")
    weights = load_weights(base)
    weights["lm_head.weight"][0, 0] += 1
    torch.save(weights, tmp_path / "other" / "lit_model.pth")
    with pytest.raises(UserError, match="--checkpoint_dir: .* was trained with another base"):
        run_training(arguments(finetune_lora, tmp_path / "other", questions, tuned, "--resume", "true"))


def test_loraplus_multiplies_the_learning_rate_of_b(base, questions, tmp_path):
    flags = ["--optimizer.name", "SGD", "--train.max_norm", "0", "--train.max_steps"]
    for ratio in ("1", "16"):
        run = arguments(finetune_lora, base, questions, tmp_path / ratio, "--loraplus_lr_ratio", ratio, *flags, "1")
        run_training(run)
    one, more = (load_state(tmp_path / ratio / "final" / ADAPTERS) for ratio in ("1", "16"))
    for name in one:  # B starts at zero, so that A has no gradient in the first step
        torch.testing.assert_close(more[name], one[name] * (16 if name.endswith(".B") else 1))
    assert any(tensor.any() for name, tensor in one.items() if name.endswith(".B"))
    resumed = arguments(finetune_lora, base, questions, tmp_path / "16", *flags, "2", "--resume", "true")
    with pytest.raises(UserError, match=r"--loraplus_lr_ratio: .*was trained with --loraplus_lr_ratio 16"):
        run_training(resumed)
    assert "\nloraplus_lr_ratio: 16.0\n" in (tmp_path / "16" / "final" / "hyperparameters.yaml").read_text()
    with pytest.raises(UserError, match="--loraplus_lr_ratio 0.0: must be greater than zero"):
        run_training(arguments(finetune_lora, base, questions, tmp_path / "0", "--loraplus_lr_ratio", "0"))


def test_adapter_checkpoint_as_base_is_an_error(questions, tuned, tmp_path):
    with pytest.raises(UserError, match="holds adapters, not a model.*merge_lora"):
        arguments(finetune_lora, tuned / "final", questions, tmp_path / "again")
    assert FSDPArgs().state_dict_type == "full"


@pytest.mark.slow
def test_qlora_trains_adapters_and_merges_into_the_unquantized_base(base, questions, tmp_path):
    pytest.importorskip("bitsandbytes")
    out = tmp_path / "run"
    flags = ["--quantize", "bnb.nf4-dq", "--precision", "bf16-true", "--train.save_interval", "3"]
    run_training(arguments(finetune_lora, base, questions, out, *flags))
    assert losses(out)[-1] < losses(out)[0]
    assert read_adapter(out / "final").quantize == "bnb.nf4-dq"
    uninterrupted = losses(out)
    (tmp_path / "again").mkdir()
    shutil.copytree(out / "step-00000003", tmp_path / "again" / "step-00000003")
    run_training(arguments(finetune_lora, base, questions, tmp_path / "again", *flags, "--resume", "auto"))
    assert losses(tmp_path / "again") == uninterrupted[3:]
    info = merge_in_place(out / "final").info
    assert info.quantize == "bnb.nf4-dq"
    merged, plain = load_weights(out / "final"), load_weights(base)
    untouched = [name for name in plain if "attn.qkv" not in name]
    assert all(torch.equal(merged[name], plain[name]) for name in untouched)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--precision", "16-mixed"], "--quantize bnb.nf4 is not supported with --precision 16-mixed"),
    ],
)
def test_unsupported_options_with_quantize_are_errors(base, questions, tmp_path, flags, message):
    with pytest.raises(UserError, match=message):
        run_training(arguments(finetune_lora, base, questions, tmp_path / "run", "--quantize", "bnb.nf4", *flags))


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError()])
def test_out_of_memory_error_has_the_memory_plan_and_advice(base, questions, tmp_path, monkeypatch, error):
    def full(*args, **options):
        raise error

    monkeypatch.setattr(engine, "launch_step", full)
    with pytest.raises(UserError, match="--train.micro_batch_size 2: out of memory.*GB.*--train.micro_batch_size 1"):
        run_training(arguments(finetune_full, base, questions, tmp_path / "run"))


def test_running_out_of_memory_while_reading_blames_no_batch(base, questions, tmp_path, monkeypatch, capsys):
    def full(*args, **options):
        raise MemoryError

    monkeypatch.setattr(launch, "find_intact", full)
    words = ["finetune_full", base, "--data.json_path", questions, "--out_dir", tmp_path / "run"]
    assert main([str(word) for word in words]) == 1
    assert capsys.readouterr().err.startswith("toolkit finetune_full: out of CPU memory; ")
