"""The training commands: functions that train with the options in :mod:`toolkit.planning.training_options`."""

from collections.abc import Callable
from functools import wraps
from typing import Any

from toolkit.planning.options import check_start
from toolkit.planning.run_args import RunArgs


def training_command(read_options: Callable[..., RunArgs]) -> Callable[..., None]:
    """Return a command that trains with the result of ``read_options`` and has its parameters and help."""

    @wraps(read_options)
    def setup(**options: Any) -> None:
        args = read_options(**options)
        check_start(args)
        from toolkit.training.engine import run_training  # imports torch

        run_training(args)

    return setup
