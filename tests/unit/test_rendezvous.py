import json
import os
import threading
import time
from pathlib import Path

import pytest

from mesh import addresses, rendezvous
from mesh.identity import PeerCard
from mesh.rendezvous import MAX_CARDS, STALE_S, Directory, Seeds, parse

RUN = "0123456789abcdef"


def card(n: int, host: str = "here", address: str = "") -> PeerCard:
    address = address or f"tcp://10.0.0.{n}:4242"
    return PeerCard(f"{n:016x}", f"rollout-{n}@{host}", "rollout", host, address, address)


def joined(path: Path, n: int, host: str = "here", address: str = "", run: str = RUN) -> Directory:
    made = parse(path.as_uri())
    assert isinstance(made, Directory)
    made.publish(card(n, host, address), run)
    return made


def settled(directory: Directory) -> None:
    """Wait until what `renew` began has ended."""
    thread = directory._renewed._thread
    assert thread
    thread.join(10)
    assert not thread.is_alive()


@pytest.mark.parametrize(
    ("url", "seeds"),
    [
        ("tcp://host:1", (("host", 1),)),
        ("tcp://10.0.0.1:65535,host-2.net:2", (("10.0.0.1", 65535), ("host-2.net", 2))),
        ("tcp://a:1, tcp://b:2", (("a", 1), ("b", 2))),
        ("tcp://[::1]:4242,[fe80::1%eth0]:1", (("::1", 4242), ("fe80::1%eth0", 1))),
        ("tcp://n[1-2,7],gpu4:4242,m:1", (*((n, 4242) for n in ("n1", "n2", "n7", "gpu4")), ("m", 1))),
    ],
)
def test_seeds_are_read(url: str, seeds: tuple[tuple[str, int], ...]) -> None:
    made = parse(url)
    assert isinstance(made, Seeds)
    assert made.seeds == seeds


@pytest.mark.parametrize(
    "url",
    [
        *("", "tcp://", "tcp://host", "tcp://host:0", "tcp://host:65536", "tcp://host:1,", "tcp://fe80::1:29500"),
        *("file://", "file://relative/dir", "http://host:1", "/a/directory", "host:1", "tcp://*:1", "tcp://[::1:1"),
        *("tcp://n[1-3]", "tcp://a:1,n[1-3]", "tcp://n[3-1]:1", "tcp://n[1-:1", "tcp://n[]:1"),
    ],
)
def test_a_url_that_is_none_names_the_forms(url: str) -> None:
    with pytest.raises(ValueError, match=r"write tcp://host:port.*file:///directory"):
        parse(url)


def test_ipv6_without_brackets_is_named_as_such() -> None:
    with pytest.raises(ValueError, match="'::1:29500' is IPv6 without brackets"):
        parse("tcp://::1:29500")


def test_seeds_are_resolved_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"new": ["10.0.0.7", "fd00::7"], "me": ["127.0.1.1"]}

    def resolve(host: str) -> list[str]:
        if host in names:
            return names[host]
        if host[0].isdigit():
            return [host]
        raise ValueError("unknown")

    monkeypatch.setattr(addresses, "resolve", resolve)
    monkeypatch.setattr(addresses, "default", lambda: "10.0.0.9")
    made = parse("tcp://10.0.0.1:1,new:2,late:3,me:4")
    first = ["tcp://10.0.0.1:1", "tcp://10.0.0.7:2", "tcp://[fd00::7]:2", "tcp://late:3"]
    own = ["tcp://127.0.1.1:4", "tcp://10.0.0.9:4"]  # the hosts file's address, and the one that others know
    assert made.addresses() == first + own
    names["late"] = ["10.0.0.8"]
    assert made.addresses() == [*first[:3], "tcp://10.0.0.8:3", *own]


def test_a_resolver_that_hangs_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()

    def resolve(host: str) -> list[str]:
        assert release.wait(30)
        return ["10.0.0.1"]

    monkeypatch.setattr(addresses, "resolve", resolve)
    made = parse("tcp://slow:1")
    assert made.addresses() == []
    release.set()
    deadline = time.monotonic() + 10
    while made.addresses() != ["tcp://10.0.0.1:1"]:
        assert time.monotonic() < deadline


