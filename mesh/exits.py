"""Exit codes, and the exceptions that end a peer with one of them."""

FINISHED = 0
FAILURE = 1
USAGE = 2
TRY_AGAIN = 75  # EX_TEMPFAIL of sysexits.h: a scheduler may requeue
STOPPED = 130

NO_MEMORY = ("out of memory", "can't allocate memory", "Cannot allocate memory")


class Requeue(RuntimeError):
    """The peer cannot go on for want of others; what could be saved is saved. Exit code 75."""


class GivenUp(RuntimeError):
    """A deadline has passed and waiting longer is pointless; the text says for whom, how long, and what to do. Exit
    code 1."""


class Slept(RuntimeError):
    """This process was stopped for longer than the others take to call it dead: it must start again as a new peer."""


class Stopped(Exception):
    """The user (or the scheduler) asked the peer to stop. Exit code 130."""


def parting(error: BaseException | None) -> str:
    """What a peer that ends with ``error`` tells the others, in one line; they show it beside its name."""
    if error is None:
        return "finished"
    if isinstance(error, Stopped):
        return "stopped"
    if isinstance(error, Requeue | GivenUp | Slept | ValueError):
        return " ".join(str(error).split())
    return unexpected(error)


def unexpected(error: BaseException) -> str:
    """An error that nobody foresaw, in one line. One that many meet, of which libraries tell in their own ways, comes
    with what to do."""
    text = " ".join(str(error).split())
    if isinstance(error, MemoryError) or any(sign in text for sign in NO_MEMORY):
        return (
            f"out of memory: {text[:300]}; lower trainer.micro_batch_tokens (of a trainer) or rollout.max_batch (of a "
            "rollout), start fewer peers on this host, or take a smaller model"
        )
    return f"{type(error).__name__}: {text}"
