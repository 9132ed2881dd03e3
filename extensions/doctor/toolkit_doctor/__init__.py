"""Diagnose a machine, a cluster or a layout: `toolkit doctor` and `toolkit verify_parallel`."""

from toolkit.extension import Command, Extension

EXTENSION = Extension(
    commands={
        "doctor": Command(
            "toolkit_doctor.commands.doctor",
            "print the environment, check communication and gradients",
            example="toolkit doctor --comm --check_grads --devices 2",
            after="plan",
            is_distributed=True,
        ),
        "verify_parallel": Command(
            "toolkit_doctor.commands.verify_parallel",
            "compare a run with a single process",
            positionals=("command",),
            after="doctor",
            wraps_training=True,
            is_distributed=True,
        ),
    }
)
