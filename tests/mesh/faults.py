"""One peer with a fault in it: ``python faults.py FAULT --role ...`` is ``python -m mesh.node --role ...`` but for it.

Each fault replaces one method of the shipped code in this process, before the peer starts.
"""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec

from mesh.cli import node

GATE = Path(os.environ.get("GATE", "."))
WRONG = GATE / "wrong"
HELPER = """
import ctypes, os, signal
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # with its parent
while os.read(0, 1):
    os.write(1, b"!")
"""


def corrupt_bucket():
    """Publisher: of the first version from 3 on that is sent, one byte flips on the way, as often as it is sent."""
    from transport.weights.publisher import Publisher

    broadcast, bad = Publisher._broadcast, []

    def spoiled(self, formation, abandon, start, staged):
        if not bad and start.version.number >= 3:
            bad.append(start.version)
        byte = 1 if start.version in bad else 0
        staged.slot.flat[5] ^= byte
        broadcast(self, formation, abandon, start, staged)
        staged.slot.flat[5] ^= byte

    Publisher._broadcast = spoiled


def wrong_scores():
    """Engine: while the file ``wrong`` is beside the gate, its log-probabilities are half a nat off."""
    from roles.rollout.engines.transformers import TransformersEngine

    score = TransformersEngine.score
    TransformersEngine.score = lambda self, tokens: score(self, tokens) + (0.5 if WRONG.exists() else 0.0)


def other_model():
    """Rollout: it loads the model of ``$OTHER_MODEL``, whatever the settings it agreed on with the others say."""
    from roles.rollout import rollout

    load = rollout.load_engine

    def loads(config, *arguments):
        other = msgspec.structs.replace(config.model, path=os.environ["OTHER_MODEL"])
        return load(msgspec.structs.replace(config, model=other), *arguments)

    rollout.load_engine = loads


def engine_process():
    """Engine: nothing is done but with the help of a process of its own, whose id is in the file ``engine``."""
    from roles.rollout.engines.transformers import TransformersEngine

    turn = TransformersEngine._turn

    def helped(self):
        if not hasattr(self, "helper"):
            command = [sys.executable, "-c", HELPER]
            self.helper = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
            (GATE / "engine").write_text(str(self.helper.pid))
        helper = self.helper
        try:
            helper.stdin.write(b"?")
            alive = helper.stdout.read(1)
        except BrokenPipeError:
            alive = b""
        if not alive:
            raise RuntimeError(f"its process {helper.pid} was ended by {signal.Signals(-helper.wait(10)).name}")
        return turn(self)

    TransformersEngine._turn = helped


def holds_the_interpreter():
    """Engine: when the file ``busy`` is there, nothing else of its process runs for ``$BUSY_S`` seconds. If the file
    says so it announces that before, and sleeps; else it works. The file ``held`` says that it is over."""
    from roles.rollout.engines.transformers import TransformersEngine

    turn, seconds = TransformersEngine._turn, float(os.environ["BUSY_S"])

    def held(self):
        if (GATE / "busy").exists():
            if (GATE / "busy").read_text() == "announced":
                with self.source._rollout.peer.busy(2 * seconds):
                    ctypes.PyDLL(None).sleep(round(seconds))
            else:
                begun = time.perf_counter()
                sum(range(20_000_000))
                sum(range(round(20_000_000 * seconds / (time.perf_counter() - begun))))
            (GATE / "busy").rename(GATE / "held")
        return turn(self)

    TransformersEngine._turn = held


def never_leaves():
    """Peer: its goodbye lasts for ever. It says ``leaving`` when that begins."""
    from mesh.peer import Peer

    def leave(self, reason, linger_s=0.0):
        self.note(f"leaving: {reason}")
        threading.Event().wait()

    Peer.leave = leave


def loads_for_ever():
    """Node: loading the model ends in a call that does not return. It says ``loading`` when that begins."""
    from roles.rollout import rollout

    def loads(*_):
        print("loading", flush=True)
        threading.Event().wait()

    rollout.load_engine = loads


def flips_a_bit():
    """Trainer: of its third step on, one bit of one weight is another than the optimizer made it."""
    import torch

    from roles.trainer.policy import Policy

    step = Policy.step

    def spoiled(self, tokens):
        figures = step(self, tokens)
        if self.steps == 3:
            self.parameters["model.norm.weight"].data.view(torch.int32)[5] ^= 1
        return figures

    Policy.step = spoiled


POINTS = (
    "before it is ready", "in the all-reduce", "before it tells its reduction", "before the optimizer step",
    "before publication", "before the verdicts",
)  # fmt: skip


def dies():
    """Trainer: killed at the point ``$DIES`` of a step that it makes with others, its third or a later one; as the
    first of them or not, as ``$DIES_FIRST`` says."""
    from roles.trainer.gradients import Gradients
    from roles.trainer.intake import Intake
    from roles.trainer.trainer import Trainer
    from transport.formation import Formation

    me, first, made = [], os.environ["DIES_FIRST"] == "1", []
    init, apply = Trainer.__init__, Trainer.apply

    def known(self, *arguments, **named):
        init(self, *arguments, **named)
        me.append(self)

    def counted(self, event):
        apply(self, event)
        made.append(len(self._members) > 1)

    def killed_in(owner, name, when=lambda *_: True):
        method = getattr(owner, name)

        def killed(self, *arguments, **named):
            due = sum(made) >= 2 and len(me[0]._members) > 1 and me[0].first == first
            if due and when(self, *arguments):
                os.kill(os.getpid(), signal.SIGKILL)
            return method(self, *arguments, **named)

        setattr(owner, name, killed)

    Trainer.__init__, Trainer.apply = known, counted
    match POINTS.index(os.environ["DIES"]):
        case 0:
            killed_in(Gradients, "ready")
        case 1:  # the sums of the records are there, those of the gradient are not
            killed_in(Formation, "all_reduce", lambda self, tensor, *_: tensor.is_floating_point())
        case 2:
            killed_in(Gradients, "_reduced")
        case 3:
            killed_in(Trainer, "apply")
        case 4:
            killed_in(Trainer, "publish")
        case 5:
            killed_in(Intake, "committed")


def loses_completions():
    """Engine: every fifth completion fails when it is first asked for."""
    from roles.rollout.engines.base import RequestFailed, answer
    from roles.rollout.engines.transformers import TransformersEngine

    submit, lost = TransformersEngine.submit, set()

    def losing(self, pending):
        bad = [p for p in pending if p.request.seed % 5 == 0 and p.request.seed not in lost]
        lost.update(p.request.seed for p in bad)
        answer([(p, RequestFailed("lost")) for p in bad])
        submit(self, [p for p in pending if p not in bad])

    TransformersEngine.submit = losing


def soon_late():
    """Rollout: a finished run without a trainer is given up after a second."""
    from roles.rollout import rollout

    rollout.LATE_S = 1.0


def pauses():
    """Trainer: while the file ``paused`` is beside the gate, its own thread does nothing; its loop answers as ever."""
    from roles.trainer.trainer import Trainer

    learn = Trainer.learn

    def paused(self, batch):
        while (WRONG.parent / "paused").exists():
            (WRONG.parent / "stands").touch()
            time.sleep(0.01)
        return learn(self, batch)

    Trainer.learn = paused


if __name__ == "__main__":
    globals()[sys.argv.pop(1)]()
    node()
