"""Other tools' YAML files for `--config`, and other trainers' arguments for `toolkit.Trainer`."""

from toolkit.extension import Extension

EXTENSION = Extension(
    dialects={
        "files": "toolkit_foreign.groups.DIALECT",
        "trainers": "toolkit_foreign.trainer_arguments.DIALECT",
    }
)
