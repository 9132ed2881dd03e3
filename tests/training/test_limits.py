import pytest

from toolkit.args import TrainArgs
from toolkit.errors import UserError
from toolkit.training.limits import build_limits
from toolkit.training.state import Progress


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
def test_the_first_limit_ends_the_run(options, total_steps):
    assert limits(**options).total_steps == total_steps


def test_an_extension_counts_from_what_was_done():
    """A run of one epoch has ended with a short batch: 3 steps for 25 rows. The next epoch begins with the 26th."""
    done = Progress(step=3, tokens=200, samples=25)
    two = build_limits(TrainArgs(global_batch_size=10, epochs=2), done, n_rows=25, tokens_per_row=8)
    assert (two.total_steps, two.total_samples) == (6, 50)
    more = build_limits(TrainArgs(global_batch_size=10, max_tokens=281), done, n_rows=25, tokens_per_row=8)
    assert more.total_steps == 5


def test_max_time_is_in_minutes():
    assert limits(max_time=1.5).max_seconds == 90


@pytest.mark.parametrize("name", ["max_steps", "max_tokens", "epochs", "max_time", "learning_rate", "log_interval"])
@pytest.mark.parametrize("value", [0, -1])
def test_zero_and_negative_limits_are_refused(name, value):
    with pytest.raises(UserError, match=f"--train.{name} {value}"):
        TrainArgs(**{name: value})


def test_tokens_of_unequal_rows_are_estimated_for_the_schedule_and_counted_for_the_end():
    args = TrainArgs(global_batch_size=10, max_tokens=160)
    found = build_limits(args, Progress(), n_rows=25, tokens_per_row=8.0, is_ragged=True)
    assert found.total_steps == 2 and found.last_step is None
    assert not found.reached(5, 159) and found.reached(3, 160)
    both = TrainArgs(global_batch_size=10, max_tokens=160, epochs=1)
    found = build_limits(both, Progress(), n_rows=25, tokens_per_row=8.0, is_ragged=True)
    assert found.total_steps == 2 and found.reached(3, 100)
