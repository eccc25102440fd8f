"""The run directory: claimed by one trainer, made anew for each run, written whole."""

import os
import subprocess
import sys

import pytest

from mesh.rundir import RunDir, fresh, write_whole


def test_a_run_has_one_trainer_and_the_second_is_told_who(tmp_path):
    run = RunDir.make(tmp_path / "run")
    claim = run.claim("trainer-1@here")
    with pytest.raises(ValueError, match=f"has a trainer already: trainer-1@here, process {os.getpid()}"):
        run.claim("trainer-2@here")
    os.close(claim)
    os.close(run.claim("trainer-2@here"))


def test_a_claim_ends_with_its_process(tmp_path):
    run = RunDir.make(tmp_path / "run")
    code = (
        "import os, sys; from mesh.rundir import RunDir; RunDir.make(sys.argv[1]).claim('t'); os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(run.path)], timeout=30).returncode == -9
    os.close(run.claim("the next"))


def test_each_run_gets_a_directory_of_its_own(tmp_path):
    made = [fresh(tmp_path / "runs", "quickstart") for _ in range(3)]
    assert [path.name for path in made] == ["quickstart", "quickstart-2", "quickstart-3"]


def test_a_directory_that_cannot_be_made_is_one_clear_line(tmp_path):
    (tmp_path / "file").write_text("")
    for make in (lambda: RunDir.make(tmp_path / "file" / "run"), lambda: fresh(tmp_path / "file", "run")):
        with pytest.raises(ValueError, match="--run") as error:
            make()
        assert "\n" not in str(error.value)


def test_a_file_is_written_whole_and_leaves_nothing_beside_it(tmp_path):
    write_whole(tmp_path / "a", "one")
    write_whole(tmp_path / "a", "two")
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("a", "two")]
