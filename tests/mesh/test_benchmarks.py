"""Each benchmark runs to its end in its smallest setting and leaves a table, values and a picture. Its figures are not
looked at: timing belongs to the benchmarks themselves."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIMIT_S = 120.0


@pytest.mark.parametrize("name", ["paced", "weights", "trajectories", "membership", "staleness", "sync_vs_async"])
def test_a_benchmark_works(name, tmp_path):
    script = ROOT / "benchmarks" / f"{name}.py"
    done = subprocess.run(
        [sys.executable, str(script), "--quick", "--out", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads((tmp_path / f"{name}.json").read_text())
    assert report["environment"]["versions"]["torch"]
    assert report["results"]
    for result in report["results"]:
        assert result["mesh"]["values"]
        assert result["settings"]
        assert result["ratio"] is None or result["reference_name"]
    assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
