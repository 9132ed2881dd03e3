"""`toolkit report`: show what runs have trained, how, how well, and how to repeat them."""

from pathlib import Path
from typing import Literal

from toolkit.errors import one_line, require_option
from toolkit.io.atomic import file_error, write_atomic
from toolkit.io.paths import is_url


def setup(run_dirs: str, format: Literal["html", "md", "json"] = "html", out_path: str | None = None) -> None:
    """Write a report of one or several runs: a page without network access, Markdown for a pull request, or JSON.

    Works on finished, running and killed runs. A finished run has its page as report.html. Several runs are compared
    where they are equal, in time, tokens or steps; runs that differ in their seed only are a group.

    Args:
        run_dirs: The out_dir of one or several runs, as words or separated by commas; also on remote storage.
        format: html writes a file; md prints Markdown, and json the comparison, unless out_path is set.
        out_path: File to write; an existing one must be a report. Default: report.html in the run's folder, or in the
            current folder for several runs and remote ones.
    """
    from toolkit.ui.events import REPORT
    from toolkit_report.compare import render_json
    from toolkit_report.markdown import render_markdown
    from toolkit_report.page import render_page
    from toolkit_report.run import read_runs

    names = [run_dirs] if Path(run_dirs).is_dir() else run_dirs.split(",")
    places = list(dict.fromkeys(name.strip() for name in names if name.strip()))
    require_option(bool(places), "run_dirs", run_dirs, "must be one or several folders of runs")
    runs = read_runs(places)
    renderers = {"html": render_page, "md": render_markdown, "json": render_json}
    content = renderers[format](runs)
    if format != "html" and out_path is None:
        print(content, end="")
        return
    folder = Path() if len(runs) > 1 or is_url(places[0]) else Path(places[0])
    path = folder / REPORT if out_path is None else Path(out_path)
    try:
        if path.is_file():
            with path.open("rb") as file:
                is_report = b"Report: " in file.read(200)  # the title of a page, and of Markdown
            require_option(is_report, "out_path", path, "is a file, and not a report; remove it or give another path")
        write_atomic(path, content.encode())
    except OSError as error:
        raise file_error(path, error) from error
    print(one_line(f"wrote {path}: {len(runs)} run{'s' * (len(runs) > 1)}, {len(content.encode()) / 1e6:.2f} MB"))
