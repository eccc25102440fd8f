"""The ZeroMQ sockets of one peer, encrypted and authenticated. Nothing about delivery is promised.

A peer receives on two ROUTERs, one for small control messages and one for bulk, each with an I/O thread of its own, and
sends through one DEALER per destination. It never answers along an inbound connection: ROUTERs lose what is sent before
a connection is up, and confuse two processes of one identity. A DEALER queues a bounded number of messages while it
connects; when that is full, more are dropped and counted, and nothing ever waits. Messages that outlive their receiver
reach whoever binds its port next, who answers NotMe.

Strangers: all sockets speak CURVE with the run's one key pair. A handshake needs its public half, which only members
know, and then passes the ZAP handler, which admits exactly this key. Both happen inside libzmq or before a message is
read, so a stranger costs a connection for at most ``HANDSHAKE_MS`` and reaches no code above this file.

Threads: the thread that receives owns the endpoint and calls everything, except `wake`; whoever made it may send before
that thread starts, and close after it ended. Processes: spawn, never fork, once one exists; a forked child would share
its sockets.
"""

import errno
import hmac
import logging
import re
import resource
import socket
import threading
import time
from collections import Counter, OrderedDict
from dataclasses import dataclass

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from mesh.identity import PeerId
from mesh.secret import Keys
from transport import codec
from transport.messages import Envelope, Hello, Message, NotMe

CONNECTIONS = 128  # per plane; beyond it the least recently used leaves
SEND_QUEUE = {"control": 512, "bulk": 64}  # messages waiting for one destination
RECEIVE_QUEUE = {"control": 1024, "bulk": 8}  # messages waiting from one connection
RECEIVE_AT_ONCE = {"control": 256, "bulk": 16}  # messages a call of receive takes from each plane
STUCK_S = 5.0  # a queue full for so long is given a new connection
HANDSHAKE_MS = 5_000  # a connection that has not proved its key by then is closed
DESCRIPTORS = 65_536  # wished for; the hard limit of the process may be lower
SOCKETS = 4_096  # of the context: two connections a peer, and room for the temporary ones
LOG_EVERY_S = 10.0
_AFFINITY = {"control": 1, "bulk": 2}  # bit masks of I/O threads
_DOMAIN = "mesh"
_ADDRESS = re.compile(r"tcp://(\[[0-9A-Fa-f:.]+(?:%[\w.-]+)?\]|[\w.-]+):(\d{1,5})")

log = logging.getLogger("mesh.endpoint")


@dataclass
class _Link:
    socket: zmq.Socket
    full_since: float | None = None


