"""Write a Hugging Face folder from a LitGPT or toolkit checkpoint, like LitGPT's script with the same name.

    python scripts/convert_lit_checkpoint.py --checkpoint_path checkpoints/org/model/lit_model.pth --output_dir DIR

Equivalent to `toolkit convert_to_hf`, whose other options (--dtype, --verify true, ...) also work here. Unlike LitGPT's
script, it writes a complete folder with config.json, tokenizer and safetensors that from_pretrained loads.
"""

import argparse
import sys
from pathlib import Path

from toolkit.cli import main as toolkit


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint_path", type=Path, required=True, help="lit_model.pth, or its folder")
    parser.add_argument("--output_dir", required=True, help="output folder")
    arguments, rest = parser.parse_known_args()
    path = arguments.checkpoint_path
    if path.suffix and not path.is_dir() and path.name != "lit_model.pth":
        parser.error(f"--checkpoint_path {path}: must be a lit_model.pth, next to its model_config.yaml")
    folder = path.parent if path.name == "lit_model.pth" and not path.is_dir() else path
    return toolkit(["convert_to_hf", str(folder), arguments.output_dir, *rest])


if __name__ == "__main__":
    sys.exit(main())
