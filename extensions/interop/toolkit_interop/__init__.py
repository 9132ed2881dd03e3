"""Formats of other tools: LitGPT's checkpoints, peft's adapters, GGUF files for llama.cpp and Ollama."""

from toolkit.extension import Command, Extension

EXTENSION = Extension(
    commands={
        "convert_to_peft": Command(
            "toolkit_interop.commands.convert_to_peft",
            "export adapters for peft",
            positionals=("checkpoint_dir", "out_dir"),
            after="convert_to_hf",
        ),
        "convert_to_gguf": Command(
            "toolkit_interop.commands.convert_to_gguf",
            "export for llama.cpp, Ollama",
            positionals=("checkpoint_dir", "out_path"),
            after="convert_to_peft",
        ),
        "convert_to_litgpt": Command(
            "toolkit_interop.commands.convert_to_litgpt",
            "export for LitGPT",
            positionals=("checkpoint_dir", "out_dir"),
            after="convert_to_gguf",
        ),
    },
    importers={"peft": "toolkit_interop.peft.import_peft.IMPORTER", "litgpt": "toolkit_interop.litgpt.IMPORTER"},
)
