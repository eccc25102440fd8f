"""What a publication costs: the trainer's stall, and the gap that a take-over makes in a rollout's stream of tokens.

One publisher in this process and two rollouts in processes of their own, all of them real peers: convening, gloo,
digests, shadow buffers, proofs. Two phases: first the rollouts' engines have nothing to do, then they generate as much
as they can. The trainer's stall is measured in the first (a machine with fewer cores than busy processes would measure
its scheduler), a rollout's gaps in the second. References are taken in the same process and thread, by turns.
"""

import asyncio
import logging
import multiprocessing as mp
import tempfile
import threading
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from mesh import config as settings
from mesh import launch
from mesh.node import Node
from mesh.rundir import RunDir
from mesh.version import Ballot, Lineage, Version
from parts.measure import ROOT, Result, compare
from roles.formations import group_builder
from roles.rollout.engines.base import Request
from roles.rollout.engines.transformers import TransformersEngine, dummy_model
from roles.rollout.rollout import probe_floor
from roles.starter import resolve
from roles.trainer.policy import Policy
from transport.messages import Probe
from transport.weights.buffers import new_flat
from transport.weights.manifest import Manifest
from transport.weights.proof import Prover
from transport.weights.publisher import Publisher
from transport.weights.receiver import Receiver

LIMIT_S = 120.0
ROLLOUTS = 2
WARM = 3  # until each staging buffer was written once


@dataclass(frozen=True)
class Case:
    """A model, and what the rollouts generate with it: ``rows`` sequences at a time."""

    name: str
    rows: int
    prompt_tokens: int
    new_tokens: int
    shape: LlamaConfig | None = None  # None: the quickstart's model

    def path(self, directory: Path) -> str:
        if self.shape is None:
            return resolve("starter:sort")
        target = directory / "model"
        if not target.exists():
            self.shape.save_pretrained(target)
        return str(target)


LARGER = LlamaConfig(
    vocab_size=8192,
    hidden_size=512,
    intermediate_size=1408,
    num_hidden_layers=8,
    num_attention_heads=8,
    num_key_value_heads=8,
    tie_word_embeddings=True,
)
CASES = (
    Case("quickstart's model", rows=128, prompt_tokens=6, new_tokens=6),
    Case("larger model", rows=8, prompt_tokens=32, new_tokens=64, shape=LARGER),
)


