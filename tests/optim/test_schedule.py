import re
from pathlib import Path

import pytest

from toolkit.cli.parser import parse
from toolkit.commands.pretrain import setup
from toolkit.config import PRETRAIN, TrainArgs
from toolkit.errors import UserError
from toolkit.optim.schedule import build_schedule, describe_scaling


def schedule(total_steps=100, **options):
    return build_schedule(TrainArgs(**options), total_steps, PRETRAIN)


@pytest.mark.parametrize("shape", ["cosine", "linear", "constant", "wsd"])
@pytest.mark.parametrize("warmup", ["auto", 0, 1, 10, 99])
def test_n5_first_learning_rate_is_above_zero_and_the_peak_is_reached(shape, warmup):
    plan = schedule(lr_schedule=shape, lr_warmup_steps=warmup, learning_rate=1e-3)
    rates = [plan.learning_rate(step) for step in range(100)]
    assert rates[0] > 0
    assert max(rates) == pytest.approx(1e-3)
    if shape != "constant" and warmup != 99:
        assert rates[-1] == pytest.approx(1e-4)  # a tenth of the peak
    warmup = plan.warmup_steps
    assert rates[:warmup] == sorted(rates[:warmup]) and rates[warmup:] == sorted(rates[warmup:], reverse=True)


def test_n5_default_warmup_is_five_percent_and_at_most_2000_steps():
    assert schedule(1000).warmup_steps == 50
    assert schedule(1_000_000).warmup_steps == 2000


def test_n5_warmup_may_last_the_run_and_no_longer():
    rates = [schedule(lr_warmup_steps=100, learning_rate=1.0).learning_rate(step) for step in range(100)]
    assert rates == pytest.approx([(step + 1) / 100 for step in range(100)])
    with pytest.raises(UserError, match="--train.lr_warmup_steps 101: must be at most the 100 steps of the run"):
        schedule(lr_warmup_steps=101)


def test_wsd_is_stable_until_the_last_fifth():
    plan = schedule(lr_schedule="wsd", lr_warmup_steps=10, learning_rate=1.0, min_lr=0.0)
    assert {plan.learning_rate(step) for step in range(10, 81)} == {1.0}
    assert plan.learning_rate(81) < 1.0 and plan.learning_rate(99) == 0.0


def test_lr_scaling_is_relative_to_the_default_batch():
    batch = TrainArgs().global_batch_size * 4
    rates = {
        how: schedule(lr_scaling=how, global_batch_size=batch, learning_rate=1e-3) for how in ("none", "sqrt", "linear")
    }
    assert {how: round(plan.peak * 1e3, 9) for how, plan in rates.items()} == {"none": 1, "sqrt": 2, "linear": 4}
    assert rates["linear"].minimum == pytest.approx(4e-4)


def test_lr_scaling_is_relative_to_the_given_base_batch():
    scaled = schedule(lr_scaling="sqrt", lr_base_batch=8, global_batch_size=32, learning_rate=1e-3, min_lr=2e-4)
    assert (scaled.peak, scaled.minimum) == pytest.approx((2e-3, 4e-4))


@pytest.mark.parametrize("how", ["sqrt", "linear"])
def test_lr_scaling_keeps_the_samples_of_the_warmup(how):
    def warmup(total_steps, batch, **options):
        return schedule(
            total_steps, lr_scaling=how, lr_base_batch=64, global_batch_size=batch, lr_schedule="constant", **options
        ).warmup_steps

    assert [warmup(1000, batch, lr_warmup_steps=80) for batch in (64, 256, 16, 64 * 200)] == [80, 20, 320, 1]
    assert warmup(1000, 256, lr_warmup_steps=0) == 0
    # fractions of the run are samples already; the limit of 2,000 steps and the default without a length are steps
    assert warmup(1000, 256, lr_warmup_fraction=0.1) == 100 and warmup(1000, 256) == 50
    assert warmup(1_000_000, 256) == 500 and warmup(None, 256) == 25


def test_scaled_warmup_as_long_as_the_run_is_an_error():
    with pytest.raises(UserError, match="--train.lr_warmup_steps 30: is 120 at this global batch; must be at most"):
        schedule(100, lr_scaling="sqrt", lr_base_batch=64, global_batch_size=16, lr_warmup_steps=30)


def test_base_batch_without_scaling_is_refused():
    with pytest.raises(UserError, match="--train.lr_base_batch 8: has no effect without --train.lr_scaling"):
        TrainArgs(lr_base_batch=8)
    with pytest.raises(UserError, match="--train.lr_base_batch 0: must be greater than zero"):
        TrainArgs(lr_base_batch=0, lr_scaling="sqrt")


def test_tutorial_shows_the_line_of_its_command():
    page = (Path(__file__).parents[2] / "tutorials" / "distributed.md").read_text()
    (command,) = re.findall(r"^toolkit (pretrain .*--train.lr_base_batch .*)$", page, re.M)
    name, *flags = command.split()
    train = parse(name, setup, ("model_name",), flags)["options"].train
    assert describe_scaling(train, build_schedule(train, train.max_steps, PRETRAIN), PRETRAIN) in " ".join(page.split())
    assert describe_scaling(TrainArgs(), schedule(), PRETRAIN) is None


def test_run_limited_by_time_only_needs_a_constant_learning_rate():
    with pytest.raises(UserError, match="--train.lr_schedule cosine"):
        schedule(None)
    plan = schedule(None, lr_schedule="constant", learning_rate=1.0)
    assert 0 < plan.learning_rate(0) < plan.learning_rate(10**6) == 1.0


def test_min_lr_above_the_peak_is_an_error():
    with pytest.raises(UserError, match="--train.min_lr 1.0"):
        schedule(min_lr=1.0, learning_rate=0.1)


def test_n5_warmup_fraction_of_a_run_of_unknown_length():
    assert schedule(None, lr_schedule="constant", lr_warmup_fraction=0).warmup_steps == 0
    with pytest.raises(UserError, match="--train.lr_warmup_fraction 0.1"):
        schedule(None, lr_schedule="constant", lr_warmup_fraction=0.1)
    assert schedule(1_000_000, lr_warmup_fraction=0.5).warmup_steps == 500_000  # explicit values are not capped
