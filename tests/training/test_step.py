import copy
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from helpers.initialize import initialize
from helpers.ragged import VOCABULARY
from helpers.steps import NEXT_TOKEN, one_step

from toolkit.data.batch import NO_ROUNDING, Padding
from toolkit.data.loader import train_batches, val_batches
from toolkit.data.order import ShuffledOrder
from toolkit.errors import GuardError
from toolkit.models.families import get_config
from toolkit.models.gpt import GPT
from toolkit.training.validate import validate


def gradients(fabric, model, rows, micro_batch_size, max_norm=None, padding=NO_ROUNDING):
    """Return the optimizer's gradients in the first step, of a global batch of 8."""
    model, seen = copy.deepcopy(model), {}
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer.register_step_pre_hook(
        lambda *_: seen.update({n: p.grad.detach().clone() for n, p in model.named_parameters()})
    )
    wrapped, optimizer = fabric.setup(model, optimizer)
    batches = next(
        train_batches(
            rows, ShuffledOrder(len(rows), 3), start_position=0, total_positions=None, global_batch_size=8,
            micro_batch_size=micro_batch_size, rank=0, world_size=1, num_workers=0, padding=padding,
        )
    )  # fmt: skip
    result = one_step(fabric, wrapped, optimizer, batches, 1.0, max_norm=max_norm)
    return seen, result, batches, sum(batch.n_tokens for batch in batches)


@pytest.mark.parametrize("micro_batch_size", [1, 2, 4, 8])
def test_n2_gradient_is_that_of_the_global_token_mean(fabric, pico, ragged, micro_batch_size):
    found, result, batches, n_tokens = gradients(fabric, pico, ragged.train, micro_batch_size)
    assert len({batch.n_tokens for batch in batches}) > 1 or len(batches) == 1  # must be ragged
    reference = copy.deepcopy(pico)
    total = sum(
        F.cross_entropy(reference(b.input_ids).flatten(0, 1).float(), b.labels.flatten(), reduction="sum")
        for b in batches
    )
    (total / n_tokens).backward()
    assert result.loss == pytest.approx(total.item() / n_tokens, rel=1e-6)
    for name, parameter in reference.named_parameters():
        difference = (found[name] - parameter.grad).norm() / parameter.grad.norm().clamp_min(1e-12)
        assert difference < 1e-5, name


def test_clipping_limits_the_norm_and_reports_the_unclipped_norm(fabric, pico, ragged):
    free, result, *_ = gradients(fabric, pico, ragged.train, 4)
    norm = math.sqrt(sum(float(g.square().sum()) for g in free.values()))
    assert result.grad_norm == pytest.approx(norm, rel=1e-3)
    clipped, result, *_ = gradients(fabric, pico, ragged.train, 4, max_norm=norm / 10)
    assert result.grad_norm == pytest.approx(norm, rel=1e-3)
    assert math.sqrt(sum(float(g.square().sum()) for g in clipped.values())) == pytest.approx(norm / 10, rel=1e-2)


class PackedRows:
    """Two documents of different lengths per row."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows) - 1

    def __getitem__(self, i):
        parts = [self.rows[i], self.rows[i + 1]]
        sizes = [len(part["labels"]) for part in parts]
        row = {name: torch.cat([part[name] for part in parts]) for name in ("input_ids", "labels")}
        row["positions"] = torch.cat([torch.arange(size) for size in sizes])
        return row | {"documents": torch.repeat_interleave(torch.arange(2), torch.tensor(sizes))}


EXPERTS = {"mlp_class_name": "LLaMAMoE", "n_expert": 4, "n_expert_per_token": 2, "router_aux_loss_coef": 0.1}
FACTORS = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
LONGROPE = {"rope_adjustments": FACTORS | {"original_max_seq_len": 20, "attention_factor": 1.2}}
WINDOW = {"sliding_window_size": 8, "sliding_window_indices": [1, 0]}
LINEAR = {
    "linear_attention": {"n_key_heads": 2, "n_value_heads": 4, "key_size": 8, "value_size": 16, "conv_size": 4},
    "linear_attention_indices": [1, 0], "attention_gate": True,
}  # fmt: skip
KINDS = {"llama": {}, "experts": EXPERTS, "longrope": LONGROPE, "window": WINDOW, "linear attention": LINEAR}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_n2_padding_changes_neither_loss_nor_gradient_nor_counts(fabric, ragged, kind, packed):
    model = GPT(replace(get_config("pico-llama").with_vocab_size(VOCABULARY), **kind))
    initialize(model, seed=1)
    rows = PackedRows(ragged.train) if packed else ragged.train
    plain, one, batches, n_tokens = gradients(fabric, model, rows, 2)
    padded, other, wider, same_tokens = gradients(fabric, model, rows, 2, padding=Padding(64, 128))
    assert {batch.labels.size(1) for batch in wider} == {64} and batches[0].labels.size(1) < 64
    assert n_tokens == same_tokens and sum(b.n_inputs for b in batches) == sum(b.n_inputs for b in wider)
    assert other.loss == pytest.approx(one.loss, rel=1e-6)
    for name, gradient in plain.items():
        assert (padded[name] - gradient).norm() <= 1e-5 * gradient.norm().clamp_min(1e-6), name


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_n7_nonfinite_loss_never_reaches_the_weights(fabric, pico, ragged, value):
    with torch.no_grad():
        pico.transformer.h[0].mlp.proj.weight[0, 0] = value
    before = {n: p.detach().clone() for n, p in pico.named_parameters()}
    model, optimizer = fabric.setup(pico, torch.optim.AdamW(pico.parameters()))
    batches = next(
        train_batches(
            ragged.train, ShuffledOrder(len(ragged.train), 3), start_position=0, total_positions=None,
            global_batch_size=4, micro_batch_size=2,
            rank=0, world_size=1, num_workers=0,
        )
    )  # fmt: skip
    with pytest.raises(GuardError, match="rank 0, its samples") as error:
        one_step(fabric, model, optimizer, batches, 1.0, max_norm=1.0)
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
        metrics = validate(fabric, NEXT_TOKEN, fabric.setup(pico), {"": batches}, None)
        assert metrics["val_loss"] == pytest.approx(mean, rel=1e-5)
        assert metrics["val_ppl"] == pytest.approx(math.exp(mean), rel=1e-4)


def test_n6_validation_without_supervised_tokens_has_no_metrics(fabric, pico, ragged):
    batches = list(val_batches(ragged.val, micro_batch_size=1, rank=0, world_size=1, max_rows=1))
    assert batches[0].n_tokens == 0
    assert validate(fabric, NEXT_TOKEN, fabric.setup(pico), {"": batches}, None) == {}
