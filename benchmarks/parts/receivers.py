"""Rollouts that only take weights over, and a trainer that only publishes them, with what else could carry the bytes.

Publisher and receivers are real peers with their formations, digests, shadow buffers and proofs. The engine is the one
of ``paced_mesh.py``, which computes no tokens: what the take-over costs running sequences is not in these figures, but
in those of ``smoke.py``, with a real engine. Receivers are forked from one process that has imported torch.
"""

import logging
import multiprocessing as mp
import os
import time
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from mesh import config as settings
from mesh import launch
from mesh.node import Node
from mesh.rundir import RunDir
from mesh.version import Ballot, Lineage, Version
from parts.measure import ROOT
from parts.paced_mesh import VOCABULARY, model, paced_engine
from roles.formations import group_builder
from roles.rollout.rollout import probe_floor
from transport.messages import Probe
from transport.weights.buffers import copy_in, load_into, new_flat
from transport.weights.manifest import Manifest
from transport.weights.proof import Prover
from transport.weights.publisher import Publisher
from transport.weights.receiver import Receiver

LIMIT_S = 120.0
BUCKET = 16 << 20  # bytes of one operation, as weights.bucket_mib
LOOK_S = 0.001


def forkserver() -> Any:
    """A context whose processes begin with this module imported."""
    os.environ["OMP_NUM_THREADS"] = "1"
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["parts.receivers"])
    return context


def node(role: Any, name: str, directory: Path) -> Node:
    config = settings.load(ROOT / "configs/quickstart.toml", ["mesh.preset=local"])
    log = logging.getLogger("mesh")
    log.setLevel(logging.CRITICAL)
    run = RunDir.make(directory / "run")
    return Node(role=role, config=config, run=run, name=name, launch=launch.detect({}), log=log)


class Raw:
    """A gloo group of trainer and receivers, outside of the mesh."""

    def __init__(self, directory: Path, rank: int, size: int) -> None:
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname="127.0.0.1")]
        options._timeout = timedelta(seconds=LIMIT_S)
        self._store = dist.FileStore(str(directory / "raw"), size)
        self._group = gloo(self._store, rank, size, options)

    def broadcast(self, flat: torch.Tensor) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        for at in range(0, flat.numel(), BUCKET):
            self._group.broadcast([flat[at : at + BUCKET]], options).wait()


def score(net: Any, tokens: np.ndarray) -> np.ndarray:
    ids = torch.from_numpy(np.asarray(tokens, np.int64))
    logp = net(ids[None]).logits[0, :-1].float().log_softmax(-1)
    return logp.gather(1, ids[1:, None])[:, 0].numpy()


