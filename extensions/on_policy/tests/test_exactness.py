"""What is exact: the loss in every split, the decoder's probabilities, and a repeated run."""

import os
import time

import pytest
import torch
from helpers.groups import free_port, start_ranks
from helpers.on_policy import gradients_of_step
from lightning import Fabric
from toolkit_on_policy.grpo import GRPO
from toolkit_on_policy.rollouts import Rollout
from torch import distributed as dist

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
