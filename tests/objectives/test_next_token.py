"""Parts of the loss, and the numbers of samples with which a model draws: the same for every split of a batch."""

import math
from dataclasses import replace

import pytest
import torch
from helpers.initialize import initialize
from helpers.steps import NEXT_TOKEN, one_step, run_step

from toolkit.data.loader import train_batches, val_batches
from toolkit.data.order import ShuffledOrder
from toolkit.errors import GuardError, UserError
from toolkit.models.families import get_config
from toolkit.models.gpt import GPT
from toolkit.objectives import NextToken, Part
from toolkit.optim.update import choose_update
from toolkit.training.validate import validate

CONFIG = replace(get_config("pico-llama").with_vocab_size(128), n_layer=1)


class Noisy(GPT):
    """Adds a number made of the keys to the loss of every supervised token, and logs both parts."""

    loss_parts = ("plain", "noise", "never")

    def forward(self, input_ids, labels=None, *, sample_keys=None, **options):
        loss_sum, n_tokens = super().forward(input_ids, labels, **options)
        noise = ((sample_keys + 1)[:, None] * (labels != -100)).sum().float() * 1e-3
        for name, part in (("plain", loss_sum), ("noise", noise)):
            self.loss_part_sums[name] = self.loss_part_sums.get(name, 0) + part.detach()
        return loss_sum + noise, n_tokens


@pytest.fixture
def noisy() -> GPT:
    model = Noisy(CONFIG)
    initialize(model, seed=1)
    return model


def batches_of(ragged, micro_batch_size, start=0):
    return next(
        train_batches(
            ragged.train, ShuffledOrder(len(ragged.train), 3), start_position=start, total_positions=None,
            global_batch_size=8, micro_batch_size=micro_batch_size, rank=0, world_size=1, num_workers=0,
        )
    )  # fmt: skip


def step(fabric, model, batches):
    wrapped, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.0))
    return one_step(fabric, wrapped, optimizer, batches, 0.0)


@pytest.mark.parametrize("start", [0, 40])  # 40 rows: the second epoch has other keys
def test_n2_parts_of_the_loss_are_means_over_the_global_batch(fabric, ragged, noisy, start):
    one, split = (step(fabric, noisy, batches_of(ragged, size, start)) for size in (8, 2))
    assert split.parts == pytest.approx(one.parts, rel=1e-6) and list(one.parts) == ["plain", "noise"]
    assert one.parts["plain"] + one.parts["noise"] == pytest.approx(one.loss, rel=1e-6)
    batch = batches_of(ragged, 8, start)[0]
    n_tokens = (batch.labels != -100).sum(1).tolist()
    noise = sum(n * (start + 1 + i) for i, n in enumerate(n_tokens)) / sum(n_tokens)
    assert one.parts["noise"] == pytest.approx(1e-3 * noise)
    assert step(fabric, GPT(CONFIG), batches_of(ragged, 8)).parts == {}


def test_n6_validation_has_the_parts_and_uses_row_indices(fabric, ragged, noisy):
    rows = ragged.val
    for size in (1, 4):
        batches = list(val_batches(rows, micro_batch_size=size, rank=0, world_size=1, max_rows=None))
        metrics = validate(fabric, NEXT_TOKEN, fabric.setup(noisy), {"": batches}, None)
        counts = [int((rows[i]["labels"] != -100).sum()) for i in range(len(rows))]
        noise = 1e-3 * sum((i + 1) * n for i, n in enumerate(counts)) / sum(counts)
        assert metrics["val_noise"] == pytest.approx(noise, rel=1e-6) and "val_never" not in metrics
        assert metrics["val_loss"] == pytest.approx(metrics["val_plain"] + noise, rel=1e-5)


class Scaled(NextToken):
    """The loss and a part that is only logged, times factors, in this order."""

    def __init__(self, **factors):
        self.factors = factors

    def parts(self, module):
        return (Part("debug", weight=0), Part("loss"))

    def sums(self, model, batch, device):
        loss = super().sums(model, batch, device)["loss"]
        return {name: loss * factor for name, factor in self.factors.items()}


def test_n7_checks_the_parts_with_a_weight_in_any_order(fabric, ragged):
    model = GPT(CONFIG)
    initialize(model, seed=1)
    wrapped, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.0))
    update, batches = choose_update(fabric, wrapped, optimizer, None), batches_of(ragged, 4)
    for factors in ({"debug": math.inf, "loss": 1.0}, {"loss": 1.0, "debug": math.inf}):
        result = run_step(update, batches, Scaled(**factors))
        assert math.isfinite(result.loss) and result.parts == {"debug": math.inf}

    class Detached(Scaled):  # infinite with a finite gradient
        def sums(self, model, batch, device):
            sums = super().sums(model, batch, device)
            return sums | {"loss": sums["loss"] + math.inf}

    for factors in ({"debug": 0.0, "loss": 1.0}, {"loss": 1.0, "debug": 0.0}):
        with pytest.raises(GuardError, match="loss inf on rank 0"):
            run_step(update, batches, Detached(**factors))
    with pytest.raises(UserError, match="objective Scaled: .* must return loss"):
        run_step(update, batches, Scaled(debug=1.0))
