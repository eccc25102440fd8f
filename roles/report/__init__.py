"""``mesh report``: one HTML page about a run, from what lies in its directory (facts.py, charts.py, page.py)."""

from pathlib import Path

from mesh.rundir import write_whole
from roles.report.facts import gather
from roles.report.page import page


def write_report(run: Path, out: Path | None = None) -> Path:
    """Write the report of the run directory ``run`` and return where. Raises ValueError, in one line."""
    out = out or run / "report.html"
    write_whole(out, page(gather(run)))
    return out
