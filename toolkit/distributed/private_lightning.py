"""All uses of Lightning's private APIs. Tested with Lightning 2.6.6; none has a public equivalent."""

import atexit
import os
from collections.abc import Callable
from typing import Any, TypeVar

from lightning.fabric.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.fabric.strategies.parallel import ParallelStrategy
from lightning.fabric.strategies.strategy import _BackwardSyncControl as BackwardSyncControl
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.fabric.wrappers import _FabricModule as FabricModule

from toolkit.distributed.launchers import PARENT
from toolkit.distributed.shutdown import children, wait_for_children

__all__ = ["BackwardSyncControl", "FabricModule", "with_launcher"]

T = TypeVar("T", bound=ParallelStrategy)


def with_launcher(strategy: type[T]) -> type[T]:
    """Return a subclass of Fabric's strategy that launches processes without creating the process group."""
    return type(strategy.__name__, (_LauncherMixin, strategy), {})


class _LauncherMixin(ParallelStrategy):
    """Mixin for Fabric's multi-process strategies that launches processes without creating the process group.

    Fabric creates the group at launch, before the data is prepared. A strategy cannot publicly set its launcher.
    """

    def _configure_launcher(self) -> None:
        strategy: Any = self
        self._launcher = _Launcher(strategy.cluster_environment, strategy.num_processes, strategy.num_nodes)

    def setup_environment(self) -> None:
        ParallelStrategy.setup_environment(self)
        strategy: Any = self
        strategy._set_world_ranks()


class _Launcher(_SubprocessScriptLauncher):
    """Fabric's subprocess launcher without its process monitor. It starts the same command once per device.

    Fabric's monitor kills the run as soon as a process exits with an error, even after saving a checkpoint.
    """

    def launch(self, function: Callable, *args: Any, **kwargs: Any) -> Any:
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if not self.cluster_environment.creates_processes_externally:
            os.environ[PARENT] = str(os.getpid())
            self.procs = children
            atexit.register(wait_for_children)  # the command ends after all its processes
            self._call_children_scripts()
        _set_num_threads_if_needed(num_processes=self.num_processes)
        return function(*args, **kwargs)
