"""reward.png: the curve of a run, from its metrics files. Accuracy on held-out prompts with its 95% interval, the
reward of the training samples behind it, and a mark where a peer joined, left or died."""

from pathlib import Path

from roles.metrics import read_rows

INK, ACCURACY, REWARD, GRID = "#22252b", "#1f5fbf", "#e08b3c", "#e6e8ec"
MARKS = {"died": "#c0392b", "joined": "#2e8b57", "left": "#7a7f87"}


def plot_run(directory: Path | str, target: Path | str | None = None, title: str = "") -> Path:
    """Draw ``directory``/metrics/*.jsonl into ``target`` (default ``directory``/reward.png) and return its path.

    Raises ValueError when there is nothing to draw."""
    directory = Path(directory)
    rows = [row for file in sorted((directory / "metrics").glob("*.jsonl")) for row in read_rows(file)]
    target = Path(target) if target else directory / "reward.png"
    return plot_rows(rows, target, title or directory.name)


def plot_rows(rows: list[dict], target: Path, title: str) -> Path:
    """``rows`` as ``roles.metrics`` writes them. Rows of several trainers at one step are averaged."""
    rewards: dict[int, list[float]] = {}
    accuracies: dict[int, dict] = {}
    for row in rows:
        step = row.get("step")
        if row.get("reward") is not None:
            rewards.setdefault(step, []).append(row["reward"])
        if row.get("eval_accuracy") is not None:
            accuracies[step] = row
    if not rewards and not accuracies:
        raise ValueError("no figures to draw: no row has a reward or an eval_accuracy yet")
    events = [(row["step"], row["event"], row.get("text", "")) for row in rows if row.get("event") in MARKS]

    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import MaxNLocator

    with plt.rc_context({"font.size": 10, "text.color": INK, "axes.labelcolor": INK, "xtick.color": INK}):
        figure, axes = plt.subplots(figsize=(7.2, 4.0), dpi=160, layout="constrained")
        if rewards:
            steps = sorted(rewards)
            means = [sum(rewards[s]) / len(rewards[s]) for s in steps]
            axes.plot(steps, means, color=REWARD, lw=0.8, alpha=0.35)
            axes.plot(steps, _smooth(means), color=REWARD, lw=1.6, label="reward of training samples")
        if accuracies:
            _points(axes, accuracies)
        low, high, ticks = scale(*axes.get_ylim())
        headroom = 0.36 * (high - low) if events else 0.0  # for the names of events, clear of the curves
        axes.set_ylim(low, high + headroom)
        axes.set_yticks(ticks)
        _mark(axes, events)
        axes.set(xlabel="optimizer step", title=title)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(axis="y", color=GRID, lw=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(length=0)
        figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=9)  # no curve passes there
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = target.with_name(f".{target.name}")  # a viewer never sees half a picture
        figure.savefig(scratch, format="png")
        plt.close(figure)
    scratch.replace(target)
    return target


def scale(low: float, high: float) -> tuple[float, float, list[float]]:
    """Limits and ticks of an axis that shows ``low`` to ``high``: for rewards and accuracies in [0, 1] always the same,
    so that a run that learns nothing looks like one."""
    from matplotlib.ticker import MaxNLocator

    if low > -0.1 and high < 1.1:  # [0, 1] and the margins around it
        return -0.02, 1.02, [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    return low, high, [float(t) for t in MaxNLocator(6, steps=[1, 2, 5, 10]).tick_values(low, high) if low <= t <= high]


def _points(axes, accuracies: dict[int, dict]) -> None:
    steps = sorted(accuracies)
    y = [accuracies[s]["eval_accuracy"] for s in steps]
    low = [a - accuracies[s].get("eval_low", a) for s, a in zip(steps, y, strict=True)]
    high = [accuracies[s].get("eval_high", a) - a for s, a in zip(steps, y, strict=True)]
    samples = int(accuracies[steps[-1]].get("eval_samples", 0))
    label = "accuracy on held-out prompts" + (f" (n = {samples}, 95% interval)" if samples else "")
    axes.errorbar(
        steps, y, yerr=[low, high], fmt="o-", ms=4.5, lw=1.8, capsize=2.5, color=ACCURACY, label=label, zorder=3
    )
    axes.annotate(
        f"{y[-1]:.2f}", (steps[-1], y[-1]), xytext=(6, 0), textcoords="offset points", va="center", color=ACCURACY
    )


def _mark(axes, events: list[tuple[int, str, str]]) -> None:
    """A thin line an event, its text upright at the top; those of one step share a line and a label."""
    by_step: dict[int, list[tuple[str, str]]] = {}
    for step, kind, text in events:
        label = text if kind in text else f"{kind} {text}".strip()
        if (kind, label) not in by_step.setdefault(step, []):
            by_step[step].append((kind, label))
    for step, happened in sorted(by_step.items()):
        colour = MARKS[happened[0][0]]
        names = ", ".join(label for _, label in happened[:2]) + (f" +{len(happened) - 2}" if len(happened) > 2 else "")
        axes.axvline(step, color=colour, lw=1.0, ls=(0, (4, 3)), zorder=1)
        axes.annotate(
            names, (step, 0.99), xycoords=("data", "axes fraction"), xytext=(-3, 0), textcoords="offset points",
            rotation=90, ha="right", va="top", fontsize=8, color=colour,
        )  # fmt: skip


def _smooth(values: list[float], weight: float = 0.8) -> list[float]:
    """Exponential moving average, corrected for its start."""
    out, mean, total = [], 0.0, 0.0
    for value in values:
        mean, total = weight * mean + (1 - weight) * value, weight * total + (1 - weight)
        out.append(mean / total)
    return out
