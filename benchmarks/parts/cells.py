"""Many independent trainings, a core each, that may be broken off and gone on with.

Each finished one leaves a JSON line in a file; what lies there already is not run again. The means over seeds come with
their 95% interval.
"""

import concurrent.futures
import json
import math
import multiprocessing as mp
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)
"""The 97.5% quantile of Student's t, by degrees of freedom from 1; two for more than nine."""


def mean_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """The mean, and the 95% interval of it over so few runs (Student's t). One value has no interval: its own."""
    mean, n = statistics.fmean(values), len(values)
    if n == 1:
        return mean, mean, mean
    half = (STUDENT[n - 2] if n - 1 <= len(STUDENT) else 2.0) * statistics.stdev(values) / math.sqrt(n)
    return mean, mean - half, mean + half


class Cells:
    """What was trained, by cell. ``work`` runs in processes of its own, each on one core."""

    def __init__(self, file: Path, work: Callable[[Any], dict[str, Any]], deadline: float = math.inf) -> None:
        self.file, self.work, self.deadline = file, work, deadline
        self.rows: dict[str, dict[str, Any]] = {}
        if file.exists():
            for line in file.read_text().splitlines():
                entry = json.loads(line)
                self.rows[entry["cell"]] = entry["row"]

    def row(self, cell: Any) -> dict[str, Any]:
        return self.rows[key(cell)]

    def run(self, cells: Iterable[Any], what: str) -> None:
        """Train those that are not there yet. Exits when the deadline passes first; what was begun is finished."""
        missing = [cell for cell in dict.fromkeys(cells) if key(cell) not in self.rows]
        if not missing:
            return
        self.file.parent.mkdir(parents=True, exist_ok=True)
        cores = sorted(os.sched_getaffinity(0))
        context = mp.get_context("spawn")
        free = context.Queue()
        for core in cores:
            free.put(core)
        began, done = time.monotonic(), 0
        with (
            concurrent.futures.ProcessPoolExecutor(min(len(cores), len(missing)), context, _pin, (free,)) as pool,
            self.file.open("a") as out,
        ):
            jobs = {pool.submit(self.work, cell): cell for cell in missing}
            try:
                left = None if math.isinf(self.deadline) else max(0.0, self.deadline - began)
                for job in concurrent.futures.as_completed(jobs, timeout=left):
                    row = self.rows[key(jobs[job])] = job.result()
                    out.write(json.dumps({"cell": key(jobs[job]), "row": row}) + "\n")
                    out.flush()
                    done += 1
                    minutes = (time.monotonic() - began) / 60
                    print(f"{what}: {done} of {len(missing)}, {minutes:.1f} minutes", file=sys.stderr, flush=True)
            except TimeoutError:
                pool.shutdown(cancel_futures=True)
                for job, cell in jobs.items():  # those that were running when the time was up
                    if not job.cancelled() and key(cell) not in self.rows:
                        self.rows[key(cell)] = job.result()
                        out.write(json.dumps({"cell": key(cell), "row": job.result()}) + "\n")
                raise SystemExit(
                    f"{len(missing) - done} were left when the time was up; run it again to go on"
                ) from None
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise


def key(cell: Any) -> str:
    return json.dumps(asdict(cell), sort_keys=True)


def _pin(free: Any) -> None:
    os.sched_setaffinity(0, {free.get()})
