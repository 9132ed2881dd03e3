"""Thunder's strategies under LitGPT's import, ``from extensions.thunder.pretrain import ThunderFSDPStrategy``.

As a script: ``toolkit pretrain --compiler thunder`` with the given arguments.
"""

import sys

from toolkit_thunder import ThunderDDPStrategy, ThunderFSDPStrategy

__all__ = ["ThunderDDPStrategy", "ThunderFSDPStrategy"]

if __name__ == "__main__":
    from toolkit.cli import main

    sys.exit(main(["pretrain", *sys.argv[1:], "--compiler", "thunder"]))
