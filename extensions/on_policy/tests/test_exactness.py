"""What is exact: the loss in every split, the decoder's probabilities, and a repeated run."""

import copy
import os
import time

import pytest
import torch
from helpers.compare_runs import assert_same_weights, losses
from helpers.groups import free_port, start_ranks
from helpers.on_policy import GRPO_RUN, answers_of, gradients_of_step
from helpers.processes import Forked, finish
from helpers.small_runs import text_data, write_base
from lightning import Fabric
from toolkit_metric.answerer import Answerer
from toolkit_on_policy.grpo import GRPO
from toolkit_on_policy.rollouts import Rollout
from torch import distributed as dist

from toolkit.checkpoints.folder import load_model
from toolkit.cli import main
from toolkit.inference.sampling import Sampling
from toolkit.models.config import ModelConfig
from toolkit.models.gpt import GPT

VOCABULARY = 90
ANSWERS = 4


def make_model() -> GPT:
    torch.manual_seed(0)
    config = ModelConfig(vocab_size=VOCABULARY, padded_vocab_size=128, n_embd=32, n_layer=2, n_head=2, block_size=32)
    model = GPT(config).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model


def make_rollouts() -> tuple[list[list[int]], list[Rollout]]:
    """Return 2 prompts and 4 answers to each; one answer is cut off."""
    generator = torch.Generator().manual_seed(1)

    def ids(n: int) -> list[int]:
        return torch.randint(0, VOCABULARY, (n,), generator=generator).tolist()

    rewards = [0.25, 1.0, 0.0, 0.75, 0.0, 2.0, 0.5, 1.0]  # their means are exact in fp32
    rollouts = [
        Rollout(i // ANSWERS, i // ANSWERS, i % ANSWERS, ids(2 + i), [0.0] * (2 + i), i != 5, "", {"r": reward})
        for i, reward in enumerate(rewards)
    ]
    return [ids(3), ids(6)], rollouts


def formula(temperature: float) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the loss and its gradients, computed on complete logits."""
    (prompts, rollouts), model = make_rollouts(), make_model()
    total, loss = 0, torch.zeros((), dtype=torch.float64)
    for rollout in rollouts:
        if not rollout.has_ended:
            continue
        group = [other.rewards["r"] for other in rollouts if other.prompt == rollout.prompt]
        advantage = rollout.rewards["r"] - sum(group) / ANSWERS
        prompt, tokens = prompts[rollout.prompt], rollout.tokens
        logits = model(torch.tensor([prompt + tokens]))[0, :, :VOCABULARY]
        log_p = (logits / temperature).log_softmax(-1)[range(len(prompt) - 1, len(prompt + tokens) - 1), tokens]
        loss = loss - (advantage * (log_p - log_p.detach()).exp()).sum()
        total += len(tokens)
    (loss / total).backward()
    return float(loss.detach() / total), {name: p.grad for name, p in model.named_parameters()}


def gradients(fabric: Fabric, size: int) -> tuple[float, dict[str, torch.Tensor], int]:
    objective = GRPO(ANSWERS, temperature=0.7, rewards_by="r")
    return gradients_of_step(objective, fabric, fabric.setup(make_model()), *make_rollouts(), size)


def rank_main(rank: int, port: int, folder) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_RANK": str(rank)}
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    loss, by_name, _ = gradients(fabric, 2)
    torch.save((loss, by_name), folder / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
    time.sleep(0.2)  # otherwise gloo's threads may free tensors during interpreter exit


def test_n2_loss_and_gradients_equal_the_formula_in_every_split_and_on_two_ranks(tmp_path, fabric):
    """2 x 4 answers in fp64: 8 in a micro-batch, 4, 2 and 1, and a prompt on each of 2 ranks."""
    start_ranks(rank_main, (free_port(), tmp_path), 2)
    expected_loss, expected = formula(0.7)
    results = [gradients(fabric, size)[:2] for size in (8, 4, 2, 1)]
    results += [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    for loss, by_name in results:
        assert loss == pytest.approx(expected_loss, rel=1e-6)
        for name, gradient in by_name.items():
            assert (gradient - expected[name]).norm() <= 1e-6 * expected[name].norm(), name


@pytest.fixture
def trained(tmp_path, corpus) -> GPT:
    """A model whose probabilities are no longer those of random weights."""
    words = [
        "pretrain", "pico-llama", *text_data(corpus), "--model_config.block_size", "320", "--accelerator", "cpu",
        "--train.max_steps", "50", "--train.max_seq_length", "128", "--train.global_batch_size", "8",
        "--train.micro_batch_size", "8", "--train.learning_rate", "1e-2", "--eval.interval", "0",
        "--eval.final_validation", "false", "--eval.max_new_tokens", "0", "--train.save_interval", "0",
        "--out_dir", str(tmp_path / "base"),
    ]  # fmt: skip
    assert main(words) == 0
    assert losses(tmp_path / "base")[-1] < 2.5
    return load_model(tmp_path / "base" / "final", dtype=torch.float32)


def test_decoder_and_trainer_of_a_trained_model_differ_by_rounding_in_256_tokens(trained, fabric):
    """In fp64 by the softmax, which is fp32, and in fp32 by less than the trainer differs from fp64."""
    generator, n, temperature = torch.Generator().manual_seed(0), 256, 0.7
    prompts = [torch.randint(3, 300, (3 + i,), generator=generator).tolist() for i in range(6)]

    def sample(model: GPT, eos_ids=()) -> list[Rollout]:
        answers = Answerer(model.eval(), fabric.device).sample(
            [prompt for prompt in prompts for _ in range(2)], range(12), eos_ids, max_new_tokens=n,
            sampling=Sampling(temperature=temperature),
        )  # fmt: skip
        return [Rollout(i // 2, i // 2, i % 2, *answer, "", {"r": float(i % 2)}) for i, answer in enumerate(answers)]

    def differences(model: GPT, rollouts: list[Rollout], size: int) -> torch.Tensor:
        """Return how far the trainer's log-probabilities are from those of the rollouts."""
        objective = GRPO(2, n, temperature, rewards_by="r", mask_truncated=False)
        gradients_of_step(objective, fabric, fabric.setup(model), prompts, rollouts, size)
        return torch.cat(objective.differences)

    double = copy.deepcopy(trained).double()
    whole = sample(double)
    ended = sample(double, [whole[0].tokens[n // 2]])
    assert len({len(rollout.tokens) for rollout in ended if rollout.has_ended}) > 3
    assert all(differences(double, answers, 4).max() < 4e-6 for answers in (whole, ended))
    rollouts = sample(trained)
    exact = [rollout._replace(log_probs=log_probs_of(double, prompts, rollout, temperature)) for rollout in rollouts]
    for size in (12, 4):
        found, error = differences(trained, rollouts, size), differences(trained, exact, size)
        assert len(found) == 12 * n and found.median() < 1e-6
        assert found.max() <= max(1e-5, error.max())


@torch.no_grad()
def log_probs_of(model: GPT, prompts: list[list[int]], rollout: Rollout, temperature: float) -> list[float]:
    prompt, tokens = prompts[rollout.prompt], rollout.tokens
    logits = model(torch.tensor([prompt + tokens]))[0, :, : model.config.vocab_size]
    log_p = (logits / temperature).log_softmax(-1)
    return log_p[range(len(prompt) - 1, len(prompt + tokens) - 1), tokens].tolist()


def test_longrope_beyond_its_original_context_is_refused(folder, corpus, refusal):
    """A longer row is scored with the long factors, also its tokens that were sampled with the short ones."""
    (folder / "long").mkdir()
    factors = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "attention_factor": 1.0}
    write_base(folder / "long", corpus, rope_adjustments={**factors, "original_max_seq_len": 48})
    words = GRPO_RUN.replace("base ", "long ", 1).split()
    assert "--train.max_seq_length 64: longrope scores" in refusal("finetune_full", *words, "--out_dir", "out")


@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_repeated_run_has_the_same_answers_and_weights(folder, devices):
    for name in ("one", "other"):
        words = GRPO_RUN.replace("--devices 1", f"--devices {devices}").split()
        process = Forked(["finetune_full", *words, "--out_dir", name], PYTHONPATH=str(folder))
        assert finish(process)[1] == "" and process.returncode == 0
    assert answers_of("one") == answers_of("other") and len(answers_of("one")) == 3
    assert_same_weights(folder / "one" / "final", folder / "other" / "final")
