"""Start training commands on a cluster: `toolkit launch`, and the status that Kubeflow shows of a run."""

from toolkit.extension import Command, Extension

EXTENSION = Extension(
    commands={
        "launch": Command(
            "toolkit_launch.command",
            "write a file that starts a training command on a cluster",
            positionals=("format",),
            after="report",
            takes_training=True,
        )
    },
    run_callbacks={"after": "toolkit_launch.kubeflow_status.make_callbacks"},
)
