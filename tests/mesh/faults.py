"""One peer with a fault in it: ``python faults.py FAULT --role ...`` is ``python -m mesh.node --role ...`` but for it.

Each fault replaces one method of the shipped code in this process, before the peer starts.
"""

import os
import sys
from pathlib import Path

import msgspec

from mesh.cli import node

WRONG = Path(os.environ["GATE"]) / "wrong"


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


if __name__ == "__main__":
    globals()[sys.argv.pop(1)]()
    node()
