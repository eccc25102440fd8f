"""A mesh whose work is waiting: all of its protocol is real, and its sampling and training are waits that were drawn.

Every peer is a process of its own and runs the role's own ``main``: endpoint and membership, credits, groups, ledger,
formations, the bytes of the weights and their proofs. What differs is what those mains load: an engine that holds a
completion for as long as was drawn, a policy that takes a batch for as long as was drawn, a reward that needs no
process. So dozens of peers fit on two cores, and what a step needs beyond the waits is what the protocol costs.

Draws come in blocks of ``BLOCK`` quantiles of the distribution, shuffled by seed and rollout: runs with one seed get
the same waits, and the mean of a run is that of the distribution. What was drawn is kept, for the ideal.

Run as a script this is the process that forks the peers: ``python paced_mesh.py SPEC.json``.
"""

import ctypes
import heapq
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import NormalDist
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct

VOCABULARY = 64
TOKENS = 8  # of a completion
BLOCK = 64
GROUP = 2  # completions of a prompt, the fewest there may be
POLL_S = 0.02
MICRO_BATCH_S = 0.01  # training looks up so often
END_S = 20.0  # for the rollouts to end
PR_SET_PDEATHSIG = 1


class Waits(Struct, frozen=True):
    """Seconds that a completion takes: lognormal of this mean, cut at ``most`` times it, as ``max_new_tokens`` cuts
    completions; ``train_s``: a batch, always."""

    name: str
    generate_s: float
    train_s: float
    sigma: float = 0.0
    most: float = 4.0

    def quantiles(self) -> np.ndarray:
        """``BLOCK`` of them, scaled so that their mean is ``generate_s`` though the tail was cut."""
        if not self.sigma:
            return np.full(BLOCK, self.generate_s)
        normal = NormalDist(0.0, self.sigma)
        x = np.exp([normal.inv_cdf((i + 0.5) / BLOCK) for i in range(BLOCK)])
        for _ in range(50):  # cutting lowers the mean, scaling raises what is cut
            x = np.minimum(x / x.mean(), self.most)
        return self.generate_s * x

    def draws(self, seed: int, rollout: int) -> Iterator[float]:
        rng = np.random.default_rng((seed, rollout))
        block = self.quantiles()
        while True:
            yield from map(float, rng.permutation(block))


class Spec(Struct):
    """One run. ``slots``: groups that a rollout works on at a time."""

    directory: str
    rollouts: int
    slots: int
    groups_per_step: int
    max_lag: int
    steps: int
    waits: Waits
    seed: int = 0
    weights_mib: float = 1.0
    wait_target: float = 0.05

    def settings(self) -> list[str]:
        return [
            "model.path=paced", "task.heldout_prompts=0", "task.train_prompts=50000", "mesh.preset=lan",
            "evaluation.every_steps=0", "checkpoint.every_steps=0", "rollout.engine=transformers",
            f"rollout.max_new_tokens={TOKENS}", f"rollout.groups_in_flight={self.slots}", "rollout.threads=1",
            f"run.steps={self.steps}", f"run.seed={self.seed}", f"trainer.group_size={GROUP}", "trainer.threads=1",
            f"trainer.groups_per_step={self.groups_per_step}", f"trainer.max_lag={self.max_lag}",
            f"trainer.wait_target={self.wait_target}", f"mesh.min_rollouts={self.rollouts}",
        ]  # fmt: skip


class Ran(Struct):
    """What a run showed: a row of the trainer's figures for each step, and the seconds drawn by each rollout."""

    rows: list[dict[str, Any]]
    drawn: list[np.ndarray]
    summary: dict[str, Any]


