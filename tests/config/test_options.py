import pytest

from toolkit.config import TrainArgs, none_if_auto
from toolkit.errors import UserError


@pytest.mark.parametrize("name", ["max_steps", "max_tokens", "epochs", "max_time", "learning_rate", "log_interval"])
@pytest.mark.parametrize("value", [0, -1])
def test_zero_and_negative_limits_are_errors(name, value):
    with pytest.raises(UserError, match=f"--train.{name} {value}"):
        TrainArgs(**{name: value})


def test_auto_is_none_and_other_values_stay():
    assert [none_if_auto(value) for value in ("auto", 0, 3, None)] == [None, 0, 3, None]
