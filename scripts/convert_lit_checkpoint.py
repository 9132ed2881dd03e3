"""Write a Hugging Face folder from a checkpoint, LitGPT's or ours, under the name and options that LitGPT's users know.

    python scripts/convert_lit_checkpoint.py --checkpoint_path checkpoints/org/model/lit_model.pth --output_dir DIR

The same as `toolkit convert_to_hf`, whose further options (--dtype, --verify true, ...) work here too. What LitGPT's
own script leaves to its users is done: DIR holds config.json, the tokenizer and safetensors, and from_pretrained loads
it.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from toolkit.cli import main as toolkit


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint_path", type=Path, required=True, help="a lit_model.pth, or its folder")
    parser.add_argument("--output_dir", required=True, help="the new folder")
    arguments, rest = parser.parse_known_args()
    path = arguments.checkpoint_path
    if path.suffix and not path.is_dir() and path.name != "lit_model.pth":
        parser.error(f"--checkpoint_path {path}: must be a lit_model.pth, with its model_config.yaml beside it")
    folder = path.parent if path.name == "lit_model.pth" and not path.is_dir() else path
    return toolkit(["convert_to_hf", str(folder), arguments.output_dir, *rest])


if __name__ == "__main__":
    sys.exit(main())
