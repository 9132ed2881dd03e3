"""Train with the options of a training command."""

from toolkit.errors import mark_reported
from toolkit.planning.start_checks import check_start
from toolkit.planning.training_options import TrainingOptions, run_args


def train(options: TrainingOptions) -> None:
    try:
        args = run_args(options)
        check_start(args)
        from toolkit.training.engine import run_training  # imports torch

        run_training(args)
    except Exception as error:
        if options.shared.dry_run:
            mark_reported(error)  # no other process waits for this one
        raise
