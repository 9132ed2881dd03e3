"""Callbacks that extensions add to every run, see :attr:`toolkit.extension.Extension.run_callbacks`."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack

from toolkit.extension import PLACES, load_from_all
from toolkit.training.checkpointer import Checkpointer
from toolkit.training.launch import Launch
from toolkit.training.run import Callback

RunCallback = Callback | Callable[[Checkpointer], Callback]


def make_callbacks(launch: Launch, stack: ExitStack, places: Sequence[str] = PLACES) -> dict[str, list[RunCallback]]:
    """Return the callbacks of extensions by place. Collective.

    Every rank calls each function with the launch and a stack that closes what the run has opened, after the data is
    prepared and before the model is built. It returns a list, or None. An item that needs the model is a function of
    the checkpointer, called before metrics.csv is opened, that returns a callback. Places:

    - before: Before the user's callbacks.
    - metrics: After them, before metrics are written.
    - outputs: After metrics.csv, before loggers, uploads and the console. These functions are also called for a run
      that has finished earlier (``launch.is_finished``), to write a file that is missing.
    - after: After all outputs.
    """
    return {
        place: [item for make in load_from_all("run_callbacks", place) for item in make(launch, stack) or ()]
        for place in places
    }


def with_checkpointer(
    made: Mapping[str, Sequence[RunCallback]], checkpointer: Checkpointer
) -> dict[str, list[Callback]]:
    """Return the callbacks of :func:`make_callbacks` once there is a model."""
    return {
        place: [item if isinstance(item, Callback) else item(checkpointer) for item in items]
        for place, items in made.items()
    }
