"""Plan a run before it starts: memory, speed and what "auto" chooses by them; `toolkit plan` and ``--dry_run``."""

from toolkit.extension import Command, Extension

EXTENSION = Extension(
    planner="toolkit_plan.planner",
    commands={
        "plan": Command(
            "toolkit_plan.command",
            "show batch, parameters and memory of a run",
            positionals=("command",),
            after="inspect_data",
            wraps_training=True,
            other_words=("compatibility",),
        )
    },
)
