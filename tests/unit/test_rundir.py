"""The run directory: shared by its trainers, made anew for each run, written whole."""

import fcntl
import os
import subprocess
import sys

import pytest

from mesh.rundir import RunDir, fresh, write_whole


def test_trainers_share_a_run_and_who_wants_it_alone_is_told_who_has_it(tmp_path):
    run = RunDir.make(tmp_path / "run")
    assert not run.others()
    claims = [run.claim("trainer-1@here"), run.claim("trainer-2@here")]
    assert run.others()
    with pytest.raises(ValueError, match=f"a run that goes on: trainer-2@here, process {os.getpid()} trains there"):
        run.claim("mesh up", alone=True)
    for claim in claims:
        os.close(claim)
    os.close(run.claim("mesh up", alone=True))


def test_the_highest_term_stays_whoever_writes_a_lower_one_later(tmp_path):
    run = RunDir.make(tmp_path / "run")
    assert run.highest_term() == 0
    for counter in (3, 7, 5):
        run.opened_term(counter)
    assert run.highest_term() == 7


def test_a_trainer_that_was_stopped_while_it_writes_its_term_holds_up_nobody(tmp_path):
    run = RunDir.make(tmp_path / "run")
    with open(run.path / "term.lock", "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        run.opened_term(4)
    assert run.highest_term() == 4


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
