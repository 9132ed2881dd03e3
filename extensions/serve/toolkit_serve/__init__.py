"""Serve a model with OpenAI's API: `toolkit serve`."""

from toolkit.extension import Command, Extension

EXTENSION = Extension(
    commands={
        "serve": Command(
            "toolkit_serve.command",
            "serve a model with OpenAI's API",
            positionals=("checkpoint_dir",),
            after="chat",
        )
    }
)
