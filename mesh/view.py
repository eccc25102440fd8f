"""The live view of a mesh: what an observer knows, drawn with rich."""

import time
from dataclasses import dataclass, field

from msgspec.structs import replace
from rich.console import Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from mesh.identity import PeerCard, PeerId
from transport.messages import Status

BARS = " ▁▂▃▄▅▆▇█"
NARROW = 80  # columns that everything fits
SUMMED = ("tokens_per_s", "superseded")  # over the trainers


@dataclass
class Seen:
    """What the observer knows: the cards of the living, the last Status of each, and what happened to processes."""

    run: str
    steps: int
    started: float = field(default_factory=time.time)
    cards: dict[PeerId, PeerCard] = field(default_factory=dict)
    status: dict[PeerId, tuple[float, Status]] = field(default_factory=dict)
    gone: dict[str, str] = field(default_factory=dict)
    marks: list[tuple[int, str]] = field(default_factory=list)

    def trainer(self) -> Status | None:
        """The last Status of the trainer that is furthest, alive or not; what each counts for itself is summed over
        the living."""
        known = {peer: s for peer, (_, s) in self.status.items() if "step" in s.figures}
        if not known:
            return None
        furthest = max(known.values(), key=lambda s: s.figures["step"])
        here = [s for peer, s in known.items() if peer in self.cards] or [furthest]
        sums = {
            name: sum(s.figures.get(name, 0.0) for s in here)
            for name in furthest.figures
            if name in SUMMED or name.startswith("ledger/")
        }
        return replace(furthest, figures=furthest.figures | sums)

    @property
    def step(self) -> int:
        status = self.trainer()
        return int(status.figures["step"]) if status else 0


def draw(seen: Seen, width: int = 80) -> Group:
    """The whole view, about 24 lines high."""
    status = seen.trainer()
    return Group(
        _headline(seen, status),
        _peers(seen, width),
        _curve(seen, status, width),
        _accounts(status),
        _events(seen, status),
    )


def line(seen: Seen) -> str:
    """The view in one line, for logs."""
    status = seen.trainer()
    f = status.figures if status else {}
    peers = sum(1 for c in seen.cards.values() if c.role != "observer")
    if not f:
        return f"{peers} peers, starting"
    return (
        f"step {f['step']:.0f}/{seen.steps}  accuracy {_share(f.get('accuracy'))}  "
        f"reward {_share(f.get('reward'))}  "
        f"lag {f.get('lag_mean', 0):.1f}  superseded {f.get('superseded', 0):.0f}  "
        f"masked {_share(f.get('masked_share'))}  "
        f"{f.get('tokens_per_s', 0):.0f} tok/s  waiting {_share(f.get('wait_share'))}  {peers} peers"
    )


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _headline(seen: Seen, status: Status | None) -> Panel:
    f = status.figures if status else {}
    grid = Table.grid(padding=(0, 3))
    names = ("step", "accuracy", "reward", "lag", "superseded", "masked", "tokens/s", "waiting")
    for _ in names:
        grid.add_column(justify="right")
    grid.add_row(*(Text(n, style="dim") for n in names))
    accuracy = _share(f.get("accuracy"))
    grid.add_row(
        Text(f"{f.get('step', 0):.0f}/{seen.steps}", style="bold"),
        Text(accuracy, style="bold green"),
        _share(f.get("reward")),
        f"{f.get('lag_mean', 0):.1f}",
        f"{f.get('superseded', 0):.0f}",
        _share(f.get("masked_share")),
        f"{f.get('tokens_per_s', 0):,.0f}",
        _share(f.get("wait_share")),
    )
    return Panel(
        grid,
        title=f"mesh · {seen.run} · {f.get('wall_s', time.time() - seen.started):.0f} s",
        title_align="left",
        border_style="cyan",
    )


