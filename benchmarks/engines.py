"""What an update of the weights costs vLLM while it samples: tokens per second, and the longest gap between two tokens.

One real engine under full load. Contestants, by turns: no update; one every second, received while it samples (as the
mesh does); one for which sampling is paused during the whole transfer. The transfer is a copy of the weights that is
slowed down on purpose, so that what depends on it can be seen.

Then real meshes of one trainer and one or two rollouts with vLLM, the same model, on the same cores: the time from the
begin of the trainer's snapshot of a version to the first token that each rollout samples under it, and where it goes.
"""

import argparse
import asyncio
import sys
import tempfile
import threading
import time
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from parts.measure import ROOT, Result, Spread, by_turns, compare
from parts.mesh_run import mesh_run
from parts.picture import Panel, point
from parts.script import Findings, flags, run
from transformers import LlamaConfig, LlamaForCausalLM

from mesh.config import convert
from mesh.version import Ballot, Version
from roles.rollout.engines import vllm
from roles.rollout.engines.base import Request
from roles.starter import CHARACTERS, SPECIAL, character_tokenizer
from roles.timeline import Process, read
from transport.messages import Probe
from transport.weights.buffers import copy_in, tensor_digests
from transport.weights.manifest import Manifest
from transport.weights.proof import Prover

SEQUENCES = 16
NEW_TOKENS = 200
VOCABULARY = len(SPECIAL) + len(CHARACTERS)
WARM = 3  # first versions of a mesh that are left out: an engine takes its first steps
PATIENCE_S = 120.0


def llama(seed: int) -> LlamaForCausalLM:
    """11 million parameters: large enough that a step of 16 sequences is more than overhead."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=384,
            intermediate_size=1024,
            num_hidden_layers=6,
            num_attention_heads=6,
            num_key_value_heads=2,
            vocab_size=VOCABULARY,
            max_position_embeddings=1024,
            tie_word_embeddings=True,
        )
    ).eval()


class Bench:
    """The engine, the weights that are sent to it, and who keeps it busy."""

    def __init__(self, directory: Path) -> None:
        self.models = [llama(0), llama(1)]
        self.models[0].save_pretrained(directory)
        character_tokenizer().save_pretrained(directory)
        config = convert({"model": {"path": str(directory)}, "rollout": {"threads": 1, "max_batch": SEQUENCES}})
        args = vllm.engine_args(config, str(directory), "float32", cuda=False)
        self.engine = vllm.VllmEngine(args, eos=[], threads=1)
        self.manifest = Manifest.from_module(self.models[0])
        self.flats = [self.engine.new_flat(self.manifest.nbytes) for _ in self.models]
        probe = np.arange(32, dtype=np.int32)
        for model, flat in zip(self.models, self.flats, strict=True):
            copy_in(self.manifest, model.state_dict(), flat)
        self.digests = [tensor_digests(self.manifest, flat) for flat in self.flats]
        self.probes = [Probe(tokens=probe, logprobs=logprobs(model, probe)) for model in self.models]
        self.sent = [flat.clone() for flat in self.flats]  # where a transfer comes from
        self.number, self.offer, self.taken, self.refused_ = 0, None, threading.Event(), ""
        self.stop = threading.Event()
        self.engine.start(self, Prover(1e-3))
        self.update(0.0)
        self.load = threading.Thread(target=lambda: asyncio.run(self._sample()), daemon=True)
        self.load.start()

    # -- the engine's source of weights --------------------------------------------------------------------------------

    def offered(self) -> Any:
        offer, self.offer = self.offer, None
        return offer

    def took(self, arrived: Any, proof: Any) -> None:
        self.taken.set()

    def refused(self, arrived: Any, reason: Any) -> None:
        self.refused_ = str(reason)
        self.taken.set()

    # -- what is measured ----------------------------------------------------------------------------------------------

    def update(self, transfer_s: float, *, paused: bool = False) -> float:
        """One update, ``transfer_s`` long; returns the seconds from its offer until the engine goes on with it."""
        if paused:
            asyncio.run_coroutine_threadsafe(self.engine._pause(), self.engine._loop).result(PATIENCE_S)
        self.number += 1
        which = self.number % 2
        transfer(self.sent[which], self.flats[which], transfer_s)
        self.taken.clear()
        began = time.perf_counter()
        self.offer = SimpleNamespace(
            version=Version(Ballot(1, "aa"), self.number),
            manifest=self.manifest,
            flat=self.flats[which],
            tensor_digests=self.digests[which],
            probe=self.probes[which],
        )
        self.engine.wake()
        if not self.taken.wait(PATIENCE_S) or self.refused_:
            sys.exit(f"the engine did not take a version: {self.refused_ or 'no answer'}")
        return time.perf_counter() - began

    def rate(self, seconds: float, *, updates: bool) -> float:
        """Tokens per second, with an update every second or none."""
        f, began = self.engine.figures, time.perf_counter()
        before = f.tokens
        while (now := time.perf_counter()) < began + seconds:
            if updates:
                self.update(0.2)
            time.sleep(max(0.0, min(now + 1.0, began + seconds) - time.perf_counter()))
        return (f.tokens - before) / (time.perf_counter() - began)

    def gaps(self, transfer_s: float, rounds: int) -> dict[str, list[float]]:
        return by_turns(
            {
                "mesh": lambda: self.gap_ms(transfer_s, paused=False),
                "paused": lambda: self.gap_ms(transfer_s, paused=True),
                "none": lambda: self.still_ms(transfer_s),
                "memcpy": self.memcpy_ms,
            },
            rounds,
        )

    def gap_ms(self, transfer_s: float, *, paused: bool) -> float:
        """The longest time between two of the engine's steps around one update, in milliseconds."""
        time.sleep(0.5)
        self.engine.figures.longest_gap_s = 0.0
        self.update(transfer_s, paused=paused)
        time.sleep(0.5)  # the step after it is counted when it has ended
        return 1e3 * self.engine.figures.longest_gap_s

    def still_ms(self, seconds: float) -> float:
        """The same without an update."""
        self.engine.figures.longest_gap_s = 0.0
        time.sleep(1.0 + seconds)
        return 1e3 * self.engine.figures.longest_gap_s

    def memcpy_ms(self) -> float:
        began = time.perf_counter()
        self.sent[0].clone()
        return 1e3 * (time.perf_counter() - began)

    def close(self) -> None:
        self.stop.set()
        self.load.join(30.0)
        self.engine.close(30.0)

    async def _sample(self) -> None:
        rng = np.random.default_rng(0)

        async def one(i: int) -> None:
            while not self.stop.is_set():
                prompt = rng.integers(2, VOCABULARY, 16).astype(np.int32)
                await self.engine.sample(Request(prompt=prompt, max_new_tokens=NEW_TOKENS, seed=i, temperature=1.0))

        await asyncio.gather(*(one(i) for i in range(SEQUENCES)))


