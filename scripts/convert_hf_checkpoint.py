"""Write lit_model.pth and model_config.yaml into a Hugging Face folder, as LitGPT's script of this name does.

A tokenizer.json is made, too, where SentencePiece's tokenizer.model stands alone.

    python scripts/convert_hf_checkpoint.py --checkpoint_dir checkpoints/org/model

The same as `toolkit convert_from_hf`, which writes a new folder instead; its further options (--dtype) work here too.
The architecture comes from config.json, not from a name.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import shutil
import sys
from pathlib import Path

from toolkit.cli import main as toolkit


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint_dir", type=Path, required=True, help="holds config.json and safetensors")
    arguments, rest = parser.parse_known_args()
    folder = arguments.checkpoint_dir
    if (folder / "lit_model.pth").exists():
        parser.error(f"--checkpoint_dir {folder}: lit_model.pth is there already; move it away first")
    new = folder / ".converted" / folder.resolve().name  # whose name a model without one takes
    shutil.rmtree(new.parent, ignore_errors=True)  # of a run that was killed
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        code = toolkit(["convert_from_hf", str(folder), str(new), *rest])
    if not (new / "model_config.yaml").exists():  # a mistake, or --print_config
        print(said.getvalue(), end="")
        return code
    # In this order: the last makes the folder a model. A tokenizer.json may have been made of a tokenizer.model.
    names = ["tokenizer.json", "lit_model.pth", "model_config.yaml"]
    names = [name for name in names if (new / name).exists() and not (folder / name).exists()]
    for name in names:
        os.replace(new / name, folder / name)
    shutil.rmtree(new.parent)
    print(f"wrote {', '.join(names)} into {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