def _peers(seen: Seen, width: int) -> Table:
    table = Table(box=None, padding=(0, 1), collapse_padding=True, header_style="dim")
    for name in ("peer", "state", "version", "tokens/s", "groups", "probe"):
        table.add_column(name, justify="left" if name in ("peer", "state") else "right", no_wrap=True)
    more = max(0, width - NARROW) // 2  # names and states give way to the numbers
    for card in sorted(seen.cards.values(), key=lambda c: (c.role != "trainer", c.name)):
        if card.role == "observer":
            continue
        status = seen.status.get(card.id, (0.0, None))[1]
        f = status.figures if status else {}
        version = (status.version if status else None) or card.version
        table.add_row(
            _cut(_name(card), 20 + more),
            Text(_cut(status.state if status else "…", 22 + more), style="green" if status else "dim"),
            str(version) if version else "–",
            f"{f.get('tokens_per_s', 0):,.0f}" if status else "",
            f"{f.get('groups', 0):.0f}" if status else "",
            f"{f['probe_difference']:.1e}" if "probe_difference" in f else "",
        )
    for name, how in sorted(seen.gone.items()):
        table.add_row(Text(_cut(name, 20 + more), style="red"), Text(_cut(how, 22 + more), style="red"))
    return table


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"


def _name(card: PeerCard) -> str:
    """With its role and host, where the name does not tell them."""
    name = card.name if "@" in card.name else f"{card.name}@{card.host}"
    return name if name.startswith(card.role) else f"{name} ({card.role})"


def _accounts(status: Status | None) -> Text:
    """Where the time of a step goes, and what became of the groups that were ordered, in two lines."""
    f = status.figures if status else {}
    text = Text()
    whole = f.get("time/step_s", 0.0)
    parts = {name[5:-2]: f[name] / whole for name in f if name.startswith("time/") and name != "time/step_s" and whole}
    if parts:
        shares = "  ".join(f"{name} {share:.0%}" for name, share in sorted(parts.items(), key=lambda p: -p[1])[:6])
        text.append(" step ", style="dim").append(f"{whole:.2f} s: {shares}\n")
    if groups := [f"{name[7:]} {f[name]:.0f}" for name in f if name.startswith("ledger/")]:
        text.append(" groups ", style="dim").append("  ".join(groups) + "\n")
    return text


def _curve(seen: Seen, status: Status | None, width: int, height: int = 6) -> Panel:
    """The reward of each step as bars, with marks below where a peer was killed or joined."""
    history = dict(status.history) if status else {}
    columns = max(20, min(width - 14, 100))
    values: list[float | None] = []
    for c in range(columns):
        lo, hi = c * seen.steps // columns, max(c * seen.steps // columns + 1, (c + 1) * seen.steps // columns)
        inside = [history[s] for s in range(lo + 1, hi + 1) if s in history]
        values.append(sum(inside) / len(inside) if inside else None)
    text = Text()
    for row in range(height, 0, -1):
        text.append(f"{row / height:4.2f} " if row in (height, height // 2) else "     ", style="dim")
        for v in values:
            level = 0 if v is None else max(0, min(8, round((v * height - (row - 1)) * 8)))
            text.append(BARS[level], style="green")
        text.append("\n")
    axis = [" "] * columns
    for step, label in seen.marks:
        axis[min(columns - 1, step * columns // max(1, seen.steps))] = "✗" if "kill" in label else "+"
    text.append("     " + "".join(axis), style="red")
    legend = "  ".join(f"{'✗' if 'kill' in label else '+'} {label}" for _, label in seen.marks)
    return Panel(
        text, title="reward by step" + (f"   {legend}" if legend else ""), title_align="left", border_style="dim"
    )


def _events(seen: Seen, status: Status | None, last: int = 5) -> Text:
    first: dict[str, float] = {}  # several peers see the same thing happen
    for when, what in sorted(e for _, s in seen.status.values() for e in s.events):
        first.setdefault(what, when)
    events = [(when, what) for what, when in first.items()][-last:]
    text = Text()
    for when, what in events:
        text.append(time.strftime(" %H:%M:%S ", time.localtime(when)), style="dim")
        text.append(what + "\n")
    return text
