from contextlib import nullcontext
from pathlib import Path

import pytest

from toolkit.config import EvalArgs, TrainArgs
from toolkit.errors import UserError
from toolkit.planning.limits import Intervals, Progress, build_intervals, build_limits, require_within_limits


def limits(**options):
    return build_limits(TrainArgs(global_batch_size=10, **options), Progress(), n_rows=25, tokens_per_row=8)


@pytest.mark.parametrize(
    ("options", "total_steps"),
    [
        ({"max_steps": 7}, 7),
        ({"max_tokens": 81}, 2),  # a step is 80 tokens
        ({"max_tokens": 80}, 1),
        ({"epochs": 1}, 3),  # 25 rows: two full batches and a short one
        ({"epochs": 2}, 5),
        ({"epochs": 0.4}, 1),
        ({"max_steps": 7, "max_tokens": 160, "epochs": 2}, 2),  # the first one ends the run
        ({"max_time": 1.5}, None),
    ],
)
def test_first_limit_ends_the_run(options, total_steps):
    assert limits(**options).total_steps == total_steps


def test_another_limit_ends_a_run_whose_epochs_cannot_be_counted():
    args = TrainArgs(global_batch_size=10, epochs=1, max_steps=7)
    assert build_limits(args, Progress(), n_rows=None, tokens_per_row=8).total_steps == 7


def test_extended_limits_count_from_the_progress():
    """A run of one epoch ended with a short batch: 3 steps for 25 rows. The next epoch begins with row 26."""
    done = Progress(step=3, tokens=200, samples=25)
    two = build_limits(TrainArgs(global_batch_size=10, epochs=2), done, n_rows=25, tokens_per_row=8)
    assert (two.total_steps, two.total_samples) == (6, 50)
    more = build_limits(TrainArgs(global_batch_size=10, max_tokens=281), done, n_rows=25, tokens_per_row=8)
    assert more.total_steps == 5


def test_max_time_is_the_budget_of_the_run_or_a_limit_of_the_launch():
    alone, beside = limits(max_time=1.5), limits(max_time=1.5, max_steps=7)
    assert (alone.total_seconds, alone.max_seconds) == (90, None)
    assert (beside.total_seconds, beside.max_seconds) == (None, 90)
    assert alone.reached(10**6, 10**9, 90.0) and not alone.reached(10**6, 10**9, 89.9)
    assert not beside.reached(6, 480, 1e9)


def test_tokens_of_ragged_rows_are_estimated_for_the_schedule_only():
    args = TrainArgs(global_batch_size=10, max_tokens=160)
    found = build_limits(args, Progress(), n_rows=25, tokens_per_row=8.0, is_ragged=True)
    assert found.total_steps == 2 and found.last_step is None
    assert not found.reached(5, 159) and found.reached(3, 160)
    both = TrainArgs(global_batch_size=10, max_tokens=160, epochs=1)
    found = build_limits(both, Progress(), n_rows=25, tokens_per_row=8.0, is_ragged=True)
    assert found.total_steps == 2 and found.reached(3, 100)


def intervals(evaluation=None, **options):
    args = TrainArgs(global_batch_size=10, **options)
    found = build_limits(args, Progress(), n_rows=25, tokens_per_row=8)
    return build_intervals(args, EvalArgs(**(evaluation or {})), found)


def test_default_intervals_depend_on_the_length_of_the_run():
    for total in (20, 122, 1_000, 1_000_003):
        found = intervals(max_steps=total)
        validations = (total - 1) // found.eval_steps + 1  # with the one at the end
        assert 4 <= (total - 1) // found.save_steps + 1 <= 5, total
        assert validations == 10 or (total == 20 and validations == 4)
        assert found.save_seconds == 600 and found.eval_seconds is None
    few = intervals(max_steps=4)
    assert few.eval_steps > 4 and few.save_steps > 4


def test_intervals_of_a_run_limited_by_time_are_times():
    assert intervals(max_time=1) == Intervals(None, 6, None, 600)  # a short run saves at its end
    assert intervals(max_time=600) == Intervals(None, 3600, None, 600)


def test_explicit_intervals_are_unchanged():
    assert intervals({"interval": 7}, max_steps=1000, max_time=20, save_interval=3) == Intervals(7, None, 3, None)
    assert intervals({"interval": 0}, max_steps=1000, save_interval=0) == Intervals(None, None, None, None)
    assert intervals({"interval": 0}, max_steps=1000, save_every_minutes=2) == Intervals(None, None, 200, 120)
    assert intervals({"interval": 0}, max_steps=1000, save_every_minutes=None) == Intervals(None, None, 200, None)


def test_limit_before_the_checkpoint_is_an_error():
    """A finished run is not past its limit, although its last step exceeded max_tokens."""
    done = Progress(step=12, tokens=960, samples=120)
    cases = [("max_steps", 11, 12), ("max_tokens", 880, 881), ("epochs", 119 / 25, 120 / 25)]
    for name, passed, reached in cases:
        for value, is_passed in ((passed, True), (reached, False)):
            args = TrainArgs(global_batch_size=10, **{name: value})
            found = build_limits(args, done, n_rows=25, tokens_per_row=8)
            with pytest.raises(UserError, match=f"--train.{name} {value}") if is_passed else nullcontext():
                require_within_limits(args, done, found, 8, Path("run/final"))