def transfer(source: torch.Tensor, target: torch.Tensor, seconds: float) -> None:
    """A copy in 64 pieces that takes so long."""
    began, pieces = time.perf_counter(), 64
    for i, (a, b) in enumerate(zip(source.chunk(pieces), target.chunk(pieces), strict=True)):
        b.copy_(a)
        time.sleep(max(0.0, began + seconds * (i + 1) / pieces - time.perf_counter()))


def meshes(directory: Path, model: Path, steps: int, sizes: tuple[int, ...]) -> list[Result]:
    """From a version's snapshot to the first token under it, with so many rollouts."""
    results = []
    for rollouts in sizes:
        run = directory / f"run-{rollouts}"
        overrides = [f"run.steps={steps}", f"model.path={model}", "rollout.engine=vllm", "rollout.threads=1",
                     "trainer.threads=1", "rollout.max_new_tokens=32", f"rollout.max_batch={SEQUENCES}",
                     "trainer.group_size=4", "trainer.groups_per_step=4", "rollout.groups_in_flight=4",
                     "task.heldout_prompts=0", "checkpoint.every_steps=0",
                     "task.reward=parts.rewards:half"]  # fmt: skip
        mesh_run(ROOT / "configs/quickstart.toml", run, rollouts, overrides)
        found = first_tokens(read(run))
        if not found:
            sys.exit(f"no version after the first {WARM} reached a rollout within {steps} steps")
        parts = {f"{name}_ms": Spread.of([own[name] for own in found]).median for name in found[0]}
        results.append(Result(
            f"from the trainer's snapshot to the first token, rollouts: {rollouts}", "ms",
            Spread.of([own["all"] for own in found]), details=parts,
            settings={"versions_times_rollouts": len(found), "overrides": overrides[2:]},
        ))  # fmt: skip
    return results


