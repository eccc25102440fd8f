"""The wire protocol: every message there is.

A message travels as ``Envelope(run, sender, to, reply, body)``, one msgpack header followed by raw frames for large
arrays (``codec.py``). ``Int32s``, ``Float32s`` and ``UInt64s`` are one-dimensional little-endian arrays; their dtype is
checked on sending and on arrival. All messages are level-triggered: they repeat a state, so any may be lost,
doubled, delayed or overtaken without harm.

Sections: first contact and membership (SWIM), convening, the store of a process group, weights, weights by pull,
trajectories, steps of several trainers, looking.
This file is a leaf: it imports nothing but the names of peers and versions, so that the pure machines can speak it.
"""

from typing import Annotated, Literal

import numpy as np
from msgspec import Meta, Struct

from mesh.identity import Name, PeerCard, PeerId
from mesh.version import Ballot, Lineage, Version

PROTOCOL = 3
"""Raised with every change of this file; peers of different protocols refuse each other by name."""

Text = Annotated[str, Meta(max_length=4096)]
Count = Annotated[int, Meta(ge=0, lt=2**53)]
Digest = Name  # in hexadecimal digits
Counts = Annotated[dict[Name, Count], Meta(max_length=256)]
CreditId = Annotated[int, Meta(ge=0, le=2**63 - 1)]
MAX_ORPHANS = 256
"""Groups without a trainer that a rollout keeps, and offers, at a time."""

Int32s = Annotated[np.ndarray, Meta(extra={"dtype": "int32"})]
Float32s = Annotated[np.ndarray, Meta(extra={"dtype": "float32"})]
UInt64s = Annotated[np.ndarray, Meta(extra={"dtype": "uint64"})]
UInt8s = Annotated[np.ndarray, Meta(extra={"dtype": "uint8"})]


