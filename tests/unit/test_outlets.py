"""Figures that leave a peer: they arrive as they are, and what takes them may fail."""

import json
import socket
import time
from pathlib import Path
from urllib.request import urlopen

import pytest

from mesh import config
from roles.outlets import Prometheus, Wandb


def settings(**metrics) -> config.Config:
    return config.convert({"model": {"path": "starter:sort"}, "run": {"name": "first"}, "metrics": metrics})


def body(url: str) -> str:
    with urlopen(url, timeout=10) as answer:
        return answer.read().decode()


def test_prometheus_gets_the_last_row_of_each_peer(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        peers = [
            Prometheus("127.0.0.1", port, {"run": "first", "peer": name, "role": "rollout"}, tmp_path)
            for name in ("a@x", "b@x")
        ]
    assert len({peer.url for peer in peers}) == 2
    peers[0].row(1, {"reward": 0.25})
    peers[0].row(2, {"reward": 0.5, "time/step_s": 1.5, "nothing": float("nan")})
    text = body(peers[0].url)
    assert 'mesh_reward{peer="a@x",role="rollout",run="first"} 0.5' in text
    assert 'mesh_time_step_s{peer="a@x",role="rollout",run="first"} 1.5' in text
    assert "mesh_step{" in text
    assert "nothing" not in text
    assert "mesh_" not in body(peers[1].url)
    [found] = json.loads((tmp_path / "prometheus/a@x.json").read_text())
    assert peers[0].url == f"http://{found['targets'][0]}/metrics"
    for peer in peers:
        peer.close()
    assert not list((tmp_path / "prometheus").iterdir())
    with pytest.raises(OSError, match="refused"):
        body(peers[0].url)


def test_an_address_of_another_machine_is_refused_by_name(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    with pytest.raises(OSError, match=r"metrics.prometheus_port = 9400 .* 192\.0\.2\.77"):
        Prometheus("192.0.2.77", 9400, {"peer": "a"}, tmp_path)


def test_rows_reach_a_run_of_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    said: list[str] = []
    outlet = Wandb(settings(wandb="sorting"), tmp_path, "trainer@x", said.append)
    for step in range(3):
        outlet.row(step, {"reward": step / 10})
    outlet.close()
    assert said == []
    [file] = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    assert b"sorting" in file.read_bytes()
    assert b"reward" in file.read_bytes()


def test_without_wandb_or_its_server_nobody_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    said: list[str] = []
    outlet = Wandb(settings(wandb="sorting"), tmp_path, "trainer@x", said.append)
    began = time.monotonic()
    for step in range(5000):
        outlet.row(step, {"reward": 0.0})
    outlet.close()
    assert time.monotonic() - began < 30.0
    assert said == ["metrics.wandb = sorting: wandb is not installed: pip install wandb; training goes on without it"]
    assert outlet.lost >= 4000
