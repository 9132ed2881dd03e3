"""Write lit_model.pth and model_config.yaml into a Hugging Face folder, like LitGPT's script with the same name.

Also converts SentencePiece's tokenizer.model to a tokenizer.json if there is none.

    python scripts/convert_hf_checkpoint.py --checkpoint_dir checkpoints/org/model

Equivalent to `toolkit convert_from_hf`, which writes a new folder instead; its other options (--dtype) also work here.
The architecture is read from config.json, not from the model name.
"""

import argparse
import contextlib
import io
import os
import shutil
import sys
from pathlib import Path

from toolkit.cli import main as toolkit


def is_equal(new: Path, old: Path) -> bool:
    return old.exists() and new.read_bytes() == old.read_bytes()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint_dir", type=Path, required=True, help="folder with config.json and safetensors")
    arguments, rest = parser.parse_known_args()
    folder = arguments.checkpoint_dir
    if (folder / "lit_model.pth").exists():
        parser.error(f"--checkpoint_dir {folder}: lit_model.pth already exists; move it first")
    new = folder / ".converted" / folder.resolve().name  # the default model name
    shutil.rmtree(new.parent, ignore_errors=True)  # left by a killed run
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        code = toolkit(["convert_from_hf", str(folder), str(new), *rest])
    if not (new / "model_config.yaml").exists():  # an error, or --print_config
        print(output.getvalue(), end="")
        return code
    # In this order: the last file completes the checkpoint. tokenizer.json exists if it was converted.
    names = ["tokenizer.json", "tokenizer_config.json", "tokenizer_ends.json", "lit_model.pth", "model_config.yaml"]
    names = [name for name in names if (new / name).exists() and not is_equal(new / name, folder / name)]
    for name in names:
        os.replace(new / name, folder / name)
    shutil.rmtree(new.parent)
    print(f"wrote {', '.join(names)} into {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