def first_tokens(processes: list[Process]) -> list[dict[str, float]]:
    """Of each version that each rollout sampled under: the milliseconds from its snapshot to the first token, and of
    what lies between: the snapshot, all until it was received, the wait for a pause and taking it over, the token."""
    trainer, *rollouts = processes
    began = {row["version"]: row for row in trainer.spans if row["span"] == "snapshot"}
    found = []
    for rollout in rollouts:
        last: dict[str, dict[str, Any]] = {}
        for row in rollout.spans:
            if "version" in row:
                last[f"{row['span']} {row['version']}"] = row
        for version, snapshot in began.items():
            rows = [last.get(f"{name} {version}") for name in ("receive", "apply", "first token")]
            if all(rows) and int(version[1:].partition("@")[0]) > WARM:
                at = [snapshot["at"], *(row["at"] + row["s"] for row in (snapshot, *rows))]
                names = ("snapshot", "until_received", "apply", "token")
                found.append({name: 1e3 * (b - a) for name, (a, b) in zip(names, pairwise(at), strict=True)})
                found[-1]["all"] = 1e3 * (at[-1] - at[0])
    return found


@torch.no_grad()
def logprobs(model: LlamaForCausalLM, tokens: np.ndarray) -> np.ndarray:
    ids = torch.from_numpy(tokens.astype(np.int64))[None]
    return model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0].numpy()


def measure(arguments: argparse.Namespace) -> Findings:
    try:
        vllm.require()
    except ValueError as e:
        print(f"skipped: {e}")
        sys.exit()
    quick = arguments.quick
    rounds, window_s, transfers = (2, 2.0, (0.1, 1.0)) if quick else (4, 4.0, (0.1, 0.5, 2.0))
    with tempfile.TemporaryDirectory(prefix="mesh-engines-") as directory:
        bench = Bench(Path(directory) / "model")
        try:
            bench.rate(2.0, updates=True)  # warm
            settings = {
                "vllm": vllm.installed(),
                "sequences": SEQUENCES,
                "parameters": sum(p.numel() for p in bench.models[0].parameters()),
                "window_s": window_s,
            }
            rates = by_turns(
                {
                    "none": lambda: bench.rate(window_s, updates=False),
                    "some": lambda: bench.rate(window_s, updates=True),
                },
                rounds,
            )
            gaps = {seconds: bench.gaps(seconds, rounds) for seconds in transfers}
            f = bench.engine.figures
            before = f.takeovers, f.takeover_copy_s, f.takeover_proof_s
            took = [1e3 * bench.update(0.1) for _ in range(2 * rounds)]
            taken = f.takeovers - before[0]
            parts = {
                "loading_ms": 1e3 * (f.takeover_copy_s - before[1]) / taken,
                "proving_ms": 1e3 * (f.takeover_proof_s - before[2]) / taken,
            }
        finally:
            bench.close()
        sizes = (1,) if quick else (1, 2)
        latencies = meshes(Path(directory), Path(directory) / "model", steps=15 if quick else 25, sizes=sizes)
    results = [
        compare("tokens per second, an update every second", "tokens/s", rates["some"], rates["none"], "no update",
                aim="at least 0.95", settings=settings, more_is_better=True),
        Result("from a version that is here to sampling with it", "ms", Spread.of(took), details=parts,
               settings=settings),
    ]  # fmt: skip
    for seconds, found in gaps.items():
        details = {"without_an_update_ms": Spread.of(found["none"]).median}
        name = f"longest gap between tokens, transfer of {seconds:g} s"
        for reference, said in (("paused", "paused for the transfer"), ("memcpy", "one copy of the weights")):
            aim = "does not grow with the transfer" if reference == "paused" else ""
            results.append(compare(name, "ms", found["mesh"], found[reference], said, aim=aim, details=details,
                                   settings=settings))  # fmt: skip
    results += latencies
    names = {"mesh": "mesh", "paused": "paused for the transfer", "none": "no update"}
    lines = {said: [point(s, Spread.of(found[key])) for s, found in gaps.items()] for key, said in names.items()}
    panel = Panel("longest gap between two tokens", "ms", "transfer, seconds", lines, log_y=True)
    per_s = {"tokens/s": [point(i, Spread.of(rates[key])) for i, key in enumerate(("none", "some"))]}
    return Findings(results, [panel, Panel("tokens per second", "", lines=per_s, ticks=["no update", "one a second"])])


if __name__ == "__main__":
    run(flags(__file__, __doc__), measure)
