"""--train.neftune_alpha, transformers' noise, and --lora_dropout: keyed by sample (N3), in training only."""

import shutil

import pytest
import torch
from helpers.cases import check_each
from helpers.compare_runs import rows_of
from helpers.groups import SERVER, Case, run_group, start_server
from helpers.groups import losses as losses_of
from helpers.initialize import initialize
from helpers.sealing import seal
from helpers.small_runs import write_base, write_rows

from tests.models.test_extension_points import CONFIG
from tests.training.test_finetune import arguments, losses
from toolkit.commands import finetune_full, finetune_lora
from toolkit.data.batch import NO_ROUNDING, collate
from toolkit.models.gpt import GPT
from toolkit.models.keyed_random import derive, keyed_dropout
from toolkit.models.neftune import SampleNoise
from toolkit.objectives.inputs import forward_inputs
from toolkit.training.engine import run_training


@pytest.fixture(scope="module")
def base(tmp_path_factory, corpus):
    return write_base(tmp_path_factory.mktemp("base"), corpus)


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return write_rows(tmp_path_factory.mktemp("rows"))


def test_noise_is_that_of_transformers(monkeypatch):
    """For a row without padding and the same uniform numbers."""
    from transformers.integrations.neftune import neftune_post_forward_hook

    model = GPT(CONFIG, seed=3)
    initialize(model, seed=1)
    model.execute_with(neftune_alpha=5.0)
    embedding = model.transformer.wte
    row = {"input_ids": torch.randint(60, (16,)), "labels": torch.randint(60, (16,))}
    inputs = forward_inputs(model.train(), collate([row], [0], [7], 16, NO_ROUNDING), torch.device("cpu"))
    ours, _ = model.embed(**inputs)
    largest = 5 / 32**0.5
    numbers = inputs["noise"].draw(torch.ones(1, 16), 32) / (2 * largest) + 0.5
    assert 0 <= numbers.min() < 0.05 and 0.95 < numbers.max() < 1 and abs(numbers.mean() - 0.5) < 0.05
    embedding.neftune_noise_alpha = 5.0
    embedding.register_forward_hook(neftune_post_forward_hook)
    monkeypatch.setattr(torch.Tensor, "uniform_", lambda tensor, low, high: tensor.copy_(numbers * (high - low) + low))
    torch.testing.assert_close(ours, embedding(inputs["input_ids"]))
    assert "noise" not in forward_inputs(model.eval(), collate([row], [0], [7], 16, NO_ROUNDING), torch.device("cpu"))


def draw_as_list(noise, lengths):
    return noise.draw(lengths, 32).tolist()


def test_noise_of_a_sample_depends_on_neither_the_batch_nor_the_process():
    noise = SampleNoise(5.0, 1, (3, 8))
    lengths = torch.tensor([[70] * 90, [5] * 90])
    both = noise.draw(lengths, 32)
    alone = noise._replace(keys=(8,)).draw(lengths[1:, :80], 32)
    other = noise._replace(keys=(3,)).draw(lengths[1:, :80], 32)
    assert torch.equal(both[1:, :80], alone) and not torch.equal(other, alone)
    assert both[0].abs().max() < 5 / (70 * 32) ** 0.5 < both[1].abs().max() < 5 / (5 * 32) ** 0.5
    assert not torch.equal(noise._replace(seed=2).draw(lengths, 32), both)
    noise._replace(keys=(-1, -1)).draw(0 * lengths, 32)  # filler rows
    start_server()
    with SERVER.Pool(1) as pool:
        assert pool.apply(draw_as_list, (noise, lengths[:, :2])) == draw_as_list(noise, lengths[:, :2])


def test_dropout_is_independent_of_the_batch_and_between_tokens_channels_and_layers():
    bits = SampleNoise(0.0, 1, (3, 8)).dropout_bits(500, torch.device("cpu"))
    x = torch.rand(2, 500, 64) + 1
    dropped = keyed_dropout(x, bits, 2, 0.2)
    alone = SampleNoise(0.0, 1, (8,)).dropout_bits(80, torch.device("cpu"))
    assert torch.equal(dropped[1:, :80], keyed_dropout(x[1:, :80], alone, 2, 0.2))
    torch.testing.assert_close(dropped, torch.where(dropped == 0, 0, x / 0.8))
    masks = (keyed_dropout(x, other, layer, 0.2) == 0 for other in (bits, derive(bits, 1)) for layer in (0, 1))
    rows = torch.cat([(mask.float() - 0.2).view(-1, 64) for mask in masks], 1) / 0.16**0.5  # (1000, 4 x 64)
    # the singular values of independent numbers: Marchenko and Pastur, 1967
    largest, smallest = (torch.linalg.svdvals(rows)[i] for i in (0, -1))
    assert largest < 1.05 * (1000**0.5 + 256**0.5) and smallest > 0.95 * (1000**0.5 - 256**0.5)
    assert abs(rows.mean()) < 4 / rows.numel() ** 0.5


