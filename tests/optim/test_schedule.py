import math
import re
from pathlib import Path

import pytest

from toolkit.cli.parser import parse
from toolkit.config import FINETUNE, PRETRAIN, TrainArgs
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
    # fractions of the run are samples already; the limit of 2,000 steps is in steps
    assert warmup(1000, 256, lr_warmup_fraction=0.1) == 100 and warmup(1000, 256) == 50
    assert warmup(1_000_000, 256) == 500


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
    train = parse(name, flags)["options"].train
    assert describe_scaling(train, build_schedule(train, train.max_steps, PRETRAIN), PRETRAIN) in " ".join(page.split())
    assert describe_scaling(TrainArgs(), schedule(), PRETRAIN) is None


def timed(**options):
    return schedule(None, max_time=5.0, learning_rate=1e-3, **options)


def test_n5_warmup_and_decay_follow_the_share_of_a_time_budget():
    """The same rates as over steps, with the share of the time in place of the share of the steps."""
    for shape in ("cosine", "linear", "constant", "wsd"):
        by_time = timed(lr_schedule=shape, lr_warmup_fraction=0.05)
        by_steps = schedule(100_001, lr_schedule=shape, lr_warmup_fraction=0.05, learning_rate=1e-3)
        for share in (0.01, 0.03, 0.05, 0.3, 0.79, 0.9, 1.0):
            rates = by_time.learning_rate(7, share * 300), by_steps.learning_rate(round(share * 100_000))
            assert rates[0] == pytest.approx(rates[1], rel=1e-3), (shape, share)
        assert by_time.learning_rate(0, 0.0) == pytest.approx(1e-5)  # above zero
        assert by_time.learning_rate(10**6, math.inf) == (1e-3 if shape == "constant" else pytest.approx(1e-4))


def test_n5_warmup_of_a_time_budget():
    plan = timed()
    assert plan.learning_rate(0, 7.5) == pytest.approx(5e-4)  # 2.5 % of the time: half of the warm-up
    assert build_schedule(TrainArgs(max_time=5.0), None, FINETUNE).warmup_fraction == 0.03
    for options in ({"lr_warmup_steps": 0}, {"lr_warmup_fraction": 0}):
        assert timed(**options).learning_rate(0, 0.0) == 1e-3
    in_steps = timed(lr_warmup_steps=50)  # the run may have fewer: it decays all the same
    assert [in_steps.learning_rate(step, 0.0) for step in (0, 24)] == pytest.approx([2e-5, 5e-4])
    assert in_steps.learning_rate(20, 300.0) == pytest.approx(1e-4)


def test_schedule_says_its_warmup():
    assert str(schedule(1000)) == (
        "peak learning rate 0.0004 after a warm-up of 50 steps, cosine to 4e-05 over 1,000 steps"
    )
    assert str(timed()).endswith("after a warm-up of 5 % of the time, cosine to 0.0001 over 5 minutes")
    assert str(timed(lr_schedule="constant", lr_warmup_steps=7)).endswith(
        "a warm-up of 7 steps, constant over 5 minutes"
    )


def test_min_lr_above_the_peak_is_an_error():
    with pytest.raises(UserError, match="--train.min_lr 1.0"):
        schedule(min_lr=1.0, learning_rate=0.1)


def test_n5_explicit_warmup_fraction_is_not_capped():
    assert schedule(1_000_000, lr_warmup_fraction=0.5).warmup_steps == 500_000
