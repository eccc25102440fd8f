"""The secret of a run: who holds it is a member, and everything that tells members from strangers is derived from it.

It comes from ``MESH_SECRET`` (as a launcher hands it to its processes) or from the file ``secret`` of the run
directory, which whoever starts first makes. It is never an argument of a command, where ``ps`` would show it, and never
logged.

All peers of a run share one CURVE key pair. Its public half is as secret as the private one: a stranger who does not
know it cannot even begin a handshake.
"""

import hashlib
import os
import secrets
import stat
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from zmq.utils import z85

VARIABLE = "MESH_SECRET"
MIN_CHARS = 32


@dataclass(frozen=True)
class Keys:
    """The CURVE key pair of a run, as Z85 text of 40 characters each. Its repr shows neither half."""

    public: bytes = field(repr=False)
    private: bytes = field(repr=False)


def load(run_dir: Path | str) -> str:
    """The secret from the environment, else from ``run_dir/secret``, which is made when missing (mode 0600).

    Peers that start at once agree on one: whoever links its file first wins, and the others read that.
    Raises ValueError when the secret is short, or its file is readable by others."""
    given = os.environ.get(VARIABLE)
    if given is not None:
        return _checked(given, f"the environment variable {VARIABLE}")
    path = Path(run_dir) / "secret"
    if not path.exists():
        _make(path)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as e:
        raise ValueError(f"the run's secret {path} cannot be read: {e.strerror}") from None
    with os.fdopen(descriptor) as file:
        mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
        if mode & 0o077:
            raise ValueError(
                f"the run's secret {path} has mode {mode:04o}: others of this machine may read or change it; "
                f"chmod 600 it, or delete it before the run starts to get a new one"
            )
        return _checked(file.read(1024), f"the file {path}")


def run_id(secret: str, run_name: str) -> str:
    """16 hexadecimal digits that name this run on the wire and in a rendezvous, and tell nothing about the secret."""
    return _derive(secret, b"run id", run_name.encode(), 8).hex()


def keys(secret: str) -> Keys:
    """The CURVE key pair of everybody who holds ``secret``."""
    private = z85.encode(_derive(secret, b"curve", b"", 32))
    return Keys(public=zmq.curve_public(private), private=private)


def _derive(secret: str, purpose: bytes, text: bytes, size: int) -> bytes:
    key = hashlib.blake2b(secret.encode()).digest()
    return hashlib.blake2b(text, key=key, person=purpose, digest_size=size).digest()


def _checked(text: str, where: str) -> str:
    secret = text.strip()
    if len(secret) < MIN_CHARS:
        raise ValueError(
            f"{where} has {len(secret)} characters; a run's secret needs at least {MIN_CHARS}: "
            f'python -c "import secrets; print(secrets.token_hex(32))"'
        )
    return secret


def _make(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    mine = path.with_name(f".secret-{os.getpid()}-{secrets.token_hex(4)}")
    descriptor = os.open(mine, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_hex(32) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.link(mine, path)  # unlike a rename, never replaces what another peer has read already
    except FileExistsError:
        pass
    finally:
        mine.unlink(missing_ok=True)
