"""--train.neftune_alpha: transformers' noise, keyed by sample (N3), in training only."""

import shutil

import pytest
import torch
from helpers.cases import check_each
from helpers.groups import SERVER, Case, run_group, start_server
from helpers.groups import losses as losses_of
from helpers.initialize import initialize
from helpers.small_runs import write_base, write_rows
from transformers.integrations.neftune import neftune_post_forward_hook

from tests.models.test_extension_points import CONFIG
from tests.training.test_finetune import arguments, losses
from tests.training.test_run import rows_of
from toolkit.commands import finetune_full
from toolkit.data.batch import NO_ROUNDING, collate
from toolkit.models.gpt import GPT
from toolkit.models.neftune import EmbeddingNoise
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
    noise = EmbeddingNoise(5.0, 1, (3, 8))
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


def test_n3_s2_runs_are_the_same_for_any_split_and_after_a_resume(base, rows, tmp_path):
    def run(out, *flags):
        words = [
            "--train.neftune_alpha",
            "5",
            "--train.save_interval",
            "3",
            "--eval.initial_validation",
            "true",
            *flags,
        ]
        run_training(arguments(finetune_full, base, rows, tmp_path / out, *words))
        return [float(loss) for loss in losses(tmp_path / out) if loss]

    two, four = run("two"), run("four", "--train.micro_batch_size", "4")
    assert four == pytest.approx(two, rel=1e-5)
    shutil.copytree(tmp_path / "two", tmp_path / "resumed")
    shutil.rmtree(tmp_path / "resumed" / "final")
    assert run("resumed", "--resume", "auto") == two
    words = ["--eval.initial_validation", "true", "--train.max_steps", "2"]
    run_training(arguments(finetune_full, base, rows, tmp_path / "plain", *words))
    plain = [float(loss) for loss in losses(tmp_path / "plain") if loss]
    assert abs(plain[0] - two[0]) > 1e-4 * two[0]
    assert rows_of(tmp_path / "plain")[0]["val_loss"] == rows_of(tmp_path / "two")[0]["val_loss"]  # none in validation


LAYOUTS = {
    "fsdp": ["--strategy", "fsdp"],
    "ddp": ["--strategy", "ddp"],
    "tensor": ["--tensor_parallel_size", "2"],
    "context": ["--context_parallel_size", "2"],
    "pipeline": ["--pipeline_parallel_size", "2"],
}
PACKED = ["--data.packing", "best_fit"]


@pytest.mark.slow
def test_n3_layouts(tmp_path, base, rows):
    shared = [
        str(base), "--accelerator", "cpu", "--data", "JSON", "--data.json_path", str(rows), "--data.prompt_style",
        "plain", "--train.global_batch_size", "4", "--train.micro_batch_size", "1", "--train.max_steps", "6",
        "--train.learning_rate", "1e-2", "--train.neftune_alpha", "5", "--train.max_seq_length", "64",
    ]  # fmt: skip
    one = [Case("one", [], command="finetune_full"), Case("one packed", PACKED, command="finetune_full")]
    one.append(Case("one adapters", [], command="finetune_lora"))
    run_group(tmp_path, 1, one, shared)
    two = [Case(name, flags, command="finetune_full") for name, flags in LAYOUTS.items()]
    two.append(Case("two packed", [*PACKED, *LAYOUTS["fsdp"]], command="finetune_full"))
    two.append(Case("two adapters", LAYOUTS["fsdp"], command="finetune_lora"))
    run_group(tmp_path, 2, two, shared)

    def check(name, reference):
        assert losses_of(tmp_path / name) == pytest.approx(losses_of(tmp_path / reference), rel=1e-5)

    pairs = [(name, "one") for name in LAYOUTS] + [(f"two {kind}", f"one {kind}") for kind in ("packed", "adapters")]
    check_each(check, pairs)
