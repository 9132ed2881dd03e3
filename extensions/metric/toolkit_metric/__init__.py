"""Evaluation: `toolkit evaluate`, and in a run the metrics of generated answers and lm-eval tasks."""

from toolkit.extension import Command, Extension

_NAMES = ("exact_match", "choice", "number", "regex", "json_valid", "rouge_l", "check")

EXTENSION = Extension(
    metrics={name: f"toolkit_metric.functions.{name}" for name in _NAMES},
    commands={
        "evaluate": Command(
            "toolkit_metric.command",
            "compute loss, perplexity and bits per byte",
            positionals=("checkpoint_dir",),
            after="classify",
            checks_folder=True,
        )
    },
    implements=("eval.metric", "eval.tasks"),
    run_callbacks={"metrics": "toolkit_metric.run.make_callbacks"},
    check="toolkit_metric.run.check",
    check_start="toolkit_metric.run.check_start",
)