def drop_cache(path: Path) -> None:
    """What was synced leaves the page cache: the next read is a read of the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


# ----------------------------------------------------------------------------------------------------------------------
# A receiver's process
# ----------------------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def receiver(directory: Path, index: int, size: int, nbytes: int, pipe: Connection) -> None:
    """Takes over whatever is published, and does what the pipe says besides."""
    torch.set_num_threads(1)
    torch.manual_seed(2)
    made = node("rollout", f"rollout-{index}", directory)
    net = model(nbytes)
    engine = paced_engine(net, iter(()), directory / f"drawn-{index}.npy")
    peer = made.peer()
    receiving = Receiver(peer, made.config.weights, group_builder(peer), engine_build=engine.build)
    engine.start(receiving, Prover(probe_floor(made.config)))
    made.join(peer)
    raw = Raw(directory, 1 + index, size)
    pipe.send("ready")
    manifest = Manifest.from_state(net.state_dict(), set(), torch.float32)
    flat = new_flat(manifest.nbytes)
    try:
        while (order := pipe.recv()) is not None:
            match order:
                case "stalls":
                    pipe.send(engine.stalls[:])
                    engine.stalls.clear()
                case "raw":
                    raw.broadcast(flat)
                    pipe.send(0.0)
                case "paused", tokens:
                    raw.broadcast(flat)
                    load_into(manifest, flat, net.state_dict(keep_vars=True))
                    score(net, tokens)
                    pipe.send(0.0)
                case "file", path, tokens:
                    began = time.perf_counter()
                    for name, tensor in load_file(path).items():
                        net.state_dict(keep_vars=True)[name].copy_(tensor)
                    score(net, tokens)
                    pipe.send(time.perf_counter() - began)
    finally:
        engine.close()
        receiving.close()
        peer.leave("measured")


# ----------------------------------------------------------------------------------------------------------------------
# The trainer, in the benchmark's process
# ----------------------------------------------------------------------------------------------------------------------


class Trainer:
    """One publisher and ``receivers`` processes; every contest takes the same weights to the same processes."""

    def __init__(self, directory: Path, nbytes: int, receivers: int) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(1)
        context = forkserver()
        self.directory, self.children, self.pipes = directory, [], []
        for i in range(receivers):
            ours, theirs = context.Pipe()
            arguments = (directory, i, 1 + receivers, nbytes, theirs)
            self.children.append(context.Process(target=receiver, args=arguments, daemon=True))
            self.children[-1].start()
            self.pipes.append(ours)
        self.net = model(nbytes)
        made = node("trainer", "trainer", directory)
        self.manifest = Manifest.from_state(self.net.state_dict(), set(), torch.float32)
        self.nbytes = self.manifest.nbytes
        self.peer = made.peer()
        self.publisher = Publisher(self.peer, self.manifest, made.config.weights, group_builder(self.peer))
        self.tokens = np.arange(made.config.weights.probe_tokens, dtype=np.int32) % VOCABULARY
        self.source, self.target = new_flat(self.nbytes), new_flat(self.nbytes)
        self.source.zero_()
        made.join(self.peer)
        self.lineage = Lineage().open(Ballot(1, self.peer.id), 0)
        self.publisher.open_term(self.lineage)
        self.number = 0
        self.raw = Raw(directory, 0, 1 + receivers)
        for pipe in self.pipes:
            self.answer(pipe)
        self._until(lambda: len(self.peer.live("rollout")) == receivers)
        self.ids = {card.name: card.id for card in self.peer.live("rollout")}

    def change(self) -> None:
        with torch.inference_mode():
            for tensor in self.net.state_dict().values():
                tensor.mul_(1 - 1e-4)

    def publish(self, *, kill_after_s: float = 0.0) -> tuple[float, float, float]:
        """The trainer's stall, for snapshot and probe; seconds until all that live have proved it; the longest stall
        of a receiver. ``kill_after_s``: the last receiver, so long after the snapshot began (0: nobody)."""
        self.change()
        version = Version(self.lineage.terms[-1][0], self.number)
        self.number += 1
        began = time.perf_counter()
        with torch.inference_mode():
            probe = Probe(tokens=self.tokens, logprobs=score(self.net, self.tokens))
        taken = self.publisher.publish(version, self.net.state_dict(), probe)
        stall = time.perf_counter() - began
        assert taken, "no buffer was free"
        if kill_after_s:
            self._until(lambda: time.perf_counter() - began > kill_after_s)
            self.children.pop().kill()
            self.pipes.pop().close()
        living = {self.ids[f"rollout-{i}"] for i in range(len(self.pipes))}
        self._until(lambda: living <= set(self.publisher.proved_by(version)))
        proved = time.perf_counter() - began
        for pipe in self.pipes:
            pipe.send("stalls")
        return stall, proved, max(max(self.answer(pipe)) for pipe in self.pipes)

    def memcpy(self) -> float:
        began = time.perf_counter()
        self.target.copy_(self.source)
        return time.perf_counter() - began

    def broadcast(self) -> float:
        """The bytes alone, in buckets, in a group that is there already."""
        self._order("raw")
        began = time.perf_counter()
        self.raw.broadcast(self.target)
        self._answers()
        return time.perf_counter() - began

    def paused(self) -> float:
        """Everybody stops: one buffer is filled, broadcast, taken over, and tried once. Nothing is compared."""
        self.change()
        self._order(("paused", self.tokens))
        began = time.perf_counter()
        copy_in(self.manifest, self.net.state_dict(), self.target)
        self.raw.broadcast(self.target)
        self._answers()
        return time.perf_counter() - began

    def file(self) -> tuple[float, float, float]:
        """A safetensors file on this disk, synced, out of the page cache: the trainer's stall; until all have loaded it
        and tried it once; the longest of them. (All read the disk once, and the first that reads fills the cache.)"""
        self.change()
        path = self.directory / "weights.safetensors"
        began = time.perf_counter()
        save_file(self.net.state_dict(), path)
        with open(path, "rb") as file:
            os.fsync(file.fileno())
        stall = time.perf_counter() - began
        drop_cache(path)
        self._order(("file", str(path), self.tokens))
        longest = max(self._answers())
        return stall, time.perf_counter() - began, longest

    def answer(self, pipe: Connection) -> Any:
        assert pipe.poll(LIMIT_S), f"a receiver did not answer within {LIMIT_S:.0f} s"
        return pipe.recv()

    def close(self) -> None:
        self.publisher.close()
        for pipe in self.pipes:
            pipe.send(None)
        self.peer.leave("measured")
        for child in self.children:
            child.join(5.0)
            child.kill()

    def _order(self, what: Any) -> None:
        for pipe in self.pipes:
            pipe.send(what)

    def _answers(self) -> list[Any]:
        return [self.answer(pipe) for pipe in self.pipes]

    def _until(self, true: Any) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not true():
            self.peer.check()
            assert time.monotonic() < deadline, f"not within {LIMIT_S:.0f} s: {self.publisher.table()}"
            time.sleep(LOOK_S)
