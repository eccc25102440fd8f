import multiprocessing
import os
import stat
from pathlib import Path

import pytest
import zmq

from mesh import secret


@pytest.fixture(autouse=True)
def _no_secret_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(secret.VARIABLE, raising=False)


def test_the_first_peer_makes_it_and_the_others_read_it(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "new"
    made = secret.load(run)
    assert len(bytes.fromhex(made)) == 32
    assert secret.load(run) == made
    assert stat.S_IMODE((run / "secret").stat().st_mode) == 0o600
    assert [p.name for p in run.iterdir()] == ["secret"]
    assert secret.load(tmp_path / "another") != made


def _load(run: Path, results: "multiprocessing.Queue[str]", start: "multiprocessing.synchronize.Barrier") -> None:
    start.wait(60)
    results.put(secret.load(run))


def test_peers_that_start_at_once_agree(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    results, start = context.Queue(), context.Barrier(4)
    peers = [context.Process(target=_load, args=(tmp_path, results, start)) for _ in range(4)]
    for peer in peers:
        peer.start()
    assert len({results.get(timeout=60) for _ in peers}) == 1
    for peer in peers:
        peer.join(60)


def test_one_that_others_may_read_is_refused(tmp_path: Path) -> None:
    secret.load(tmp_path)
    for mode in (0o644, 0o640, 0o602):
        os.chmod(tmp_path / "secret", mode)
        with pytest.raises(ValueError, match=rf"secret has mode {mode:04o}: others .* chmod 600"):
            secret.load(tmp_path)


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    secret.load(tmp_path / "real")
    (tmp_path / "secret").symlink_to(tmp_path / "real" / "secret")
    with pytest.raises(ValueError, match="cannot be read"):
        secret.load(tmp_path)


def test_the_environment_comes_first_and_no_file_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(secret.VARIABLE, "s" * 32 + "\n")
    assert secret.load(tmp_path) == "s" * 32
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("short", ["", "letmein"])
def test_a_short_one_is_refused_and_not_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, short: str) -> None:
    monkeypatch.setenv(secret.VARIABLE, short)
    with pytest.raises(ValueError, match=f"has {len(short)} characters; .* at least 32") as error:
        secret.load(tmp_path)
    assert not short or short not in str(error.value)


def test_what_is_derived_depends_on_the_secret_alone_and_hides_it() -> None:
    one, other = "a" * 64, "b" * 64
    assert secret.keys(one) == secret.keys(one) != secret.keys(other)
    assert zmq.curve_public(secret.keys(one).private) == secret.keys(one).public
    assert secret.run_id(one, "name") == secret.run_id(one, "name")
    assert len({secret.run_id(s, n) for s in (one, other) for n in ("name", "another")}) == 4
    assert len(bytes.fromhex(secret.run_id(one, "name"))) == 8
    assert repr(secret.keys(one)) == "Keys()"