class Message(Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    """Base of all messages; the tag on the wire is the class name."""


# ----------------------------------------------------------------------------------------------------------------------
# First contact and membership: SWIM with Lifeguard
# ----------------------------------------------------------------------------------------------------------------------

Liveness = Literal["alive", "suspect", "dead", "left"]


class News(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What one peer says of another. A higher incarnation overrides; at the same one, dead > suspect > alive."""

    card: PeerCard
    incarnation: Count
    state: Liveness
    reason: Text = ""
    accuser: PeerId = ""


class Hello(Message, frozen=True):
    """First contact with an address whose owner is unknown (``to`` is empty): let me in, and tell me who is there."""

    card: PeerCard
    incarnation: Count
    protocol: Count = PROTOCOL


class Welcome(Message, frozen=True):
    """Answer to Hello: everybody the sender knows."""

    members: list[News]


class Refused(Message, frozen=True):
    """Answer to Hello from a peer that cannot be of this mesh: another protocol or settings that must agree."""

    reason: Text


class Ping(Message, frozen=True):
    seq: Count
    news: list[News]


class Ack(Message, frozen=True):
    seq: Count
    news: list[News]


class PingReq(Message, frozen=True):
    """Ask a third peer to ping ``target``, who has not answered me."""

    seq: Count
    target: PeerId
    news: list[News]


class Nack(Message, frozen=True):
    """The third peer is alive but got no answer from the target either."""

    seq: Count
    news: list[News]


class Sync(Message, frozen=True):
    """What the sender knows of some members: news that does not wait for the next ping, or an answer to Compare."""

    members: list[News]


class Compare(Message, frozen=True):
    """Digests of who lives as the sender sees it, one for each part of the mesh (``mesh/roster.py``): the receiver
    tells what it knows of those parts in which it differs, and compares in turn with ``reply=True``."""

    digests: Annotated[list[Count], Meta(max_length=256)]
    reply: bool = False


class NotMe(Message, frozen=True):
    """What you sent was for ``meant``, who is not at this address any more; I am the sender of this envelope."""

    meant: PeerId


# ----------------------------------------------------------------------------------------------------------------------
# Convening: how live peers agree on a formation
# ----------------------------------------------------------------------------------------------------------------------

Kind = Literal["weights", "gradients"]


class Member(Struct, frozen=True, order=True, array_like=True, forbid_unknown_fields=True):
    """One rank of a formation: an engine's worker processes are members of their own under their peer's id."""

    peer: PeerId
    worker: Count = 0


class Invite(Message, frozen=True):
    kind: Kind
    ballot: Ballot
    members: list[Member]


class Accept(Message, frozen=True):
    kind: Kind
    ballot: Ballot


class Decline(Message, frozen=True):
    """Your ballot is not above ``highest``: convene with a higher counter."""

    kind: Kind
    ballot: Ballot
    highest: Ballot


class Go(Message, frozen=True):
    """Build the group: rank is the index in ``members``. The store is kept by the convener."""

    kind: Kind
    ballot: Ballot
    members: list[Member]


# ----------------------------------------------------------------------------------------------------------------------
# The store through which torch connects the ranks of a formation; kept by its convener
# ----------------------------------------------------------------------------------------------------------------------

StoreKey = Annotated[str, Meta(max_length=512)]
StoreValue = Annotated[bytes, Meta(max_length=1 << 16)]


class StoreSet(Message, frozen=True):
    """``number`` makes a repeated request harmless: the answer of the first is sent again."""

    kind: Kind
    ballot: Ballot
    number: Count
    key: StoreKey
    value: StoreValue
    add: Annotated[int, Meta(ge=-(2**31), lt=2**31)] | None = None
    """When given, ``value`` is ignored and this amount is added to the integer under ``key``."""


class StoreGet(Message, frozen=True):
    kind: Kind
    ballot: Ballot
    number: Count
    keys: list[StoreKey]


class StoreAnswer(Message, frozen=True):
    """``values`` has one entry a key; None where nothing was set yet."""

    kind: Kind
    ballot: Ballot
    number: Count
    values: list[StoreValue | None]
    count: int = 0


# ----------------------------------------------------------------------------------------------------------------------
# Weights
# ----------------------------------------------------------------------------------------------------------------------


class TensorEntry(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One stored tensor of the flat buffer: ``names`` has more than one entry where parameters are tied."""

    names: tuple[str, ...]
    dtype: Name
    shape: tuple[int, ...]
    offset: Count
    nbytes: Count
    buffer: bool = False


class Probe(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Token ids (int32) and the publisher's log-probability of each after the first (float32, temperature 1)."""

    tokens: Int32s
    logprobs: Float32s


class ManifestAsk(Message, frozen=True):
    """A receiver does not have the manifest with this digest."""

    digest: Digest


class ManifestTell(Message, frozen=True):
    """Part ``part`` of ``parts`` of the encoded manifest (msgpack of a list of TensorEntry)."""

    digest: Digest
    part: Count
    parts: Count
    payload: Annotated[bytes, Meta(max_length=1 << 19)]


class Announce(Message, frozen=True):
    """Publisher to receivers, repeated until they have reported: this version comes next through this formation; or,
    ``ballot`` None, it does not come: pull it from one of ``holders``.

    ``bucket_digests`` (uint64) are xxh3-64 of each bucket; ``tensor_digests`` (uint64) of each entry of the manifest.
    """

    ballot: Ballot | None
    version: Version
    lineage: Lineage
    manifest: Digest
    bucket_bytes: Count
    attempt: Count
    bucket_digests: UInt64s
    tensor_digests: UInt64s
    probe: Probe
    holders: Annotated[list[PeerId], Meta(max_length=64)] = []


class Begin(Message, frozen=True):
    """Publisher to the receivers of a formation, when all of them are ready: enter the broadcast of this attempt now.
    Repeated until it has ended, so that nobody waits inside a collective for a member that is not ready."""

    ballot: Ballot
    version: Version
    attempt: Count


class Report(Message, frozen=True):
    """Receiver to publisher, on change and every second: where this receiver is.

    ``ready_for`` is the announced (version, attempt) for which a shadow buffer waits; ``buckets`` how many of its
    buckets arrived and verified; ``proved`` the version the engine runs, proved; ``refused`` a version that failed and
    why. ``live_digest`` covers the engine's live tensors; engines of one ``build`` must agree on it. ``wants`` is a
    version that an evaluation waits for, and that is not here.
    """

    ballot: Ballot | None
    ready_for: Version | None = None
    attempt: Count = 0
    buckets: Count = 0
    verified: Version | None = None
    proved: Version | None = None
    refused: Version | None = None
    reason: Text = ""
    build: Name = ""
    live_digest: Digest = ""
    difference: float = 0.0
    floor: float = 0.0
    power: float = 0.0
    wants: Version | None = None


# ----------------------------------------------------------------------------------------------------------------------
# Weights by pull: catching up over the endpoint
# ----------------------------------------------------------------------------------------------------------------------


class PullAsk(Message, frozen=True):
    """Receiver to a peer that holds ``version``, repeated: these chunks are missing here. Chunk i is what lies in the
    flat buffer from byte ``i * CHUNK_BYTES`` on. Asking leases the version for a while; no chunks give it back."""

    version: Version
    chunks: Annotated[list[Count], Meta(max_length=64)]


class PullTell(Message, frozen=True):
    """One chunk: uint8, of CHUNK_BYTES or, the last one, fewer."""

    version: Version
    chunk: Count
    payload: UInt8s


class PullDecline(Message, frozen=True):
    """This version cannot be had here (any more), or not now."""

    version: Version
    reason: Text


# ----------------------------------------------------------------------------------------------------------------------
# Trajectories
# ----------------------------------------------------------------------------------------------------------------------

FinishReason = Literal["stop", "length", "abort", "error", "turns"]


class Span(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Tokens ``[start, stop)`` of a segment were sampled under ``version``."""

    version: Version
    start: Count
    stop: Count


class Segment(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A run of tokens that were either given (prompt, tool result) or sampled by the policy.

    ``tokens`` int32 of shape (n,). For a sampled segment ``logprobs`` is float32 of shape (n,): the log-probability of
    each token under softmax(logits / temperature) when it was sampled, and ``spans`` tile [0, n); else both are empty.
    """

    tokens: Int32s
    sampled: bool
    logprobs: Float32s
    spans: list[Span] = []


class Completion(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One sample: the prompt as its first, given segment, then what was sampled. ``reward`` None: it has none (the
    verifier raised, timed out, or returned no finite number) and the sample teaches nothing."""

    segments: list[Segment]
    reward: float | None
    finish: FinishReason
    metrics: Annotated[dict[Name, float], Meta(max_length=256)] = {}


class Group(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The completions of one prompt. ``started`` is the oldest version that produced a token (what lag counts from);
    ``generate_start`` and ``generate_stop`` are seconds since the epoch on the rollout's clock."""

    completions: list[Completion]
    started: Version
    generate_start: float = 0.0
    generate_stop: float = 0.0
    failures: Counts = {}


OrphanName = tuple[PeerId, CreditId]
"""The trainer that ordered the group, and its credit."""


class Orphan(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A finished group of ``size`` completions whose trainer is gone, offered to the prompt's new owner. ``oldest`` is
    the oldest version that produced a token of it."""

    name: OrphanName
    epoch: Count
    prompt: Count
    size: Count
    oldest: Version


class Credit(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A trainer's order for one group of ``size`` completions of prompt ``prompt`` of the training (or, for
    ``evaluation``, the held-out) prompts. The engine must hold a proved version of the lineage with at least
    ``min_version.number``; an evaluation credit is pinned to exactly ``min_version``. ``seed`` makes sampling
    repeatable: sample i of the group draws from (seed, i)."""

    id: CreditId
    prompt: Count
    epoch: Count
    attempt: Count
    size: Count
    min_version: Version
    seed: Count
    evaluation: bool = False
    adopts: OrphanName | None = None
    """Deliver this group, which you offered, instead of making one."""


class HeldCredit(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    id: CreditId
    started: Version | None


class Ask(Message, frozen=True):
    """Rollout to trainer, every second and on change. ``answered`` is the highest Answer sequence number processed: a
    credit that was sent in an Answer up to it and is in neither ``held`` nor ``kept`` is free again."""

    seq: Count
    answered: Count
    free: Count
    held: list[HeldCredit]
    kept: list[CreditId]
    returned: Counts = {}
    orphans: Annotated[list[Orphan], Meta(max_length=MAX_ORPHANS)] = []


Outcome = Literal["trained", "superseded", "failed", "evaluated"]


class Verdict(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    id: CreditId
    outcome: Outcome


class Answer(Message, frozen=True):
    """Trainer to rollout, at once and after each step. ``seq`` counts the Answers to this rollout (of this trainer
    process), starting at 1. ``again`` lists kept groups the trainer does not have: deliver them again. ``finished``:
    the run is over, leave. ``share`` is how many groups this trainer puts into a step: free places are offered to
    trainers in that proportion."""

    seq: Count
    credits: list[Credit]
    revoked: list[CreditId]
    verdicts: list[Verdict]
    again: list[CreditId]
    current: Version
    lineage: Lineage
    finished: bool = False
    share: Count = 1


class Delivery(Message, frozen=True):
    """Rollout to trainer: the group of a credit, kept until its verdict; ``failure`` when none could be made."""

    credit: CreditId
    group: Group | None
    failure: Text = ""


# ----------------------------------------------------------------------------------------------------------------------
# Steps of several trainers
# ----------------------------------------------------------------------------------------------------------------------


class Place(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Where a trainer's weights stand: after ``step`` optimizer steps of ``lineage``, which trained ``trained`` groups.
    ``state`` is a digest of weights and optimizer; empty where none was taken."""

    step: Count = 0
    lineage: Lineage = Lineage()
    trained: Count = 0
    state: Text = ""


class Held(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A reduced gradient that waits to be applied: of step ``step`` (the number that the weights get by it), reduced in
    formation ``ballot``."""

    ballot: Ballot
    step: Count
    digest: Text


class StepSeek(Message, frozen=True):
    """A trainer in no formation to all trainers, every second: take me in. ``ballot`` is the highest I have followed: I
    am in that formation no longer."""

    ballot: Ballot


class StepHere(Message, frozen=True):
    """This is the formation I am in. Answer to a trainer that is not in it or lags behind it, and told to all such
    trainers by its first member, every second."""

    ballot: Ballot
    members: list[PeerId]
    trained: Count


class StepStanding(Message, frozen=True):
    """Where I stood when formation ``ballot`` was formed; it does not change within a ballot. ``opened`` is the size of
    the last formation in which I trained or was ready to; 0: of none since I was taken in. Repeated until everybody's
    is there; from then on, one without ``reply`` is answered."""

    ballot: Ballot
    place: Place
    held: Held | None
    opened: Count
    reply: bool = False


class StepReady(Message, frozen=True):
    """Member to the first, on change and repeated: my weights stand just before ``step``; when ``ready``, with a
    gradient of so many groups and tokens, or with nothing to contribute (0). What was said of a step only grows."""

    ballot: Ballot
    step: Count
    ready: bool = False
    groups: Count = 0
    tokens: Count = 0


class StepGo(Message, frozen=True):
    """The first to all: enter the all-reduce of ``step``, with your gradient if you are among ``contributors``, with
    zeros otherwise. Decided once a step of a formation; repeated until everybody has reduced."""

    ballot: Ballot
    step: Count
    contributors: list[PeerId]


class StepReduced(Message, frozen=True):
    """Member to all: I hold the reduced gradient of ``step``. ``digest`` covers it and all that rode with it, ``state``
    is that of my weights and optimizer before it. Repeated until everybody's is there; from then on answered."""

    ballot: Ballot
    step: Count
    digest: Text
    state: Text = ""
    reply: bool = False


class StepHold(Message, frozen=True):
    """The first to all, repeated: make no step after ``step`` in this formation, ``newcomer`` is being taken in. A
    member that stands there answers with the same."""

    ballot: Ballot
    step: Count
    newcomer: PeerId


class StepOver(Message, frozen=True):
    """Formation ``ballot`` is over for me, and therefore for all of its members. Repeated until there is another."""

    ballot: Ballot
    reason: Text


class StateOffer(Message, frozen=True):
    """To a newcomer, while all steps are held for it: ask me for so many bytes, with this xxh3-64 digest: weights,
    optimizer and what else trainers have alike, at ``place`` in the formation of ``members``. Repeated until it
    asks."""

    ballot: Ballot
    step: Count
    members: list[PeerId]
    place: Place
    nbytes: Count
    digest: Text


class StateAsk(Message, frozen=True):
    """The newcomer: send me these chunks. Repeated for those that do not come."""

    ballot: Ballot
    chunks: list[Count]


class StateTell(Message, frozen=True):
    ballot: Ballot
    chunk: Count
    data: UInt8s


class StateTaken(Message, frozen=True):
    """The newcomer: I hold all of it, loaded; or ``reason`` says why not. Repeated until there is a formation with me
    in it, or none."""

    ballot: Ballot
    reason: Text = ""


class StateTensors(Message, frozen=True):
    """To all members, when trainers differ that must be alike: the digest of each of my tensors after ``step``, in the
    order of their names."""

    step: Count
    digests: UInt64s


# ----------------------------------------------------------------------------------------------------------------------
# Looking: what a peer shows to an observer
# ----------------------------------------------------------------------------------------------------------------------


class Look(Message, frozen=True):
    seq: Count


class Status(Message, frozen=True):
    """What a peer is doing, in one word, and its latest figures by name. ``history`` has the last rows of its curve as
    (step, accuracy or reward); ``events`` the last things that happened, newest last."""

    seq: Count
    state: str
    version: Version | None
    figures: dict[str, float]
    texts: dict[str, str]
    events: list[tuple[float, str]] = []
    history: list[tuple[int, float]] = []


Body = (
    Hello | Welcome | Refused | Ping | Ack | PingReq | Nack | Sync | Compare | NotMe
    | Invite | Accept | Decline | Go
    | StoreSet | StoreGet | StoreAnswer
    | ManifestAsk | ManifestTell | Announce | Begin | Report
    | PullAsk | PullTell | PullDecline
    | Ask | Answer | Delivery
    | StepSeek | StepHere | StepStanding | StepReady | StepGo | StepReduced | StepHold | StepOver
    | StateOffer | StateAsk | StateTell | StateTaken | StateTensors
    | Look | Status
)  # fmt: skip


class Envelope(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """``run`` and ``to`` are checked before the body is acted on; ``to`` is empty only for first contact. ``reply`` is
    the sender's control address, for answering a peer whose card is not known."""

    run: str
    sender: PeerId
    to: PeerId
    reply: str
    body: Body
