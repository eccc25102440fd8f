"""Exit codes, and the exceptions that end a peer with one of them."""

FINISHED = 0
FAILURE = 1
USAGE = 2
TRY_AGAIN = 75  # EX_TEMPFAIL of sysexits.h: a scheduler may requeue
STOPPED = 130


class Requeue(RuntimeError):
    """The peer cannot go on for want of others; what could be saved is saved. Exit code 75."""


class GivenUp(RuntimeError):
    """A deadline has passed and waiting longer is pointless; the text says for whom, how long, and what to do. Exit
    code 1."""


class Slept(RuntimeError):
    """This process was stopped for longer than the others take to call it dead: it must start again as a new peer."""


class Stopped(Exception):
    """The user (or the scheduler) asked the peer to stop. Exit code 130."""