def test_peers_find_each_other_in_a_directory(tmp_path: Path) -> None:
    path = tmp_path / "to be" / "made % 100"
    one, two = joined(path, 1), joined(path, 2)
    assert one.addresses() == ["tcp://10.0.0.2:4242"]
    assert two.addresses() == ["tcp://10.0.0.1:4242"]
    two.withdraw()
    assert one.addresses() == []
    two.withdraw()


def test_a_card_is_readable_json_and_holds_no_secret(tmp_path: Path) -> None:
    joined(tmp_path, 1)
    [path] = tmp_path.iterdir()
    content = json.loads(path.read_text())
    assert set(content) == {"run", "time", "id", "name", "role", "host", "address"}


def test_cards_of_other_runs_are_left_alone(tmp_path: Path) -> None:
    joined(tmp_path, 1, run="f" * 16)
    assert joined(tmp_path, 2).addresses() == []
    assert len(list(tmp_path.iterdir())) == 2


def test_a_stale_card_is_ignored_and_taken_away(tmp_path: Path) -> None:
    killed, here = joined(tmp_path, 1), joined(tmp_path, 2)
    path = tmp_path / f"{1:016x}.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "time": time.time() - STALE_S - 1}))
    assert here.addresses() == []
    assert not path.exists()
    killed.renew()  # it was only stopped
    deadline = time.monotonic() + 10
    while not path.exists():
        assert time.monotonic() < deadline
    assert here.addresses() == ["tcp://10.0.0.1:4242"]


def test_a_withdrawn_card_is_not_renewed(tmp_path: Path) -> None:
    one = joined(tmp_path, 1)
    one.withdraw()
    one.renew()
    settled(one)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"null", b"[1]", b'{"run": 3}', b"\xff\xfe", b"[" * 60_000, b'{"run":"' + b"x" * 100_000 + b'"}'],
)
def test_a_file_that_is_no_card_is_ignored_and_named_once(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    one, two = joined(tmp_path, 1), joined(tmp_path, 2)
    (tmp_path / "rubbish.json").write_bytes(content)
    for _ in range(3):
        assert one.addresses() == ["tcp://10.0.0.2:4242"]
    assert two.addresses() == ["tcp://10.0.0.1:4242"]
    assert len([r for r in caplog.records if "rubbish.json" in r.getMessage()]) == 2  # once for each reader


def test_what_is_not_a_file_is_not_opened(tmp_path: Path) -> None:
    one = joined(tmp_path, 1)
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "directory.json").mkdir()
    (tmp_path / "link.json").symlink_to("/dev/zero")
    assert one.addresses() == []


def test_only_so_many_cards_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)
    one = joined(tmp_path, 0)
    for n in range(1, MAX_CARDS + 20):
        joined(tmp_path, n)
    assert len(one.addresses()) in (MAX_CARDS, MAX_CARDS - 1)


def test_a_loopback_address_from_another_machine_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    one = joined(tmp_path, 1)
    joined(tmp_path, 2, host="there", address="tcp://127.0.0.1:9")
    joined(tmp_path, 3, host="here", address="tcp://127.0.0.1:9")
    assert one.addresses() == ["tcp://127.0.0.1:9"]
    assert "rollout-2@there on there advertises a loopback address" in caplog.text


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"rendezvous directory .*file/run cannot be written"):
        joined(tmp_path / "file" / "run", 1)


def test_a_directory_that_goes_away_is_survived(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "run"
    one = joined(path, 1)
    for file in path.iterdir():
        file.unlink()
    path.rmdir()
    assert one.addresses() == []
    one.renew()
    settled(one)
    assert "rendezvous:" in caplog.text
    one.withdraw()


def test_renewing_is_well_within_staleness() -> None:
    assert rendezvous.RENEW_S * 5 < STALE_S
