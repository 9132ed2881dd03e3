"""STOP and SAVE_NOW: files in a run's folder that stop the run or save a checkpoint."""

import os
import time
import warnings
from pathlib import Path

from toolkit.checkpoints.store import SAVE_NOW, STOP
from toolkit.distributed import ranks

LOOK_EVERY_S = 1.0


class ControlFiles:
    """Looks for the files on rank 0, at most once in :data:`LOOK_EVERY_S`.

    Args:
        folder: The run's local folder; with remote storage the staging folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._looked_at = -LOOK_EVERY_S
        self._names = [STOP, SAVE_NOW]

    def look(self) -> dict[str, int]:
        """Return 1 for each file that exists, by name. Folders, and files that could not be deleted, do not count."""
        found, now = {STOP: 0, SAVE_NOW: 0}, time.monotonic()
        if ranks.global_rank() == 0 and now - self._looked_at >= LOOK_EVERY_S:
            self._looked_at = now
            found |= {name: int(os.path.isfile(self._folder / name)) for name in self._names}
        return found

    def remove(self, name: str) -> None:
        """Delete a file, on rank 0, after its request is carried out."""
        if ranks.global_rank() != 0:
            return
        try:
            (self._folder / name).unlink(missing_ok=True)
        except OSError as error:
            self._names.remove(name)
            warnings.warn(f"{self._folder / name}: cannot be deleted ({error.strerror}); delete it", stacklevel=2)
