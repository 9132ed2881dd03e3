"""Runs of the command line: layouts, resume, adapters, generation, evaluation, export."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from helpers.groups import Case, run_group, run_uninterrupted_and_killed_twice
from safetensors import safe_open

from toolkit.checkpoints.folder import load_model
from toolkit.checkpoints.weights import load_weights
from toolkit.cli import main
from toolkit.ui.loggers import read_metrics

BASE = [
    "free-transformer-tiny", "--model_config.n_layer", "2", "--model_config.n_embd", "32", "--model_config.block_size",
    "32", "--model_config.family_options.latent_bits", "6", "--data", "Letters", "--data.num_rows", "64",
    "--data.val_rows", "12", "--train.max_seq_length", "17", "--train.global_batch_size", "8", "--accelerator", "cpu",
    "--train.learning_rate", "0.01", "--eval.max_new_tokens", "3",
]  # fmt: skip
SMALL = [*BASE, "--train.max_steps", "8", "--train.save_interval", "4", "--eval.interval", "4"]
PARTS = ("loss", "ce", "kl", "elbo", "val_loss", "val_ce", "val_kl", "val_elbo", "val_prior_ce")


def rows_of(out_dir: Path) -> list[dict[str, float]]:
    return read_metrics(out_dir / "logs" / "metrics.csv")


def column(out_dir: Path, name: str) -> torch.Tensor:
    values = torch.tensor([row[name] for row in rows_of(out_dir)])
    return values[~values.isnan()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("free")
    assert main(["pretrain", *SMALL, "--train.micro_batch_size", "4", "--out_dir", str(folder / "one")]) == 0
    return folder


@pytest.mark.slow
def test_n3_two_ranks_with_fsdp_draw_the_same_latents_as_one_process(folder):
    flags = ["--strategy", "fsdp", "--train.micro_batch_size", "2", "--train.activation_checkpointing", "full"]
    run_group(folder, 2, [Case("two", flags)], SMALL)
    for name in PARTS:
        one, two = (column(folder / run, name) for run in ("one", "two"))
        assert len(one) == (2 if name.startswith("val") else 8)
        torch.testing.assert_close(two, one, rtol=2e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")
    weights, others = (load_weights(folder / run / "final") for run in ("one", "two"))
    for name, tensor in weights.items():
        assert (others[name] - tensor).norm() <= 2e-4 * tensor.norm(), name
    last = rows_of(folder / "one")[-1]
    assert last["val_loss"] == last["val_elbo"] and last["kl"] > 0 and last["loss"] < last["elbo"]


def test_s2_a_resumed_run_draws_the_same_latents(folder, tmp_path):
    out = shutil.copytree(folder / "one", tmp_path / "out", ignore=shutil.ignore_patterns("final", "step-*8"))
    flags = ["--train.micro_batch_size", "4", "--resume", "auto", "--out_dir", str(out)]
    assert main(["pretrain", *SMALL, *flags]) == 0
    before, after = (load_weights(path / "final") for path in (folder / "one", out))
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_the_commands_take_it_as_any_model(folder, tmp_path, capsys):
    final = str(folder / "one" / "final")
    words = ["generate", final, "--prompt", "K>", "--max_new_tokens", "8", "--accelerator", "cpu"]
    texts = []
    for seed in ("1", "1", "2"):
        assert main([*words, "--seed", seed]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]
    assert main(["evaluate", final, "--format", "json", "--accelerator", "cpu"]) == 0
    result, last = json.loads(capsys.readouterr().out), rows_of(folder / "one")[-1]
    for name, logged in (("loss", "val_loss"), ("kl", "val_kl"), ("prior_ce", "val_prior_ce")):
        assert result[name] == pytest.approx(last[logged], rel=1e-5)
    lora = ["finetune_lora", final, "--data", "Letters", "--data.num_rows", "16", "--train.global_batch_size", "4"]
    lora += ["--train.max_steps", "2", "--train.max_seq_length", "17", "--out_dir", str(tmp_path / "lora")]
    assert main([*lora, "--accelerator", "cpu", "--eval.max_new_tokens", "0"]) == 0
    assert load_model(tmp_path / "lora" / "final").encoder is not None


def test_export_keeps_or_drops_the_encoder(folder, tmp_path, capsys, refusal):
    final = folder / "one" / "final"
    ids = torch.randint(26, (1, 9), generator=torch.Generator().manual_seed(0))
    native = load_model(final).eval()
    for name, flags in (("kept", []), ("dropped", ["--family_options.encoder", "false"])):
        hf, back = tmp_path / f"{name}-hf", tmp_path / name
        assert main(["convert_to_hf", str(final), str(hf), *flags]) == 0
        with safe_open(hf / "model.safetensors", "pt") as file:
            assert any("encoder" in key for key in file.keys()) == (name == "kept")  # noqa: SIM118
        assert "AutoModelForCausalLM" not in (hf / "README.md").read_text()
        assert main(["convert_from_hf", str(hf), str(back)]) == 0
        read = load_model(back).eval()
        assert torch.equal(read(ids), native(ids))
        assert (read.encoder is None) == (name == "dropped")
    assert torch.equal(load_model(tmp_path / "kept")(ids, mode="training")[1], native(ids, mode="training")[1])
    capsys.readouterr()
    refused = {
        "--verify true": "transformers has no class for",
        "--family_options.latent_bits 7": "which the checkpoint lacks",
    }
    for flags, message in refused.items():
        assert message in refusal("convert_to_hf", final, tmp_path / "x", *flags.split())
    assert not (tmp_path / "x").exists()


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_n3_other_layouts(tmp_path, precision):
    same = ["--precision", precision]
    run_group(tmp_path, 1, [Case("one", same), Case("split", [*same, "--train.micro_batch_size", "2"])], SMALL)
    layouts = [
        Case("ddp", [*same, "--strategy", "ddp", "--train.micro_batch_size", "2"]),
        Case("grad-op", [*same, "--strategy", "fsdp", "--fsdp.sharding_strategy", "SHARD_GRAD_OP",
                         "--fsdp.state_dict_type", "sharded", "--train.micro_batch_size", "2"]),
        Case("compiled", [*same, "--strategy", "fsdp", "--compiler", "torch", "--train.micro_batch_size", "2"]),
    ]  # fmt: skip
    run_group(tmp_path, 2, layouts, SMALL)
    for name in PARTS:
        one, split = column(tmp_path / "one", name), column(tmp_path / "split", name)
        tolerance = 2e-5 if precision == "32-true" else 2 * float(((split - one) / one).abs().max()) + 2e-3
        for case in layouts:
            torch.testing.assert_close(column(tmp_path / case.name, name), one, rtol=tolerance, atol=1e-5)


@pytest.mark.slow
def test_s2_killed_twice_equals_uninterrupted(tmp_path):
    run_uninterrupted_and_killed_twice(["pretrain", *BASE, "--eval.interval", "40"], tmp_path)
    one, other = (load_weights(tmp_path / name / "final") for name in ("uninterrupted", "killed"))
    assert all(torch.equal(one[name], other[name]) for name in one)
