import pytest

from toolkit.config import TrainArgs
from toolkit.errors import UserError


@pytest.mark.parametrize("name", ["max_steps", "max_tokens", "epochs", "max_time", "learning_rate", "log_interval"])
@pytest.mark.parametrize("value", [0, -1])
def test_zero_and_negative_limits_are_errors(name, value):
    with pytest.raises(UserError, match=f"--train.{name} {value}"):
        TrainArgs(**{name: value})
