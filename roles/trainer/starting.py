"""What a run directory already holds, and whether a trainer may begin, continue or only join there."""

from mesh.node import Node
from roles.trainer import checkpoint


def what_is_there(node: Node) -> tuple[checkpoint.Found, str]:
    """The newest whole checkpoint to continue from (or none), and why this trainer may join a run but not begin it
    (empty when it may). What was passed over is said.

    Raises ValueError, in one line, when there is nobody to join either."""
    found, others = checkpoint.newest(node.run.checkpoints), node.run.others()
    refusal = _refusal(node, found)
    if refusal and not others:
        raise ValueError(refusal)
    for text in found.skipped:
        node.log.warning(text)
    if not node.resume:
        return checkpoint.Found(None, None), refusal
    if found.state is None:
        last = checkpoint.missed(node.run.checkpoints)
        if last and not others:
            raise ValueError(
                f"{node.run.checkpoints} has nothing to resume from, though {last} was saved there (a disk that is not "
                f"mounted?); to begin anew choose another --run, or remove {node.run.path / checkpoint.SAVED}"
            )
        node.log.warning(f"nothing to resume in {node.run.checkpoints}: starting at step 0")
    return found, refusal


def _refusal(node: Node, found: checkpoint.Found) -> str:
    if node.resume or (found.state is None and not node.run.summary.exists()):
        return ""
    at = f"at step {found.state.version.number}" if found.state else "finished"
    return f"{node.run.path} holds a run {at}: continue it with --resume, or choose another --run"
