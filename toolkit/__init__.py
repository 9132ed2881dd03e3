"""toolkit: pretrain language models with Lightning Fabric.

The Python API is ``toolkit.train``, ``finetune``, ``generate`` and ``load``, see :mod:`toolkit.api`. Heavy modules are
imported on first use.
"""

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

from toolkit.deferred import PACKAGES, defer
from toolkit.errors import MissingName
from toolkit.version import __version__ as __version__

if TYPE_CHECKING:
    from toolkit.api import (
        AutoTrainer,
        DDPTrainer,
        FSDPTrainer,
        HFTokenizer,
        TrainResult,
        finetune,
        generate,
        load,
        train,
    )
    from toolkit.distributed.ranks import barrier, rank_print
    from toolkit.distributed.script import (
        all_gather,
        all_reduce,
        broadcast,
        cleanup_distributed,
        get_local_rank,
        get_rank,
        get_world_size,
        is_main_process,
        main_process_only,
        print_rank_0,
        setup_distributed,
    )
    from toolkit.distributed.shards import shard_of
    from toolkit.models.config import ModelConfig
    from toolkit.models.gpt import GPT
    from toolkit.training.memory_stats import memory_stats
    from toolkit.training.run import Callback
    from toolkit.training.trainer import Trainer
    from toolkit.training.trainer_names import DataLoader

__all__ = [
    "AutoTrainer", "Callback", "DDPTrainer", "DataLoader", "FSDPTrainer", "GPT", "HFTokenizer", "ModelConfig",
    "TrainResult", "Trainer", "all_gather", "all_reduce", "barrier", "broadcast", "cleanup_distributed", "finetune",
    "generate", "get_local_rank", "get_rank", "get_world_size", "is_main_process", "load", "main_process_only",
    "memory_stats", "print_rank_0", "rank_print", "setup_distributed", "shard_of", "train",
]  # fmt: skip

defer(PACKAGES)
# GNU OpenMP (in torch's Linux builds) reads this when torch starts its threads. By default, waiting threads spin so
# long that training was 8x slower with another busy process (one of two cores taken). 10,000 spins cost nothing on an
# idle machine; after that, a thread sleeps.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")
# Must be set before torch is loaded. Its warnings about a lost process are C++ stacks; the run reports it in one line.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
# The CUDA allocator reads it at the first tensor. Expandable segments avoid fragmentation by variable-length rows.
if sys.platform == "linux" and "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # the former name of the variable
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")

_HOMES = {
    "Callback": "toolkit.training.run",
    "DataLoader": "toolkit.training.trainer_names",
    "GPT": "toolkit.models.gpt",
    "ModelConfig": "toolkit.models.config",
    "Trainer": "toolkit.training.trainer",
    "barrier": "toolkit.distributed.ranks",
    "memory_stats": "toolkit.training.memory_stats",
    "rank_print": "toolkit.distributed.ranks",
    "shard_of": "toolkit.distributed.shards",
} | dict.fromkeys(
    (
        "all_gather", "all_reduce", "broadcast", "cleanup_distributed", "get_local_rank", "get_rank", "get_world_size",
        "is_main_process", "main_process_only", "print_rank_0", "setup_distributed",
    ),
    "toolkit.distributed.script",
)  # fmt: skip


_ELSEWHERE = {
    "FineWebEduDataset": 'use toolkit.data.HuggingFaceText(repo_id="HuggingFaceFW/fineweb-edu", subset=...)',
    "GPT2": 'use model="gpt2", or toolkit.GPT with a toolkit.ModelConfig',
    "get_backend": "toolkit chooses nccl or gloo; torch.distributed.get_backend() returns it",
    "save_checkpoint": "a run saves automatically; in a callback use trainer.save(name); fsdp={'state_dict_type': ...}",
}
"""Names of other libraries, and what to use here."""


def __getattr__(name: str) -> Any:
    if name in _ELSEWHERE:
        return MissingName(f"toolkit.{name}", _ELSEWHERE[name])
    if name not in __all__:
        raise AttributeError(f"module 'toolkit' has no attribute {name!r}; it offers {', '.join(__all__)}")
    return getattr(importlib.import_module(_HOMES.get(name, "toolkit.api")), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
