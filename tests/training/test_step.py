import copy
import math

import pytest
import torch
import torch.nn.functional as F

from toolkit.data.loader import train_batches, val_batches
from toolkit.errors import GuardError
from toolkit.training.step import train_step
from toolkit.training.validate import validate


def gradients(fabric, model, rows, micro_batch_size, max_norm=None):
    """The gradient that the optimizer sees in the first step, of a global batch of 8."""
    model, seen = copy.deepcopy(model), {}
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer.register_step_pre_hook(
        lambda *_: seen.update({n: p.grad.detach().clone() for n, p in model.named_parameters()})
    )
    wrapped, optimizer = fabric.setup(model, optimizer)
    batches = next(
        train_batches(
            rows, seed=3, start_position=0, total_positions=None, global_batch_size=8,
            micro_batch_size=micro_batch_size, rank=0, world_size=1, num_workers=0,
        )
    )  # fmt: skip
    n_tokens = sum(batch.n_tokens for batch in batches)
    result = train_step(
        fabric, wrapped, optimizer, batches, n_tokens=n_tokens, learning_rate=1.0, max_norm=max_norm
    )  # fmt: skip
    return seen, result, batches, n_tokens


@pytest.mark.parametrize("micro_batch_size", [1, 2, 4, 8])
def test_n2_the_gradient_is_that_of_the_global_token_mean(fabric, pico, ragged, micro_batch_size):
    mine, result, batches, n_tokens = gradients(fabric, pico, ragged.train, micro_batch_size)
    assert len({batch.n_tokens for batch in batches}) > 1 or len(batches) == 1  # ragged, or the test shows nothing
    reference = copy.deepcopy(pico)
    total = sum(
        F.cross_entropy(reference(b.input_ids).flatten(0, 1).float(), b.labels.flatten(), reduction="sum")
        for b in batches
    )
    (total / n_tokens).backward()
    assert result.loss == pytest.approx(total.item() / n_tokens, rel=1e-6)
    for name, parameter in reference.named_parameters():
        difference = (mine[name] - parameter.grad).norm() / parameter.grad.norm().clamp_min(1e-12)
        assert difference < 1e-5, name


def test_clipping_limits_the_norm_and_reports_the_one_before(fabric, pico, ragged):
    free, result, *_ = gradients(fabric, pico, ragged.train, 4)
    norm = math.sqrt(sum(float(g.square().sum()) for g in free.values()))
    assert result.grad_norm == pytest.approx(norm, rel=1e-3)
    clipped, result, *_ = gradients(fabric, pico, ragged.train, 4, max_norm=norm / 10)
    assert result.grad_norm == pytest.approx(norm, rel=1e-3)
    assert math.sqrt(sum(float(g.square().sum()) for g in clipped.values())) == pytest.approx(norm / 10, rel=1e-2)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_n7_a_non_finite_loss_never_reaches_the_weights(fabric, pico, ragged, value):
    with torch.no_grad():
        pico.transformer.h[0].mlp.proj.weight[0, 0] = value
    before = {n: p.detach().clone() for n, p in pico.named_parameters()}
    model, optimizer = fabric.setup(pico, torch.optim.AdamW(pico.parameters()))
    batches = next(
        train_batches(
            ragged.train, seed=3, start_position=0, total_positions=None, global_batch_size=4, micro_batch_size=2,
            rank=0, world_size=1, num_workers=0,
        )
    )  # fmt: skip
    with pytest.raises(GuardError, match="rank 0, its samples") as error:
        train_step(fabric, model, optimizer, batches, n_tokens=50, learning_rate=1.0, max_norm=1.0)
    assert str([row for batch in batches for row in batch.ids]) in str(error.value)
    assert all(torch.equal(before[n].nan_to_num(), p.nan_to_num()) for n, p in pico.named_parameters())


def test_n6_validation_is_the_token_weighted_mean(fabric, pico, ragged):
    rows = [ragged.val[i] for i in range(len(ragged.val))]
    losses = [
        F.cross_entropy(pico(r["input_ids"][None]).flatten(0, 1).float(), r["labels"], reduction="sum") for r in rows
    ]
    mean = float(sum(losses).detach()) / sum(int((r["labels"] != -100).sum()) for r in rows)
    for micro_batch_size in (1, 4, 13):
        batches = val_batches(ragged.val, micro_batch_size=micro_batch_size, rank=0, world_size=1, max_rows=None)
        metrics = validate(fabric, fabric.setup(pico), batches, None)
        assert metrics["val_loss"] == pytest.approx(mean, rel=1e-5)
        assert metrics["val_ppl"] == pytest.approx(math.exp(mean), rel=1e-4)


def test_n6_nothing_supervised_is_no_number_rather_than_nan(fabric, pico, ragged):
    batches = list(val_batches(ragged.val, micro_batch_size=1, rank=0, world_size=1, max_rows=1))
    assert batches[0].n_tokens == 0
    assert validate(fabric, fabric.setup(pico), batches, None) == {}
