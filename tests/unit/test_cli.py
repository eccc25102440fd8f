"""The commands that only look at settings."""

import subprocess
import sys
import tomllib

from mesh.config import annotated, load

SETTINGS = '[model]\npath = "m"\n[task]\noptions = { length = 3 }\n[trainer]\nmax_lag = 1\n'


def test_settings_are_shown_with_where_they_come_from(tmp_path):
    file = tmp_path / "c.toml"
    file.write_text(SETTINGS)
    shown = annotated(file, ["run.steps=7"])
    lines = shown.splitlines()
    assert f"max_lag = 1  # {file}" in lines
    assert "steps = 7  # --set" in lines
    assert "group_size = 8" in lines
    assert tomllib.loads(shown)["task"]["options"] == {"length": 3}
    again = tmp_path / "again.toml"
    again.write_text(shown)
    assert load(again) == load(file, ["run.steps=7"])


def test_settings_are_checked_without_loading_torch(tmp_path):
    file = tmp_path / "c.toml"
    file.write_text(SETTINGS)

    def check(*more):
        code = "import sys; from mesh.cli import main\ntry: main()\nfinally: assert 'torch' not in sys.modules"
        command = [sys.executable, "-c", code, "config", "check", str(file), *more]
        return subprocess.run(command, capture_output=True, text=True, timeout=60)

    assert (good := check()).returncode == 0, good.stderr
    assert good.stdout == f"{file} is good\n"
    bad = check("--set", "trainer.max_lagg=1")
    assert bad.returncode == 1
    assert bad.stderr == f"error: {file}: unknown key trainer.max_lagg; did you mean trainer.max_lag?\n"
