"""Where a peer's figures go besides its files, if the settings say so: an endpoint for Prometheus, Weights & Biases.

Neither may ever hold training up: an endpoint hands out the last row on threads of its own, and rows for W&B wait in a
bounded queue for a thread that speaks to it. What fails is said once, and training goes on without it.
"""

import hashlib
import json
import math
import queue
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import msgspec

from mesh.config import Config
from roles.metrics import MetricsWriter

PORTS = 64  # tried from the one of the settings on: peers of one machine take one each
QUEUED = 1000  # rows that wait for W&B; what comes on top is dropped
CLOSE_S = 10.0


class Outlet(Protocol):
    def row(self, step: int, figures: dict[str, float]) -> None:
        """Never waits."""

    def close(self) -> None: ...


def metrics_of(node: Any, peer: Any) -> MetricsWriter:
    """What a role writes its rows with, outlets of ``[metrics]`` included. One that cannot be had is said once."""
    settings = node.config.metrics

    def warn(text: str) -> None:
        peer.note(text, "warning")

    found: list[Outlet] = []
    if settings.prometheus_port:
        labels = {"run": node.config.run.name, "peer": node.name, "role": node.role}
        try:
            endpoint = Prometheus(settings.prometheus_host, settings.prometheus_port, labels, node.run.path)
            peer.note(f"figures for Prometheus at {endpoint.url}")
            found.append(endpoint)
        except ImportError:
            warn(
                "metrics.prometheus_port is set, but prometheus-client is not installed: pip install prometheus-client"
            )
        except OSError as e:
            warn(f"no figures for Prometheus: {e}; training goes on without it")
    if settings.wandb:
        found.append(Wandb(node.config, node.run.path, node.name, warn))
    tensorboard = settings.tensorboard and node.role == "trainer"
    return MetricsWriter(node.run.path, node.name, tensorboard=tensorboard, outlets=found, on_error=warn)


class Prometheus:
    """``url`` answers with the last row, each figure a gauge ``mesh_...`` with ``labels``. The file
    ``prometheus/<peer>.json`` of the run directory tells a Prometheus with ``file_sd_configs`` where to look.

    Raises OSError when no port is free or the address is none of this machine, ImportError without the client."""

    def __init__(self, host: str, port: int, labels: dict[str, str], directory: Path) -> None:
        from prometheus_client import CollectorRegistry, start_http_server

        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        self._labels = labels
        self._last: dict[str, float] = {}
        for candidate in range(port, min(port + PORTS, 65536)):
            try:
                self._server, self._thread = start_http_server(candidate, addr=host, registry=registry)
                break
            except OSError as e:
                error = e
        else:
            raise OSError(f"metrics.prometheus_port = {port} and those after it on {host}: {error}")
        place = f"[{host}]:{candidate}" if ":" in host else f"{host}:{candidate}"
        self.url = f"http://{place}/metrics"
        self._file = directory / "prometheus" / f"{labels['peer'].replace('/', '_')}.json"
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._file.write_text(json.dumps([{"targets": [place], "labels": labels}]) + "\n")

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import GaugeMetricFamily

        for name, value in self._last.items():
            gauge = GaugeMetricFamily("mesh_" + re.sub(r"\W", "_", name), name, labels=list(self._labels))
            gauge.add_metric(list(self._labels.values()), value)
            yield gauge

    def row(self, step: int, figures: dict[str, float]) -> None:
        self._last = {"step": float(step), **{k: v for k, v in figures.items() if math.isfinite(v)}}

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._file.unlink(missing_ok=True)


class Wandb:
    """Each peer is a run of the group ``run.name``; a peer that comes again under its name goes on with its curve."""

    def __init__(self, config: Config, directory: Path, peer: str, note: Callable[[str], None]) -> None:
        self.lost = 0
        self._note, self._peer, self._directory, self._config = note, peer, directory, config
        self._rows: queue.Queue[tuple[int, dict[str, float]] | None] = queue.Queue(QUEUED)
        self._thread = threading.Thread(target=self._send, name="wandb", daemon=True)
        self._thread.start()

    def row(self, step: int, figures: dict[str, float]) -> None:
        try:
            self._rows.put_nowait((step, figures))
        except queue.Full:
            self.lost += 1

    def close(self) -> None:
        """Wait a little for what is on its way."""
        try:
            self._rows.put_nowait(None)
        except queue.Full:
            pass
        else:
            self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            self._failed(f"its server did not take all within {CLOSE_S:.0f} s")

    def _send(self) -> None:
        try:
            import wandb

            key = hashlib.blake2b(f"{self._directory.resolve()} {self._peer}".encode(), digest_size=8).hexdigest()
            run = wandb.init(
                project=self._config.metrics.wandb,
                group=self._config.run.name,
                name=self._peer,
                id=key,
                resume="allow",
                dir=str(self._directory),
                config=msgspec.to_builtins(self._config),
                settings=wandb.Settings(console="off", silent=True),
            )
            while (row := self._rows.get()) is not None:
                step, figures = row
                run.log({"step": step, **figures})
            run.finish()
        except ImportError:
            self._failed("wandb is not installed: pip install wandb")
        except Exception as e:  # whatever it is, training goes on
            self._failed(" ".join(str(e).split()) or type(e).__name__)

    def _failed(self, why: str) -> None:
        self._note(f"metrics.wandb = {self._config.metrics.wandb}: {why}; training goes on without it")
