"""Write the page and the plot of a run at its end."""

from contextlib import ExitStack

from toolkit.errors import one_line
from toolkit.training.launch import Launch
from toolkit.training.run import Callback, Run
from toolkit.ui.events import REPORT


class Report(Callback):
    """Writes loss.png and report.html at the end, on rank 0."""

    def on_exception(self, trainer: Run, error: BaseException) -> None:
        self._write(trainer, f"stopped: {one_line(error) or type(error).__name__}")

    def on_train_end(self, trainer: Run) -> None:
        self._write(trainer, "finished")

    def _write(self, trainer: Run, status: str) -> None:
        try:
            from toolkit_report.page import write_report  # not earlier: only the end of a run needs it

            problem = write_report(trainer.out_dir, status)
        except ImportError as error:  # the sources have changed since the run started
            problem = f"{REPORT} was not written: {one_line(error)}"
        if problem is not None:
            trainer.display.message(f"note: {problem}")


def make_report(launch: Launch, stack: ExitStack) -> list[Report]:
    """Return the callback of a run. Write the page of a finished run that was killed before it wrote it."""
    if launch.world.global_rank > 0:
        return []
    if not launch.is_finished:
        return [Report()]
    from toolkit_report.page import write_report
    from toolkit_report.run import METRICS

    metrics, page = launch.out_dir / METRICS, launch.out_dir / REPORT
    if not page.exists() or (metrics.exists() and page.stat().st_mtime_ns < metrics.stat().st_mtime_ns):
        write_report(launch.out_dir, "finished")
    return []