def paced_run(spec: Spec, limit_s: float) -> Ran:
    """Raises RuntimeError, with the last lines, when the mesh did not come to its end."""
    directory = Path(spec.directory)
    directory.mkdir(parents=True)
    (directory / "spec.json").write_bytes(msgspec.json.encode(spec))
    (directory / "settings.toml").write_text("")
    env = {name: value for name, value in os.environ.items() if not name.startswith("MESH_")}
    command = [sys.executable, __file__, str(directory / "spec.json")]
    with open(directory / "out", "wb") as out:
        process = subprocess.Popen(
            command, env=env | {"OMP_NUM_THREADS": "1"}, stdin=subprocess.DEVNULL, stdout=out, stderr=out
        )
        try:
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            process.kill()
            process.wait(10.0)
    if code != 0:
        said = (directory / "out").read_text(errors="replace").splitlines()[-4:]
        raise RuntimeError(f"a paced mesh ended with {code}, its files are in {directory}: {' | '.join(said)}")
    lines = (directory / "run/metrics/trainer.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if "time/step_s" in row]
    drawn = [np.load(path) for path in sorted(directory.glob("drawn-*.npy"))]
    return Ran(rows, drawn, json.loads((directory / "run/summary.json").read_text()))


# ----------------------------------------------------------------------------------------------------------------------
# The process that forks the peers
# ----------------------------------------------------------------------------------------------------------------------


def serve(spec: Spec) -> int:
    """Fork all peers and wait for the trainer's end; the rollouts then have seconds to follow. Returns its code."""
    import roles.rollout.rollout
    import roles.trainer.trainer  # noqa: F401

    trainer = fork(spec, "trainer", 0)
    rollouts = [fork(spec, "rollout", i) for i in range(spec.rollouts)]
    code = os.waitstatus_to_exitcode(os.waitpid(trainer, 0)[1])
    deadline = time.monotonic() + (0.0 if code else END_S)
    while rollouts and time.monotonic() < deadline:
        rollouts = [pid for pid in rollouts if os.waitpid(pid, os.WNOHANG) == (0, 0)]
        time.sleep(POLL_S)
    for pid in rollouts:
        os.kill(pid, signal.SIGKILL)
    if rollouts:
        print(f"{len(rollouts)} rollouts did not end with the trainer")
    return code or len(rollouts)


def fork(spec: Spec, role: str, index: int) -> int:
    if pid := os.fork():
        return pid
    code: Any = 1
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        code = be(spec, role, index)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def be(spec: Spec, role: str, index: int) -> int:
    """In the forked process: the role's own main, with what it loads put in place of what it would load."""
    import torch

    import roles.rollout.rollout as rollout
    import roles.trainer.trainer as trainer
    from mesh.node import run_node

    torch.set_num_threads(1)
    nbytes = int(spec.weights_mib * 2**20)
    torch.manual_seed(1 if role == "trainer" else 2)  # an engine starts from other weights, as real ones do
    if role == "trainer":
        made = paced_policy(spec, nbytes)
        trainer.load_policy = lambda config, device: made(config)  # type: ignore[assignment]
        trainer.files_digest = lambda config: "paced"  # type: ignore[assignment]
    else:
        kept = Path(spec.directory) / f"drawn-{index}.npy"
        engine = paced_engine(model(nbytes), spec.waits.draws(spec.seed, index), kept)
        rollout.load_engine = lambda config, device: (engine, TOKENIZER)  # type: ignore[assignment]
        rollout.files_digest = lambda config: "paced"  # type: ignore[assignment]
        rollout.RewardPool = Rewards  # type: ignore[misc, assignment]
    directory = Path(spec.directory)
    return run_node(
        role=role,  # type: ignore[arg-type]
        config_path=directory / "settings.toml",
        run=directory / "run",
        overrides=spec.settings(),
        name="trainer" if role == "trainer" else f"rollout-{index}",
        trainers=1,
    )


# ----------------------------------------------------------------------------------------------------------------------
# What the mains load
# ----------------------------------------------------------------------------------------------------------------------


class Tokenizer:
    chat_template = None

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [ord(c) % VOCABULARY for c in text]}

    def decode(self, tokens: list[int], **_: Any) -> str:
        return " ".join(map(str, tokens))

    def save_pretrained(self, directory: Path) -> None:
        """Nothing of it is to be kept."""


TOKENIZER = Tokenizer()


