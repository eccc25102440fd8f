"""What a benchmark found: a table on the screen, and all values in a file."""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from parts.measure import Result
from parts.picture import Panel

BUSY = 0.3  # cores that others used before the benchmark, from which on the numbers are doubtful


def tell(
    what: str, results: list[Result], where: dict[str, Any], began: float, out: Path, panels: Sequence[Panel] = ()
) -> None:
    """``where`` is the environment before the benchmark, ``began`` the time at which it did."""
    report = {
        "what": what,
        "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(began)),
        "seconds": time.time() - began,
        "environment": where,
        "results": [result.as_dict() for result in results],
        "panels": [panel.as_dict() for panel in panels],
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=1) + "\n")
    show(results, report)


def show(results: list[Result], report: dict) -> None:
    console = Console()
    console.width = max(console.width, 150)  # also where it goes to a file
    where = report["environment"]
    versions = ", ".join(f"{name} {version}" for name, version in where["versions"].items())
    console.print(f"{where['processor']}, {where['cores']} cores; {versions}", highlight=False)
    table = Table()
    for name, justify in (("what", "left"), ("mesh", "right"), ("reference", "left"), ("ratio", "right")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    table.add_column("aim")
    for r in results:
        reference = f"{_number(r.reference.median)} {r.unit}, {r.reference_name}" if r.reference else ""
        ratio = f"{_number(r.ratio.median)} ({_number(r.ratio.low)} - {_number(r.ratio.high)})" if r.ratio else ""
        table.add_row(r.name, f"{_number(r.mesh.median)} {r.unit}", reference, ratio, r.aim)
    console.print(table, highlight=False)
    said: list[tuple[str, dict[str, Any]]] = []
    for r in results:
        numbers = {k: v for k, v in r.details.items() if isinstance(v, int | float)}
        if numbers and (r.name, r.details) not in said:
            said.append((r.name, r.details))
            text = ", ".join(f"{name.replace('_', ' ')} {_number(value)}" for name, value in numbers.items())
            console.print(f"[dim]{r.name}: {text}[/]", highlight=False)
    console.print(f"{report['seconds']:.0f} s; medians over rounds, ratios with their middle half in brackets")
    if where["load"] > BUSY:
        console.print(f"[yellow]the machine was busy before this began (load {where['load']:.1f}): measure again[/]")


def _number(value: float) -> str:
    """Three digits that count."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