def measure(rounds: int) -> list[Result]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return [result for case in CASES for result in _measure(case, rounds if case.shape is None else rounds // 2)]
    finally:
        torch.set_num_threads(threads)


def _measure(case: Case, rounds: int) -> list[Result]:
    with tempfile.TemporaryDirectory(prefix="mesh-smoke-") as name:
        directory = Path(name)
        path = case.path(directory)
        context = mp.get_context("spawn")
        pipes, children = [], []
        try:
            for i in range(ROLLOUTS):
                ours, theirs = context.Pipe()
                child = context.Process(target=rollout, args=(case, directory, i, theirs), daemon=True)
                child.start()
                pipes.append(ours)
                children.append(child)
            trainer = Trainer(directory, path)
            try:
                idle = trainer.rounds(rounds, 0.0)
                for pipe in pipes:
                    pipe.send("generate")
                    _answer(pipe)
                busy = trainer.rounds(rounds, 0.1)
                for pipe in pipes:
                    pipe.send("stop")
                gaps = [_answer(pipe) for pipe in pipes]
            finally:
                trainer.close()
            for child in children:
                child.join(10.0)
        finally:
            for child in children:
                child.kill()
    return _results(case, trainer.manifest.nbytes, idle, busy, gaps)


def _results(case: Case, nbytes: int, idle: "Stalls", busy: "Stalls", gaps: list["Gaps"]) -> list[Result]:
    mib = nbytes / 2**20
    common = {"weights_mib": mib, "rollouts": ROLLOUTS, "backend": "gloo", "threads": 1}
    both = {name: [x for g in gaps for x in getattr(g, name)] for name in Gaps.__dataclass_fields__}
    reference = [m + p for m, p in zip(both["memcpy"], both["probe"], strict=True)]
    rest = [g - c - p - r for g, c, p, r in zip(both["gap"], both["copy"], both["proof"], both["rebuild"], strict=True)]
    return [
        compare(
            f"trainer's stall, {case.name} ({mib:.1f} MiB)",
            "ms",
            _ms(idle.publish),
            _ms(idle.memcpy),
            "one memcpy",
            details={
                "probe_forward_ms": _median_ms(idle.probe),
                "first_stall_ms": 1e3 * idle.first,
                "stall_while_rollouts_generate_ms": _median_ms(busy.publish),
                "memcpy_while_rollouts_generate_ms": _median_ms(busy.memcpy),
                "published_until_proved_ms": _median_ms(idle.proved),
                "skipped": idle.skipped + busy.skipped,
            },
            settings=common,
        ),
        compare(
            f"a take-over: copy, read-back and probe, {case.name}",
            "ms",
            _ms([c + p for c, p in zip(both["copy"], both["proof"], strict=True)]),
            _ms(reference),
            "one memcpy and one probe forward",
            details={
                "copy_ms": _median_ms(both["copy"]),
                "memcpy_ms": _median_ms(both["memcpy"]),
                "proof_ms": _median_ms(both["proof"]),
                "probe_forward_ms": _median_ms(both["probe"]),
            },
            settings=common,
        ),
        compare(
            f"the token gap it makes in {case.rows} sequences, {case.name}",
            "ms",
            _ms(both["gap"]),
            _ms(reference),
            "one memcpy and one probe forward",
            details={
                "longest_ms": 1e3 * max(both["gap"]),
                "cache_computed_again_ms": _median_ms(both["rebuild"]),
                "next_token_ms": _median_ms(rest),
                "gap_without_a_take_over_ms": _median_ms(both["token"]),
            },
            settings={
                **common,
                "sequences": case.rows,
                "prompt_tokens": case.prompt_tokens,
                "new_tokens": case.new_tokens,
            },
        ),
    ]


def _ms(seconds: list[float]) -> list[float]:
    return [1e3 * s for s in seconds]


def _median_ms(seconds: list[float]) -> float:
    return float(np.median(_ms(seconds))) if seconds else float("nan")


def _node(role: Any, name: str, directory: Path) -> Node:
    config = settings.load(ROOT / "configs/quickstart.toml", ["mesh.preset=local"])
    run = RunDir.make(directory / "run")
    log = logging.getLogger("mesh")
    log.setLevel(logging.ERROR)
    return Node(role=role, config=config, run=run, name=name, launch=launch.detect({}), log=log)


# ----------------------------------------------------------------------------------------------------------------------
# The trainer's side
# ----------------------------------------------------------------------------------------------------------------------


@dataclass
class Stalls:
    """Seconds of each round."""

    publish: list[float] = field(default_factory=list)
    memcpy: list[float] = field(default_factory=list)
    probe: list[float] = field(default_factory=list)
    proved: list[float] = field(default_factory=list)
    first: float = 0.0  # publication, into memory that no one has touched
    skipped: int = 0


class Trainer:
    """A trainer's policy and publisher, as ``roles/trainer/trainer.py`` has them, without the learning."""

    def __init__(self, directory: Path, path: str) -> None:
        node = _node("trainer", "trainer", directory)
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(LlamaConfig.from_pretrained(path), dtype=torch.float32)
        self.policy = Policy(model, None, node.config)
        buffers = {name for name, _ in model.named_buffers()}
        self.manifest = Manifest.from_state(self.policy.named_state(), buffers, torch.float32)
        self.peer = node.peer()
        self.publisher = Publisher(self.peer, self.manifest, node.config.weights, group_builder(self.peer))
        rng = np.random.default_rng(0)
        self.tokens = rng.integers(0, self.policy.vocabulary, node.config.weights.probe_tokens).astype(np.int32)
        self.source, self.target = new_flat(self.manifest.nbytes), new_flat(self.manifest.nbytes)
        self.source.zero_()
        node.join(self.peer)
        self.lineage = Lineage().open(Ballot(1, self.peer.id), 0)
        self.publisher.open_term(self.lineage)
        self.number = 0

    def rounds(self, count: int, pause_s: float) -> Stalls:
        """``WARM`` rounds, then ``count`` publications that are measured, each proved by all rollouts before the
        next."""
        warm = Stalls()
        for _ in range(WARM):
            self._round(warm, pause_s)
        stalls = Stalls(first=warm.publish[0])
        for _ in range(count):
            self._round(stalls, pause_s)
        stalls.skipped = self.publisher.stats().skipped
        return stalls

    def _round(self, stalls: Stalls, pause_s: float) -> None:
        with torch.no_grad():
            for parameter in self.policy.parameters.values():
                parameter.mul_(1 - 1e-4)
        version = Version(self.lineage.terms[-1][0], self.number)
        if self.number % 2:
            stalls.memcpy.append(self._memcpy())
        with _timed(stalls.probe):
            probe = Probe(tokens=self.tokens, logprobs=self.policy.probe(self.tokens, torch.float32))
        with _timed(stalls.publish):
            taken = self.publisher.publish(version, self.policy.named_state(), probe)
        assert taken, "no buffer was free"
        began = time.perf_counter()
        self._proved(version)
        stalls.proved.append(time.perf_counter() - began)
        if not self.number % 2:
            stalls.memcpy.append(self._memcpy())
        self.number += 1
        time.sleep(pause_s)  # for the rollouts: tokens between two take-overs

    def _memcpy(self) -> float:
        began = time.perf_counter()
        self.target.copy_(self.source)
        return time.perf_counter() - began

    def _proved(self, version: Version) -> None:
        deadline = time.monotonic() + LIMIT_S
        while len(self.publisher.proved_by(version)) < ROLLOUTS:
            self.peer.check()
            if time.monotonic() > deadline:
                raise TimeoutError(f"{version} is not proved: {self.publisher.table()}")
            time.sleep(0.002)

    def close(self) -> None:
        self.publisher.close()
        self.peer.leave("measured")


class _timed:
    """Appends the seconds of a block to a list."""

    def __init__(self, into: list[float]) -> None:
        self.into = into

    def __enter__(self) -> None:
        self.began = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.into.append(time.perf_counter() - self.began)


# ----------------------------------------------------------------------------------------------------------------------
# A rollout's side
# ----------------------------------------------------------------------------------------------------------------------


@dataclass
class Gaps:
    """Seconds of each take-over while sequences were running. ``gap``: between the tokens before and after, with its
    parts ``copy``, ``proof`` and ``rebuild`` (of the running sequences' cache); ``memcpy`` and ``probe`` were measured
    right after it. ``token``: of the turns without a take-over."""

    gap: list[float] = field(default_factory=list)
    copy: list[float] = field(default_factory=list)
    proof: list[float] = field(default_factory=list)
    rebuild: list[float] = field(default_factory=list)
    memcpy: list[float] = field(default_factory=list)
    probe: list[float] = field(default_factory=list)
    token: list[float] = field(default_factory=list)


class Watched:
    """The receiver as the engine's source of weights; measures between the engine's turns, on its thread."""

    def __init__(self, engine: TransformersEngine, receiver: Receiver) -> None:
        self.engine, self.receiver = engine, receiver
        self.gaps = Gaps()
        self.measuring = threading.Event()
        self._taken: tuple[float, float, float] | None = None
        self._before = (0.0, 0.0, 0.0)
        self._turn: float | None = None
        self._copy: tuple[torch.Tensor, torch.Tensor] | None = None
        self._tokens: np.ndarray | None = None

    def offered(self) -> Any:
        figures = self.engine.figures
        if self._taken is not None:
            if self.measuring.is_set() and figures.longest_gap_s > 0:
                self._record(figures.longest_gap_s, *self._taken)
            self._taken = self._turn = None
        arrived = self.receiver.offered()
        self._before = (figures.takeover_copy_s, figures.takeover_proof_s, figures.busy_s)
        now = time.perf_counter()
        if arrived is None and figures.running and self.measuring.is_set():
            if self._turn is not None:
                self.gaps.token.append(now - self._turn)
            self._turn = now
        else:
            self._turn = None
        return arrived

    def took(self, arrived: Any, proof: Any) -> None:
        f = self.engine.figures
        copy, proving, whole = f.takeover_copy_s, f.takeover_proof_s, f.busy_s
        copy, proving, whole = copy - self._before[0], proving - self._before[1], whole - self._before[2]
        self._taken = (copy, proving, whole - copy - proving)
        f.longest_gap_s = 0.0  # the next token closes the gap of this take-over
        if self._copy is None:
            self._copy = (torch.zeros_like(arrived.flat), torch.zeros_like(arrived.flat))
            self._tokens = arrived.probe.tokens
        self.receiver.took(arrived, proof)

    def refused(self, arrived: Any, reason: Any) -> None:
        self.receiver.refused(arrived, reason)
        raise AssertionError(f"{arrived.version} was refused: {reason}")

    def _record(self, gap: float, copy: float, proof: float, rebuild: float) -> None:
        g = self.gaps
        g.gap.append(gap)
        g.copy.append(copy)
        g.proof.append(proof)
        g.rebuild.append(rebuild)
        assert self._copy is not None
        assert self._tokens is not None
        with _timed(g.memcpy):
            self._copy[0].copy_(self._copy[1])
        with _timed(g.probe):
            self.engine.score(self._tokens)


def rollout(case: Case, directory: Path, index: int, pipe: Connection) -> None:
    """A rollout's process: engine, receiver and peer, and prompts without end once the pipe says so."""
    torch.set_num_threads(1)
    node = _node("rollout", f"rollout-{index}", directory)
    engine = TransformersEngine(dummy_model(case.path(directory)), eos=[], max_batch=case.rows, threads=1)
    peer = node.peer()
    receiver = Receiver(peer, node.config.weights, group_builder(peer), engine_build=engine.build)
    watched = Watched(engine, receiver)
    engine.start(watched, Prover(probe_floor(node.config)))
    node.join(peer)
    try:
        asyncio.run(_generate(case, engine, watched, pipe, index))
    finally:
        engine.close()
        receiver.close()
        peer.leave("measured")
    pipe.send(watched.gaps)  # complete, now that the engine's thread has ended


async def _generate(case: Case, engine: TransformersEngine, watched: Watched, pipe: Connection, index: int) -> None:
    rng = np.random.default_rng(index)
    vocabulary = engine.model.config.vocab_size

    async def row() -> None:
        while True:
            prompt = rng.integers(0, vocabulary, case.prompt_tokens).astype(np.int32)
            seed = int(rng.integers(0, 2**62))
            await engine.sample(Request(prompt=prompt, max_new_tokens=case.new_tokens, seed=seed))

    assert await asyncio.to_thread(pipe.recv) == "generate"
    rows = [asyncio.create_task(row()) for _ in range(case.rows)]
    watched.measuring.set()
    pipe.send("generating")
    assert await asyncio.to_thread(pipe.recv) == "stop"
    watched.measuring.clear()
    for task in rows:
        task.cancel()
    await asyncio.gather(*rows, return_exceptions=True)


def _answer(pipe: Connection) -> Any:
    assert pipe.poll(LIMIT_S), f"a rollout did not answer within {LIMIT_S:.0f} s"
    return pipe.recv()