class Rewards:
    """Every other completion is right, so that every group teaches."""

    failure = None

    def __init__(self, *_: Any) -> None:
        self.counts: dict[str, int] = {}

    async def start(self) -> None: ...

    async def score(self, prompt: Any, completions: list[str]) -> list[Any]:
        from roles.rollout.rewards import Scored

        return [Scored(float(i % 2)) for i in range(len(completions))]

    async def close(self) -> None: ...


def model(nbytes: int) -> Any:
    """A bigram model of so many bytes in eight tensors; most of them are only there to be sent."""
    import torch
    from torch import nn

    class Bigrams(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            rows = max(VOCABULARY, nbytes // 8 // 4 // VOCABULARY)
            self.table = nn.Embedding(VOCABULARY, VOCABULARY)
            self.rest = nn.ParameterList(nn.Parameter(0.1 * torch.randn(rows, VOCABULARY)) for _ in range(8))

        def forward(self, input_ids: Any, use_cache: bool = False) -> Any:
            return SimpleNamespace(logits=self.table(input_ids))

        def get_input_embeddings(self) -> Any:
            return self.table

        def save_pretrained(self, directory: Path, state_dict: Any) -> None:
            """Nobody will load it."""

    return Bigrams()


def paced_policy(spec: Spec, nbytes: int) -> Any:
    """What makes the trainer's policy, of its settings: real but for forward and backward, which are a wait."""
    import torch

    from roles.trainer.policy import Policy, Scores

    class PacedPolicy(Policy):
        def accumulate(self, samples: Any, threshold: Any, given_up: Any = lambda: False) -> Scores | None:
            until = time.perf_counter() + spec.waits.train_s
            for p in self.parameters.values():
                p.grad = torch.full_like(p, 1e-3)
            while (left := until - time.perf_counter()) > 0:
                if given_up():
                    return None
                time.sleep(min(left, MICRO_BATCH_S))
            no = np.zeros(len(samples), bool)
            return Scores(
                current=[s.recorded for s in samples],
                entropy=[np.zeros_like(s.recorded) for s in samples],
                drift=np.zeros(len(samples)),
                avoided=no,
                cut=no,
                threshold=threshold.value,
                tokens=sum(s.sampled_tokens for s in samples if s.counts),
                padded_tokens=sum(len(s.tokens) for s in samples),
            )

    return lambda config: PacedPolicy(model(nbytes), TOKENIZER, config)


def paced_engine(net: Any, draws: Iterator[float], kept: Path) -> Any:
    """An engine that takes versions over and proves them as others do, and holds each completion for the drawn time.
    All that it is given runs at once; a take-over holds up what runs, as it does where tokens are computed."""
    import torch

    from roles.rollout.engines.base import NOTHING, Engine, EngineDead, Pending, Sampled, answer
    from transport.messages import Span
    from transport.weights.buffers import load_into

    class PacedEngine(Engine):
        build = "paced"

        def __init__(self) -> None:
            super().__init__()
            self._lock = threading.Condition()
            self._fresh_ones: list[Pending] = []
            self._aborts: set[int] = set()
            self._closing = False
            self._woken = False
            self._running: list[tuple[float, int, float, Pending]] = []  # a heap: end, tie-break, seconds, request
            self._spans: dict[int, list[tuple[int, Any]]] = {}  # by tie-break: from which token on, which version
            self._count = 0
            self._drawn: list[float] = []
            self.stalls: list[float] = []  # seconds of each take-over, its proof included
            self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

        def check(self, request: Any) -> None: ...

        def submit(self, pending: list[Pending]) -> None:
            with self._lock:
                self._fresh_ones += pending
                self._lock.notify()

        def abort(self, requests: Iterable[Any]) -> None:
            with self._lock:
                self._aborts.update(map(id, requests))
                self._lock.notify()

        def start(self, source: Any, prover: Any) -> None:
            self.source, self.prover = source, prover
            self._thread.start()

        def wake(self) -> None:
            with self._lock:
                self._woken = True
                self._lock.notify()

        def close(self, timeout_s: float = 5.0) -> bool:
            with self._lock:
                self._closing = True
                self._lock.notify()
            if self._thread.ident is not None:
                self._thread.join(timeout_s)
            np.save(kept, np.array(self._drawn))
            return not self._thread.is_alive()

        def _run(self) -> None:
            try:
                with torch.inference_mode():
                    while not self._closing:
                        self._turn()
            except BaseException as e:
                self.failure, self.state = e, "dead"
            with self._lock:
                left = [*self._fresh_ones, *(entry[3] for entry in self._running)]
            answer([(p, EngineDead("the engine has ended")) for p in left])

        def _turn(self) -> None:
            with self._lock:
                if not (self._fresh_ones and self.version) and not (self._aborts or self._woken or self._closing):
                    due = self._running[0][0] - time.perf_counter() if self._running else POLL_S
                    self._lock.wait(max(0.0, min(due, POLL_S)))
                self._woken = False
                fresh, self._fresh_ones = (self._fresh_ones, []) if self.version else ([], self._fresh_ones)
                aborts, self._aborts = self._aborts, set()
            self._take_over()
            now = time.perf_counter()
            for p in fresh:
                seconds = next(draws)
                self._drawn.append(seconds)
                self._count += 1
                self._spans[self._count] = [(0, self.version)]
                heapq.heappush(self._running, (now + seconds, self._count, seconds, p))
            if aborts:
                self._abort(aborts)
            ended = []
            while self._running and self._running[0][0] <= now:
                _, key, _, p = heapq.heappop(self._running)
                ended.append((p, self._sampled(key)))
            self.figures.running = len(self._running)
            self.figures.tokens += TOKENS * len(ended)
            answer(ended)

        def _abort(self, aborts: set[int]) -> None:
            gone = [entry for entry in self._running if id(entry[3].request) in aborts]
            self._running = [entry for entry in self._running if id(entry[3].request) not in aborts]
            heapq.heapify(self._running)
            for entry in gone:
                self._spans.pop(entry[1])
            answer([(entry[3], NOTHING) for entry in gone])

        def _sampled(self, key: int) -> Sampled:
            marks = [*self._spans.pop(key), (TOKENS, None)]
            spans = [Span(version=v, start=a, stop=b) for (a, v), (b, _) in itertools.pairwise(marks) if a < b]
            tokens = np.arange(TOKENS, dtype=np.int32)
            return Sampled(tokens=tokens, logprobs=np.full(TOKENS, -1.0, np.float32), spans=spans, finish="stop")

        def _take_over(self) -> None:
            if (arrived := self.source.offered()) is None:
                return
            began = time.perf_counter()
            self.prover.before(self, arrived.probe)
            load_into(arrived.manifest, arrived.flat, self.state_tensors())
            proof = self.prover.prove(
                self, arrived.manifest, arrived.tensor_digests, arrived.probe, arrived.version, arrived.flat
            )
            if not proof.proved:
                self.version, self.state = None, "unproven"
                self.source.refused(arrived, proof)
                return
            stall = time.perf_counter() - began
            self.stalls.append(stall)
            self.version, self.state = arrived.version, "ready"
            for i, (end, key, seconds, p) in enumerate(self._running):  # all by the same: it stays a heap
                done = min(TOKENS - 1, max(0, int(TOKENS * (1 - (end - began) / seconds))))
                marks = self._spans[key]
                marks[:] = [mark for mark in marks if mark[0] < done] + [(done, self.version)]
                self._running[i] = (end + stall, key, seconds, p)
            self.figures.takeovers += 1
            self.figures.takeover_longest_s = max(self.figures.takeover_longest_s, stall)
            self.source.took(arrived, proof)

        def state_tensors(self) -> dict[str, Any]:
            return net.state_dict(keep_vars=True)

        def live_tensors(self) -> Iterable[tuple[str, Any]]:
            return ((name, tensor.detach()) for name, tensor in self.state_tensors().items())

        def score(self, tokens: np.ndarray) -> np.ndarray:
            ids = torch.from_numpy(np.asarray(tokens, np.int64))
            logp = net(ids[None]).logits[0, :-1].float().log_softmax(-1)
            return logp.gather(1, ids[1:, None])[:, 0].numpy()

    return PacedEngine()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    sys.exit(serve(msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Spec)))
