"""`toolkit verify_parallel`: compare a run on its devices with the same run on one process."""

from jsonargparse.typing import PositiveInt

from toolkit.config import TrainingCommand
from toolkit.planning.start_checks import check_start
from toolkit.planning.training_options import TrainingOptions, run_args


def setup(command: TrainingCommand, run: TrainingOptions, steps: PositiveInt = 5) -> None:
    """Train the first steps of your run on its devices and on one process, and compare them.

    Put verify_parallel before the command that you would run:

    toolkit verify_parallel pretrain pico-llama --devices 2 --train.max_steps 1000

    Prints losses, gradient norms and the largest difference of a parameter's gradient side by side. The run passes if
    they agree within 1e-5 in fp32. In 16 bits, the tolerance is twice the difference that another micro-batch size
    makes on one process.

    Nothing is written: --out_dir, --resume, checkpoints, validations and loggers are ignored. The learning rate is
    the peak from the first step.

    The exit code is 0 if all steps agree, and 3 otherwise.

    Args:
        command: The command to verify: pretrain, finetune_full or finetune_lora.
        run: Options of the command.
        steps: Optimizer steps to compare.
    """
    args = run_args(run)
    check_start(args, writes=False)
    from toolkit_doctor.verify import verify_parallel  # imports torch

    verify_parallel(args, steps)
