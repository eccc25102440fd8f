"""What the mesh promises (design, section 9), checked from outside: told of every act, this file keeps a truth of its
own, for which it asks no machine, and raises AssertionError when the two differ.

The truth about weights is which version was computed from which; lag, lineage and "trained once" follow from it.

Where each promise is checked, after every event unless it says otherwise:

1   membership.py: nobody is dead without a whole suspicion, views are who joined and did not depart; in calm and after
    deaths they become exactly the living, in the detection time. split.py: halves become one
2   mesh.py, trainers.py: what is on order and held
3   here, mesh.py and trainers.py: trained once on a lineage, a credit ends once; at the end the records close, and list
    what was not trained. split.py: of two lineages the one with more groups trained goes on
4   here: lag and lineage of what is trained, by the truth about weights
5   here: proofs only rise, what is reported was proved, tokens delivered are of proved versions, terms rise
6   here, and the guards of buffers in weights.py: tokens tell by what weights they were sampled
7   every scenario: calm comes to its end within a time; no machine waits for what does not come
8   not here: it is about time spent, which a simulation makes up. benchmarks/ measures it
9   not here: bytes are the codec's and the endpoint's; tests/mesh
10  step_record.py: a step is applied by all, after all have its gradient, and weights are bit-identical
"""

from collections.abc import Sequence
from typing import Any

from mesh.identity import PeerId
from mesh.version import Ballot, Version
from roles.trainer.buffer import Trajectory
from tests.sim.node import Node
from transport.accounts import AnyEntry, Ended, Issued, Trained
from transport.messages import Accept, Answer, Credit, Delivery, Go, Group, Report


def versions_in(group: Group) -> list[Version]:
    return [span.version for c in group.completions for s in c.segments for span in s.spans]