@pytest.mark.parametrize(
    "command, noise", [(finetune_full, ["--train.neftune_alpha", "5"]), (finetune_lora, ["--lora_dropout", "0.3"])]
)
def test_n3_s2_runs_are_the_same_for_any_split_and_after_a_resume(base, rows, tmp_path, command, noise, capsys):
    def run(out, *flags):
        words = [
            *noise,
            "--train.save_interval",
            "3",
            "--eval.initial_validation",
            "true",
            *flags,
        ]
        run_training(arguments(command, base, rows, tmp_path / out, *words))
        return [float(loss) for loss in losses(tmp_path / out) if loss]

    two, four = run("two"), run("four", "--train.micro_batch_size", "4")
    assert four == pytest.approx(two, rel=1e-5)
    for out in ("resumed", "older"):
        shutil.copytree(tmp_path / "two", tmp_path / out)
        shutil.rmtree(tmp_path / out / "final")
    assert run("resumed", "--resume", "auto") == two
    assert "other random numbers" not in capsys.readouterr().out
    meta = tmp_path / "older" / "step-00000003" / "trainer" / "meta.json"
    meta.write_text(meta.read_text().replace("keyed_dropout", "nothing"))
    seal(meta.parents[1])
    assert run("older", "--resume", "auto") == two  # with the numbers of this version
    assert ("--lora_dropout continues with other random numbers" in capsys.readouterr().out) == (
        command is finetune_lora
    )
    words = ["--eval.initial_validation", "true", "--train.max_steps", "2"]
    run_training(arguments(command, base, rows, tmp_path / "plain", *words))
    plain = [float(loss) for loss in losses(tmp_path / "plain") if loss]
    assert abs(plain[1] - two[1]) > 1e-4 * two[1]  # adapters have an effect from the second step on
    assert rows_of(tmp_path / "plain")[0]["val_loss"] == rows_of(tmp_path / "two")[0]["val_loss"]  # none in validation


LAYOUTS = {
    "fsdp": ["--strategy", "fsdp"],
    "ddp": ["--strategy", "ddp"],
    "tensor": ["--tensor_parallel_size", "2"],
    "context": ["--context_parallel_size", "2"],
    "pipeline": ["--pipeline_parallel_size", "2"],
}
DROPOUT = ["--lora_dropout", "0.3", "--lora_head", "true"]
PACKED = ["--data.packing", "best_fit"]


@pytest.mark.slow
def test_n3_layouts(tmp_path, base, rows):
    shared = [
        str(base), "--accelerator", "cpu", "--data", "JSON", "--data.json_path", str(rows), "--data.prompt_style",
        "plain", "--train.global_batch_size", "4", "--train.micro_batch_size", "1", "--train.max_steps", "6",
        "--train.learning_rate", "1e-2", "--train.neftune_alpha", "5", "--train.max_seq_length", "64",
    ]  # fmt: skip
    one = [Case("one", [], command="finetune_full"), Case("one packed", PACKED, command="finetune_full")]
    one.append(Case("one adapters", DROPOUT, command="finetune_lora"))
    run_group(tmp_path, 1, one, shared)
    two = [Case(name, flags, command="finetune_full") for name, flags in LAYOUTS.items()]
    two.append(Case("two packed", [*PACKED, *LAYOUTS["fsdp"]], command="finetune_full"))
    adapted = [name for name in LAYOUTS if name != "tensor"]
    two += [Case(f"adapters {name}", [*DROPOUT, *LAYOUTS[name]], command="finetune_lora") for name in adapted]
    run_group(tmp_path, 2, two, shared)

    def check(name, reference):
        assert losses_of(tmp_path / name) == pytest.approx(losses_of(tmp_path / reference), rel=1e-5)

    pairs = [(name, "one") for name in LAYOUTS] + [("two packed", "one packed")]
    pairs += [(f"adapters {name}", "one adapters") for name in adapted]
    check_each(check, pairs)
