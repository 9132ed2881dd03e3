"""Lightning Thunder, a source-to-source compiler, for toolkit: ``--compiler thunder`` and two strategies.

``ThunderFSDPStrategy`` and ``ThunderDDPStrategy`` also work with plain Lightning Fabric. Not tested on CUDA.
"""

from typing import Any

from toolkit.extension import Extension

EXTENSION = Extension(
    compilers={"thunder": "toolkit_thunder.compiler.compile_blocks"},
    strategies={
        "thunder_fsdp": "toolkit_thunder.planned.PlannedFSDP",
        "thunder_ddp": "toolkit_thunder.planned.PlannedDDP",
    },
    option_groups={"thunder": "toolkit_thunder.options.ThunderArgs"},
    check="toolkit_thunder.options.check_run",
)

__all__ = ["EXTENSION", "ThunderDDPStrategy", "ThunderFSDPStrategy"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(name)
    from toolkit_thunder import strategies  # imports torch

    return getattr(strategies, name)