def address_of(host: str, port: int) -> str:
    """A ZeroMQ endpoint; IPv6 in brackets."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


REFUSES = "refuses this run's secret"


class Endpoint:
    """Bound when constructed. ``host`` is the IP address to bind and advertise (a name is resolved once), ``port`` that
    of the control socket, 0 for any; bulk takes any.

    ``counters`` counts by reason: ``sent``, ``received``, ``dropped_full`` (queue to a destination full),
    ``dropped_address`` (not a ZeroMQ address), ``malformed``, ``other_run``, ``not_me`` (for another id),
    ``own_hello`` (first contact with oneself), ``refused_key``, ``reconnected`` (queue was stuck), ``evicted``.

    Raises ValueError, in one line, when the address cannot be bound.
    """

    def __init__(self, run: str, me: PeerId, keys: Keys, host: str, port: int = 0) -> None:
        self.run = run
        self.me = me
        self.counters: Counter[str] = Counter()
        self._keys = keys
        self._links: dict[str, OrderedDict[str, _Link]] = {"control": OrderedDict(), "bulk": OrderedDict()}
        self._owner: int | None = None
        self._logged: dict[str, tuple[float, int]] = {}
        _raise_limits()
        host = _numeric(host)
        self._context = zmq.Context(io_threads=2)
        self._context.set(zmq.MAX_SOCKETS, SOCKETS)
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._wake_writer.setblocking(False)
        try:
            self._zap = self._context.socket(zmq.REP)
            self._zap.linger = 0
            self._zap.bind("inproc://zeromq.zap.01")  # before any port is open
            self._inbound = {"control": self._bind("control", host, port), "bulk": self._bind("bulk", host, 0)}
        except BaseException:
            self.close()
            raise
        self.address = self._inbound["control"].getsockopt_string(zmq.LAST_ENDPOINT)
        self.bulk_address = self._inbound["bulk"].getsockopt_string(zmq.LAST_ENDPOINT)
        self._poller = zmq.Poller()
        for readable in (self._zap, *self._inbound.values(), self._wake_reader.fileno()):
            self._poller.register(readable, zmq.POLLIN)

    # ------------------------------------------------------------------------------------------------------------------
    # Sending and receiving
    # ------------------------------------------------------------------------------------------------------------------

    def send(self, address: str, to: PeerId, body: Message, *, bulk: bool = False) -> bool:
        """Queue ``body`` for peer ``to`` at ``address``; never waits. False when it was dropped: the queue is full, or
        ``address`` is none. Large arrays are sent from where they lie: leave them unchanged afterwards.

        Raises ValueError or TypeError when ``body`` cannot be encoded."""
        self._own()
        plane = "bulk" if bulk else "control"
        frames = codec.encode(Envelope(self.run, self.me, to, self.address, body))  # type: ignore[arg-type]
        link = self._link(address, plane)
        if link is None:
            self._count("dropped_address", f"a message for {to or 'an unknown peer'} at {address[:80]!r}")
            return False
        try:
            link.socket.send_multipart(frames, zmq.NOBLOCK, copy=False)
        except zmq.Again:
            self._count("dropped_full", f"a {type(body).__name__} for {to or 'an unknown peer'} at {address}")
            now = time.monotonic()
            link.full_since = now if link.full_since is None else link.full_since
            if now - link.full_since > STUCK_S:
                # libzmq gives a connection up for good once something that is no peer answered there.
                self._links[plane].pop(address).socket.close(0)
                self.counters["reconnected"] += 1
            return False
        link.full_since = None
        self.counters["sent"] += 1
        return True

    def receive(self, timeout_s: float) -> list[Envelope]:
        """What arrived for this peer, control first, waiting up to ``timeout_s`` for the first of it or for `wake`.

        Bounded: what a call leaves behind, the next takes. Messages of another run, for another id, or malformed are
        counted and dropped here; who sent one for another id gets NotMe."""
        self._owner = self._owner or threading.get_ident()
        self._own()
        ready = dict(self._poller.poll(max(0, round(timeout_s * 1000))))
        if self._zap in ready:
            self._admit()
        if self._wake_reader.fileno() in ready:
            self._drain_wake()
        taken: list[Envelope] = []
        for plane, router in self._inbound.items():
            for _ in range(RECEIVE_AT_ONCE[plane] if router in ready else 0):
                try:
                    frames = router.recv_multipart(zmq.NOBLOCK, copy=False)
                except zmq.Again:
                    break
                if (envelope := self._open(frames[1:])) is not None:
                    taken.append(envelope)
        return taken

    def wake(self) -> None:
        """Make a waiting `receive` return. From any thread, also after `close`."""
        try:
            self._wake_writer.send(b"\0")
        except BlockingIOError:
            pass  # so many wakes are waiting that one more changes nothing
        except OSError as e:
            if e.errno not in (errno.EBADF, errno.EPIPE):  # closed meanwhile
                raise

    def forget(self, address: str) -> None:
        """Close the connections to ``address`` and drop what waits in them. A later send connects anew."""
        self._own()
        for links in self._links.values():
            if (link := links.pop(address, None)) is not None:
                link.socket.close(0)

    def close(self) -> None:
        """Close everything now; what is unsent is lost. May be called twice, and from another thread once the owner
        has stopped."""
        for links in self._links.values():
            links.clear()
        self._context.destroy(linger=0)
        self._wake_reader.close()
        self._wake_writer.close()

    # ------------------------------------------------------------------------------------------------------------------
    # First contact that failed
    # ------------------------------------------------------------------------------------------------------------------

    def diagnose(self, address: str, timeout_s: float = 2.0) -> str:
        """Why nobody answers at ``address``, in one line for a person. Blocks the owner up to ``timeout_s`` (and as
        long as the resolver takes for a name): for a peer that is alone."""
        self._own()
        parts = _ADDRESS.fullmatch(address)
        if not parts:
            return f"{address!r} is not an address of the form tcp://host:port"
        host = parts[1].strip("[]")
        try:
            socket.getaddrinfo(host, int(parts[2]), type=socket.SOCK_STREAM)
        except (OSError, UnicodeError, OverflowError) as e:
            return f"host {host} cannot be resolved: {getattr(e, 'strerror', None) or e}"
        probe = self._dealer("control", address)
        monitor = probe.get_monitor_socket()
        try:
            probe.connect(address)
            return self._watch(monitor, address, time.monotonic() + timeout_s)
        finally:
            probe.disable_monitor()
            monitor.close(0)
            probe.close(0)

    def _watch(self, monitor: zmq.Socket, address: str, deadline: float) -> str:
        poller = zmq.Poller()
        poller.register(monitor, zmq.POLLIN)
        poller.register(self._zap, zmq.POLLIN)  # the address may be this peer's own
        connected = False
        while (left := deadline - time.monotonic()) > 0:
            ready = dict(poller.poll(round(left * 1000) + 1))
            if self._zap in ready:
                self._admit()
            if monitor not in ready:
                continue
            event = recv_monitor_message(monitor)
            kind, value = event["event"], int(event["value"])
            if kind == zmq.EVENT_CONNECTED:
                connected = True
            elif kind == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                return f"a peer of this run listens at {address}, but has not answered yet"
            elif kind == zmq.EVENT_HANDSHAKE_FAILED_AUTH or (
                kind == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL and value in (errno.EPIPE, errno.ECONNRESET)
            ):
                return f"somebody listens at {address} but {REFUSES}: another run, or another secret"
            elif kind == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL or (connected and kind == zmq.EVENT_DISCONNECTED):
                return f"what listens at {address} is not a peer: another program has this port"
            elif kind == zmq.EVENT_CLOSED and not connected:
                return f"nobody listens at {address}"
        if connected:
            return f"no answer from {address}: a connection opens, but nobody speaks (a stopped peer, another program)"
        return f"no answer from {address}: its host is down, or something on the way drops packets"

    # ------------------------------------------------------------------------------------------------------------------
    # Sockets
    # ------------------------------------------------------------------------------------------------------------------

    def _bind(self, plane: str, host: str, port: int) -> zmq.Socket:
        router = self._socket(zmq.ROUTER, plane, ipv6=":" in host)
        router.curve_server = True
        router.setsockopt_string(zmq.ZAP_DOMAIN, _DOMAIN)
        router.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without it CURVE admits any key when no handler answers
        router.setsockopt(zmq.BACKLOG, 1024)
        try:
            router.bind(address_of(host, port))
        except zmq.ZMQError as e:
            if e.errno == errno.EADDRINUSE:
                text = f"mesh.port = {port} on {host} is in use by another process; choose another or 0"
            elif e.errno in (errno.EADDRNOTAVAIL, errno.ENODEV):
                text = f"mesh.address = {host} is not an address of this machine"
            elif e.errno == errno.EACCES:
                text = f"mesh.port = {port} needs privileges this user lacks; choose one above 1023, or 0"
            else:
                text = f"mesh.address = {host}, mesh.port = {port} cannot be bound: {e.strerror}"
            raise ValueError(text) from None
        return router

    def _link(self, address: str, plane: str) -> _Link | None:
        links = self._links[plane]
        if (link := links.get(address)) is not None:
            links.move_to_end(address)
            return link
        parts = _ADDRESS.fullmatch(address)
        if not parts or not 0 < int(parts[2]) < 1 << 16:
            return None
        dealer = self._dealer(plane, address)
        try:
            dealer.connect(address)
        except zmq.ZMQError as e:
            dealer.close(0)
            if e.errno in (errno.EINVAL, errno.ENODEV, errno.EPROTONOSUPPORT):
                return None
            raise
        if len(links) >= CONNECTIONS:
            links.popitem(last=False)[1].socket.close(0)
            self.counters["evicted"] += 1
        links[address] = _Link(dealer)
        return links[address]

    def _dealer(self, plane: str, address: str) -> zmq.Socket:
        dealer = self._socket(zmq.DEALER, plane, ipv6="[" in address)
        dealer.curve_serverkey = dealer.curve_publickey = self._keys.public
        dealer.setsockopt(zmq.CONNECT_TIMEOUT, 5_000)
        dealer.setsockopt(zmq.RECONNECT_IVL, 100)
        dealer.setsockopt(zmq.RECONNECT_IVL_MAX, 2_000)
        return dealer

    def _socket(self, kind: int, plane: str, *, ipv6: bool) -> zmq.Socket:
        made = self._context.socket(kind)
        made.linger = 0
        made.curve_secretkey = self._keys.private
        made.setsockopt(zmq.IPV6, int(ipv6))  # only where needed: machines without IPv6 refuse it
        made.setsockopt(zmq.AFFINITY, _AFFINITY[plane])
        made.setsockopt(zmq.SNDHWM, SEND_QUEUE[plane])
        made.setsockopt(zmq.RCVHWM, RECEIVE_QUEUE[plane])
        made.setsockopt(zmq.MAXMSGSIZE, codec.FRAME_BYTES + 4096)  # of one frame, with what encryption adds
        made.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        made.setsockopt(zmq.TCP_KEEPALIVE, 1)
        made.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 30)
        made.setsockopt(zmq.TCP_KEEPALIVE_INTVL, 10)
        made.setsockopt(zmq.TCP_KEEPALIVE_CNT, 3)
        made.setsockopt(zmq.TCP_MAXRT, 30_000)  # a host that vanished is noticed while there is something to send
        return made

    def _admit(self) -> None:
        """Answer the ZAP requests that wait (ZeroMQ RFC 27): exactly this run's key, whatever else is said."""
        while True:
            try:
                version, request, domain, _, _, mechanism, *credentials = self._zap.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            key = z85.decode(self._keys.public)
            admitted = (
                (mechanism, domain) == (b"CURVE", _DOMAIN.encode())
                and len(credentials) == 1
                and hmac.compare_digest(credentials[0], key)
            )
            verdict = (b"200", b"OK") if admitted else (b"400", b"")
            self._zap.send_multipart([version, request, *verdict, b"", b""])
            if not admitted:
                self._count("refused_key", "a connection")

    # ------------------------------------------------------------------------------------------------------------------
    # What arrived
    # ------------------------------------------------------------------------------------------------------------------

    def _open(self, frames: list[zmq.Frame]) -> Envelope | None:
        try:
            envelope = codec.decode([frame.buffer for frame in frames])
        except codec.Malformed as e:
            self._count("malformed", str(e)[:200])
            return None
        if envelope.run != self.run:
            self._count("other_run", f"a message of run {envelope.run}")
            return None
        if envelope.to and envelope.to != self.me:
            self._count("not_me", f"a {type(envelope.body).__name__} for {envelope.to} from {envelope.sender}")
            if not isinstance(envelope.body, NotMe):
                self.send(envelope.reply, envelope.sender, NotMe(meant=envelope.to))
            return None
        if envelope.sender == self.me and isinstance(envelope.body, Hello):
            self.counters["own_hello"] += 1
            return None
        self.counters["received"] += 1
        return envelope

    def _drain_wake(self) -> None:
        try:
            while len(self._wake_reader.recv(4096)) == 4096:
                pass
        except BlockingIOError:
            pass  # read to the end

    def _count(self, reason: str, what: str) -> None:
        """Count, and log at most once in LOG_EVERY_S for each reason: what comes in floods must not flood the log."""
        self.counters[reason] += 1
        now = time.monotonic()
        last, logged = self._logged.get(reason, (-LOG_EVERY_S, 0))
        if now - last >= LOG_EVERY_S:
            log.warning("%s: %s (%d since the last such line)", reason, what, self.counters[reason] - logged)
            self._logged[reason] = now, self.counters[reason]

    def _own(self) -> None:
        assert self._owner in (None, threading.get_ident()), "an endpoint belongs to the thread that receives"


def _numeric(host: str) -> str:
    """The one IP address that ``host`` stands for. Raises ValueError for none, or for all addresses at once."""
    if host.strip("[]") in ("", "*", "0.0.0.0", "::", "0"):
        raise ValueError(f"mesh.address = {host!r} means every interface; name the one that the other peers reach")
    try:
        family, _, _, _, found = socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as e:
        raise ValueError(f"mesh.address = {host!r} cannot be resolved: {getattr(e, 'strerror', None) or e}") from None
    assert family in (socket.AF_INET, socket.AF_INET6)
    return str(found[0])


def _raise_limits() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wished = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wished:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wished, hard))