class Promises:
    def __init__(self, max_lag: int):
        self.max_lag = max_lag
        self._same: dict[Version, Version | None] = {}  # first versions of terms: of which older one, None: of the base
        self.weights: dict[Version, frozenset[Version]] = {}  # each version with all it was computed from, and itself
        self.prompts: dict[tuple[int, int], list[Version]] = {}  # (epoch, prompt) -> versions it was trained into
        self.credits: dict[tuple[PeerId, int], str] = {}  # each credit ever issued, with what became of it
        self.terms: list[Ballot] = []
        self._proved: dict[PeerId, list[Version]] = {}
        self._accepted: dict[tuple[PeerId, str, int], PeerId] = {}
        self._decided: dict[tuple[str, Ballot], Any] = {}
        self._formed: dict[tuple[PeerId, str], Ballot] = {}

    # Formations -------------------------------------------------------------------------------------------------------

    def _accepts(self, peer: PeerId, message: Accept) -> None:
        ballot = message.ballot
        convener = self._accepted.setdefault((peer, message.kind, ballot.counter), ballot.convener)
        assert convener == ballot.convener, f"{peer[:4]} accepts two conveners at counter {ballot.counter}"

    def _decides(self, go: Go) -> None:
        members = self._decided.setdefault((go.kind, go.ballot), go.members)
        assert members == go.members, f"{go.kind} ballot {go.ballot} is decided twice"

    def forms(self, peer: PeerId, go: Go) -> None:
        last = self._formed.get((peer, go.kind))
        assert last is None or last < go.ballot, f"{peer[:4]} forms {go.ballot} after {last}"
        assert peer in {m.peer for m in go.members}, f"{peer[:4]} forms {go.ballot} without being a member"
        self._formed[peer, go.kind] = go.ballot
        self._decides(go)

    # Weights ----------------------------------------------------------------------------------------------------------

    def opened(self, version: Version, restored: Version | None) -> None:
        """A term opens with the weights of a checkpoint, or with those that every run begins with."""
        assert all(term.counter < version.term.counter for term in self.terms), (
            f"term {version.term} is not the highest"
        )
        self.terms.append(version.term)
        self._made(version, restored)
        self._same[version] = self._same.get(restored, restored) if restored else None

    def content(self, version: Version, buckets: int) -> list[int]:
        """What each bucket of a version holds, which is its own digest. The first version of a term is the one that
        it was restored from."""
        same = self._same.get(version, version)
        counter, number = (same.term.counter, same.number) if same is not None else (0, 0)
        return [(counter << 20) + (number << 4) + i + 1 for i in range(buckets)]

    def _made(self, version: Version, parent: Version | None) -> None:
        assert version not in self.weights, f"{version} is made twice"
        self.weights[version] = (self.weights[parent] if parent else frozenset()) | {version}

    def proved(self, node: Node, version: Version) -> None:
        """The engine of this rollout runs this version, proved."""
        past = self._proved.setdefault(node.id, [])
        assert not past or past[-1] < version, f"{node.label} goes back from {past[-1]} to {version}"
        assert version in self.weights, f"{node.label} proves {version}, which nobody made"
        past.append(version)

    def _reports(self, node: Node, report: Report) -> None:
        past = self._proved.get(node.id, [])
        if report.proved is not None:
            assert report.proved in past, f"{node.label} reports {report.proved} as proved, and it is not"

    # Trajectories -----------------------------------------------------------------------------------------------------

    def recorded(self, trainer: PeerId, entry: AnyEntry) -> None:
        """A line of this trainer's ledger."""
        if isinstance(entry, Issued):
            assert (trainer, entry.id) not in self.credits, f"credit {entry.id} is issued twice"
            self.credits[trainer, entry.id] = "in flight"
        elif isinstance(entry, Trained | Ended):
            for id in entry.ids:
                was = self.credits.get((trainer, id))
                assert was == "in flight", f"credit {id} ends twice, first as {was}"
                self.credits[trainer, id] = "trained" if isinstance(entry, Trained) else entry.outcome

    def forgotten(self, trainer: PeerId, entry: AnyEntry) -> None:
        """A line of a dead trainer's ledger that its disk has lost."""
        if isinstance(entry, Issued):
            del self.credits[trainer, entry.id]
        elif isinstance(entry, Trained | Ended):
            self.credits.update({(trainer, id): "in flight" for id in entry.ids})

    def _answers(self, node: Node, answer: Answer) -> None:
        for credit in answer.credits:
            assert (node.id, credit.id) in self.credits, f"credit {credit.id} leaves before its record"

    def _delivers(self, node: Node, group: Group) -> None:
        for version in versions_in(group):
            assert version in self._proved.get(node.id, []), f"{node.label} delivers tokens of {version}, not proved"

    def _labelled(self, credit: Credit, group: Group) -> None:
        """Its tokens are of the versions that they are said to be of, and of this credit's prompt."""
        for completion in group.completions:
            prompt, sampled = completion.segments
            assert list(prompt.tokens) == [credit.epoch, credit.prompt], (
                f"a group of prompt {prompt.tokens[1]} comes under the credit of prompt {credit.prompt}"
            )
            for span in sampled.spans:
                [weights] = self.content(span.version, 1)
                assert all(sampled.tokens[span.start : span.stop] == weights), f"tokens are not of {span.version}"

    def trained(self, before: Version, after: Version, batch: Sequence[Trajectory]) -> None:
        """The step from one version to the next, with these groups."""
        self._made(after, before)
        for t in batch:
            self._labelled(t.credit, t.group)
            for version in versions_in(t.group):
                assert version in self.weights[before], f"{after} is trained on {version}, of another lineage"
                lag = before.number - version.number
                assert lag <= self.max_lag, f"{after} is trained with lag {lag}"
            into = self.prompts.setdefault((t.credit.epoch, t.credit.prompt), [])
            for other in into:
                assert other not in self.weights[after], (
                    f"prompt {t.credit.prompt} is trained twice in epoch {t.credit.epoch}: into {other} and {after}"
                )
            into.append(after)

    def groups_in(self, version: Version) -> int:
        """How many groups were trained on the way to this version."""
        return sum(v in self.weights[version] for into in self.prompts.values() for v in into)

    # ------------------------------------------------------------------------------------------------------------------

    def sent(self, node: Node, message: Any) -> None:
        """Look at a message on its way out."""
        match message:
            case Accept():
                self._accepts(node.id, message)
            case Go():
                self._decides(message)
            case Report():
                self._reports(node, message)
            case Answer():
                self._answers(node, message)
            case Delivery(group=Group() as group):
                self._delivers(node, group)
