"""The page of ``mesh report``: one HTML file that fetches nothing and runs nothing.

What peers and users wrote passes ``e``. The page says so to the browser as well: its policy allows inline styles and no
more. Charts are there twice, for a wide window and for a narrow one, since text in a picture does not wrap.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import Any

from roles.report import charts
from roles.report.charts import Mark, Row, number
from roles.report.facts import PARTS, REST, Facts, Life

WIDE, HALF, NARROW = 1040, 492, 340
COLOURS = {name: f"c{n}" for n, name in enumerate([*PARTS.values(), REST])}
ENDS = {
    "trained": "good", "masked": "c3", "superseded": "c2", "failed": "bad", "lost": "c5", "in_flight": "faint",
    "held": "faint", "evaluated": "good",
}  # fmt: skip
OF_EVENTS = {"died": "bad", "error": "bad", "joined": "good", "left": "dim", "warning": "warn"}
MOST_WHYS = 20
LONG_PAUSE = 0.1  # of the time that somebody was there
MOST_SAID = 8  # marks with words in the first chart

STYLE = """
:root{color-scheme:light dark;--page:#f5f6f8;--card:#fff;--ink:#1d2129;--dim:#626a76;--line:#dfe3e8;--grid:#e8ebef;
--good:#2e8b57;--bad:#c0392b;--warn:#b7791f;--faint:#b9c0ca;--accuracy:#1f5fbf;--reward:#e08b3c;
--c0:#3b76c4;--c1:#8fb4e3;--c2:#e0a13c;--c3:#7b6bc0;--c4:#3aa394;--c5:#b5628f;--c6:#c9cfd8;--c7:#8b939e}
@media(prefers-color-scheme:dark){:root{--page:#14171c;--card:#1d2128;--ink:#e4e7ec;--dim:#9aa3b0;--line:#323843;
--grid:#2b313b;--good:#4fb87f;--bad:#f0695a;--warn:#e2b04a;--faint:#4b535f;--accuracy:#6ea8fe;--reward:#f0a35e;
--c0:#5b95e5;--c1:#345a8f;--c2:#e0a850;--c3:#9a8be0;--c4:#4fbfae;--c5:#d282ad;--c6:#434b57;--c7:#79828f}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);font:15px/1.5 system-ui,"Segoe UI",Roboto,"Helvetica Neue",Arial,
sans-serif}
main{max-width:1120px;margin:0 auto;padding:28px 20px 60px}
h1{font-size:26px;margin:0;overflow-wrap:anywhere}h2{font-size:18px;margin:0 0 2px;line-height:1.35}
p{margin:0 0 12px}.dim{color:var(--dim)}.bad{color:var(--bad)}.good{color:var(--good)}.warn{color:var(--warn)}
.state{display:inline-block;padding:1px 10px;border:1px solid;border-radius:99px;font-size:13px;vertical-align:4px}
header p{margin:4px 0 18px;overflow-wrap:anywhere}
section{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:18px 20px;margin:0 0 18px;
min-width:0}
.pair{display:grid;grid-template-columns:1fr 1fr;gap:0 18px}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:12px;margin-bottom:18px}
.tiles div{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:12px 14px;min-width:0}
.tiles b{display:block;font-size:21px;line-height:1.3;font-variant-numeric:tabular-nums}
.tiles span{color:var(--dim);font-size:13px;display:block;line-height:1.35}
svg{display:block;max-width:100%;height:auto;font-size:12px}svg text{fill:var(--ink)}svg text.dim{fill:var(--dim)}
.grid{stroke:var(--grid)}.mark{stroke-width:1.5;stroke-dasharray:4 3}.curve{fill:none;stroke-linejoin:round}
.narrow{display:none}
.keys{display:flex;flex-wrap:wrap;gap:2px 16px;margin:8px 0 0;padding:0;list-style:none;font-size:13px}
.keys i{display:inline-block;width:11px;height:11px;border-radius:3px;margin-right:6px}
.scroll{overflow-x:auto}
table{border-collapse:collapse;font-size:14px;font-variant-numeric:tabular-nums;width:100%}
th{font-weight:600;text-align:left;color:var(--dim)}td,th{padding:4px 14px 4px 0;border-bottom:1px solid var(--line);
vertical-align:top}td.n,th.n{text-align:right;white-space:nowrap;width:1%}td.w{overflow-wrap:anywhere}
tr:last-child td{border-bottom:0}
h3{font-size:14px;margin:16px 0 6px}h3 span{font-weight:400}
code,pre{font:13px/1.5 ui-monospace,"SF Mono",Menlo,Consolas,monospace}
pre{margin:10px 0 0;max-height:420px;overflow:auto;white-space:pre-wrap;overflow-wrap:anywhere}
summary{cursor:pointer;color:var(--dim)}
@media(max-width:760px){main{padding:16px 10px 40px}.pair{grid-template-columns:minmax(0,1fr)}
section{padding:14px}.wide{display:none}.narrow{display:block}.narrow svg{width:100%}
.tiles{grid-template-columns:1fr 1fr}h1{font-size:22px}td,th{padding-right:10px}}
"""


def e(value: object) -> str:
    return escape(str(value))


def page(facts: Facts) -> str:
    """The whole file."""
    title = f"{facts.name}: report of a run"
    return "".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">",
            '<meta name="viewport" content="width=device-width,initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            f"<title>{e(title)}</title><style>{STYLE}</style></head><body><main>",
            _head(facts),
            _tiles(facts),
            _learning(facts),
            f'<div class="pair">{_lag(facts)}{_time(facts)}</div>',
            _peers(facts),
            _ledger(facts),
            _happened(facts),
            f'<div class="pair">{_settings(facts)}<div>{_software(facts)}{_summary(facts)}</div></div>',
            "</main></body></html>\n",
        ]
    )


def section(id: str, title: str, *parts: str, text: str = "") -> str:
    said = f'<p class="dim">{e(text)}</p>' if text else ""
    return f'<section id="{id}"><h2>{e(title)}</h2>{said}{"".join(parts)}</section>'


def lacking(id: str, title: str, why: str) -> str:
    return section(id, title, text=f"Not to be seen here: {why}.")


def figure(draw: Callable[[float], str], wide: float = WIDE) -> str:
    return f'<div class="wide">{draw(wide)}</div><div class="narrow">{draw(NARROW)}</div>'


def keys(items: Iterable[tuple[str, str]]) -> str:
    """A legend: (colour, words)."""
    said = "".join(f'<li><i style="background:var(--{colour})"></i>{e(words)}</li>' for colour, words in items)
    return f'<ul class="keys">{said}</ul>'


def table(heads: Sequence[str], rows: Iterable[Sequence[object]], numeric: Sequence[int] = ()) -> str:
    """Cells are escaped; the columns of ``numeric`` stand at the right."""

    def cell(tag: str, n: int, value: object) -> str:
        return f'<{tag} class="{"n" if n in numeric else "w"}">{e(value)}</{tag}>'

    head = "".join(cell("th", n, h) for n, h in enumerate(heads))
    body = "".join("<tr>" + "".join(cell("td", n, v) for n, v in enumerate(row)) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def percent(share: float) -> str:
    return f"{share:.1%}" if 0 < share < 0.1 else f"{share:.0%}"


def many(n: int, what: str) -> str:
    return f"{n:,} {what}" if n != 1 else f"1 {what.removesuffix('s')}"


# ----------------------------------------------------------------------------------------------------------------------
# The sections, from top to bottom
# ----------------------------------------------------------------------------------------------------------------------


def _head(facts: Facts) -> str:
    colour = {"finished": "good", "goes on": "warn"}.get(facts.state, "bad")
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(facts.began)) if facts.began else "no peer was seen"
    seconds = facts.written - facts.began
    of = f" of {facts.steps}" if facts.steps else ""
    return (
        f'<header><h1>{e(facts.name)} <span class="state {colour}">{e(facts.state)}</span></h1>'
        f'<p class="dim">{e(when)}, {e(_duration(seconds))}, {facts.made}{of} steps · {e(facts.run)}</p></header>'
    )


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _tiles(facts: Facts) -> str:
    s = facts.summary
    tiles: list[tuple[str, str]] = []
    measured = [t for t in facts.tests if isinstance(t.get("eval_accuracy"), float)]
    if measured:
        first, last = measured[0]["eval_accuracy"], measured[-1]["eval_accuracy"]
        tiles.append((f"{first:.2f} → {last:.2f}", f"accuracy, steps {_at(measured[0])} to {_at(measured[-1])}"))
    if facts.rewards:
        tail = facts.rewards[-10:]
        tiles.append((f"{sum(r for _, r in tail) / len(tail):.3g}", f"reward, mean of the last {len(tail)} steps"))
    if facts.times:
        whole = sum(sum(parts.values()) for parts in facts.times.values())
        wait = sum(parts[PARTS["wait_s"]] for parts in facts.times.values())
        tiles.append(
            (f"{whole / len(facts.times):.2f} s", f"a step, {percent(wait / whole if whole else 0)} of it waiting")
        )
    if isinstance(s.get("tokens_per_s"), float):
        tiles.append((f"{s['tokens_per_s']:,.0f}", "sampled tokens a second"))
    roles = [life.role for life in facts.lives]
    if roles:
        died = sum(1 for h in facts.happened if h.kind == "died")
        tiles.append(
            (f"{roles.count('trainer')} + {roles.count('rollout')}", f"trainers and rollouts; {died or 'none'} died")
        )
    if facts.closes is not None:
        tiles.append(("closes" if facts.closes else "DOES NOT CLOSE", "the ledger: every group is in one account"))
    return f'<div class="tiles">{"".join(f"<div><b>{e(v)}</b><span>{e(t)}</span></div>" for v, t in tiles)}</div>'


def _at(test: dict[str, float]) -> str:
    return number(test.get("eval_version", test.get("step", 0.0)))


def _learning(facts: Facts) -> str:
    if why := facts.missing.get("learning"):
        return lacking("learning", "Reward and accuracy", why)
    tests = [
        (float(t.get("eval_version", 0)), t["eval_accuracy"], t.get("eval_low", t["eval_accuracy"]),
         t.get("eval_high", t["eval_accuracy"]))
        for t in facts.tests
    ]  # fmt: skip
    title, samples = "Reward by step", 0
    if len(tests) > 1:
        apart = tests[-1][2] > tests[0][3], tests[-1][3] < tests[0][2]
        verb = "rose" if apart[0] else "fell" if apart[1] else "did not change beyond its interval,"
        title = f"Accuracy on held-out prompts {verb} from {tests[0][1]:.2f} to {tests[-1][1]:.2f}"
        samples = int(facts.tests[-1].get("eval_samples", 0))
    elif tests:
        title = f"Reward by step; accuracy on held-out prompts is {tests[0][1]:.2f} at step {tests[0][0]:.0f}"
    marks = _marks(facts)
    last = max([facts.made, *(t[0] for t in tests)])
    items = [("reward", "reward of the training samples, and its moving average")] if facts.rewards else []
    if tests:
        items.append(
            ("accuracy", "accuracy on held-out prompts" + (f", n = {samples}, 95% interval" if samples else ""))
        )
    drawn = figure(lambda width: charts.learning(width, title, facts.rewards, tests, last, marks))
    return section("learning", title, drawn, keys(items))


def _marks(facts: Facts) -> list[Mark]:
    """Who came and went before the last step; what happened at one step to several is said together."""
    together: dict[tuple[int, str], list[str]] = {}
    for h in facts.happened:
        if h.kind in ("joined", "left", "died") and h.step is not None and h.step < facts.made:
            together.setdefault((h.step, h.kind), []).append(h.text.removesuffix(f" {h.kind}"))
    said = [(step, kind, f"{names[0]}{f' +{len(names) - 1}' if len(names) > 1 else ''} {kind}")
            for (step, kind), names in together.items()]  # fmt: skip
    return [Mark(step, words, OF_EVENTS[kind]) for step, kind, words in said[:MOST_SAID]]


def _lag(facts: Facts) -> str:
    if why := facts.missing.get("lag"):
        return lacking("lag", "How old the samples were", why)
    most = max([*facts.lags, facts.max_lag or 0])
    names = [str(lag) for lag in range(most + 1)]
    shares = [facts.lags.get(lag, 0.0) for lag in range(most + 1)]
    mean = sum(lag * share for lag, share in facts.lags.items())
    title = f"Samples were {mean:.2f} versions old on average when they were trained"
    text = f"Share of the samples by lag, mean of all steps; trainer.max_lag = {facts.max_lag}."
    drawn = figure(lambda w: charts.columns(w, title, names, shares, "versions between sampling and training"), HALF)
    return section("lag", title, drawn, text=text if facts.max_lag is not None else "")


def _time(facts: Facts) -> str:
    if why := facts.missing.get("time"):
        return lacking("time", "Where the time of a step goes", why)
    steps = [float(step) for step in facts.times]
    parts = {name: [facts.times[int(step)][name] for step in steps] for name in COLOURS}
    whole = sum(sum(seconds) for seconds in parts.values()) or 1.0
    shares = {name: sum(seconds) / whole for name, seconds in parts.items()}
    kept = [name for name in COLOURS if shares[name] >= 0.0005]
    largest = max(kept, key=lambda name: shares[name], default=REST)
    title = f"A step takes {whole / len(steps):.2f} s; {largest} is {percent(shares[largest])} of it"
    drawn = figure(lambda w: charts.stack(w, title, steps, [(n, COLOURS[n], parts[n]) for n in kept]), HALF)
    text = "Seconds of each step, mean of its trainers." if len(facts.trainers) > 1 else "Seconds of each step."
    heights = [sum(of.values()) for of in facts.times.values()]
    if max(heights) > 1.05 * charts.usual(heights):
        text += f" The slowest took {number(max(heights))} s and is cut off."
    return section("time", title, drawn, keys((COLOURS[n], f"{n} {percent(shares[n])}") for n in kept), text=text)


def _peers(facts: Facts) -> str:
    if why := facts.missing.get("peers"):
        return lacking("peers", "Who was there, and when", why)
    died = sorted({h.text.removesuffix(" died") for h in facts.happened if h.kind == "died"})
    late = sorted({h.text.removesuffix(" joined") for h in facts.happened if h.kind == "joined"})
    title = f"{many(len(facts.lives), 'peers')}; {_listed(died, 'died')}, {_listed(late, 'joined on the way')}"
    axis = Present(facts.lives)
    rows = [_row(life, axis) for life in facts.lives]
    terms = [(at - facts.began, f"term {term}") for at, _, term in facts.terms if term > facts.terms[0][2]]
    breaks = [(first, f"{_duration(last - first)} of nobody") for first, last in axis.pauses]
    turns = [Mark(axis.at(seconds), words, "dim") for seconds, words in sorted(terms + breaks)]
    until = max([last for row in rows for _, last, _ in row.bars] + [mark.x for row in rows for mark in row.marks])
    items = [("c0", "trainer"), ("c4", "rollout")]
    text = (
        "Full colour: it works; faint: it waits for others; in between: nobody knows. A cross stands where the others "
        "noticed a death, a ring where they saw a peer join or leave."
    )
    hosts = {life.host for life in facts.lives if life.host}
    if len(hosts) > 1:
        text += f" On {len(hosts)} hosts, whose clocks were brought together by the credits they share."
    drawn = figure(lambda width: charts.lives(width, title, rows, until, turns))
    return section("peers", title, drawn, keys(items), text=text)


def _listed(names: list[str], what: str) -> str:
    if not names:
        return f"none {what}"
    return f"{', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''} {what}"


class Present:
    """A time axis that leaves out pauses in which no peer was there, as before a run was resumed."""

    def __init__(self, lives: Iterable[Life]) -> None:
        spans = sorted((first, last) for life in lives for first, last, _ in life.spans)
        until, gaps = spans[0][0], []
        for first, last in spans:
            if first > until:
                gaps.append((until, first))
            until = max(until, last)
        present = until - spans[0][0] - sum(last - first for first, last in gaps)
        self.pauses = [(first, last) for first, last in gaps if last - first > LONG_PAUSE * present]

    def at(self, seconds: float) -> float:
        return seconds - sum(min(max(0.0, seconds - first), last - first) for first, last in self.pauses)


def _row(life: Life, axis: Present) -> Row:
    colours = {"died": "bad", "joined": "good", "left": "dim"}
    marks = [Mark(axis.at(at), f"{life.peer} {what}", colours[what]) for at, what in life.happened]
    bars = [(axis.at(first), axis.at(last), busy) for first, last, busy in life.spans]
    return Row(life.peer, "c0" if life.role == "trainer" else "c4", bars, marks)


def _ledger(facts: Facts) -> str:
    if why := facts.missing.get("ledger"):
        return lacking("ledger", "Where every group and token went", why)
    issued, tokens = dict(facts.groups), dict(facts.tokens)
    whole, delivered = issued.pop("issued", 0), tokens.pop("delivered", 0)
    says = "The ledger closes" if facts.closes else "THE LEDGER DOES NOT CLOSE"
    title = (
        f"{says}: {percent(issued.get('trained', 0) / whole if whole else 0)} of {whole:,} ordered groups were trained"
    )
    parts = [
        _account("groups ordered", whole, issued),
        _account("tokens delivered", delivered, tokens),
    ]
    if (evaluation := dict(facts.evaluation)).get("issued"):
        parts.append(_account("groups ordered for evaluation", evaluation.pop("issued", 0), evaluation))
    if facts.reasons:
        ordered = sorted(facts.reasons.items(), key=lambda item: -item[1])
        rows = [(*why.partition(": ")[::2], f"{n:,}") for why, n in ordered[:MOST_WHYS]]
        parts.append("<h3>Why groups were not trained</h3>" + table(("account", "why", "groups"), rows, (2,)))
    if facts.untrained:
        ordered = sorted(facts.untrained.items(), key=lambda item: -item[1])[:MOST_WHYS]
        head = f"{many(sum(facts.untrained.values()), 'prompts')} given up in their epoch"
        parts.append(f"<h3>{e(head)}</h3>" + table(("why", "prompts"), [(why, f"{n:,}") for why, n in ordered], (1,)))
    return section("ledger", title, *parts)


def _account(what: str, whole: int, parts: dict[str, int]) -> str:
    items = [(name.replace("_", " "), ENDS.get(name, "c7"), float(n)) for name, n in parts.items()]
    said = [(colour, f"{name} {n:,.0f} ({percent(n / whole if whole else 0)})") for name, colour, n in items if n]
    bar = figure(lambda width: charts.share(width, what, items)) if whole else ""
    nothing = ", ".join(f"none {name}" for name, _, n in items if not n)
    rest = f' <span class="dim">{e(nothing)}</span>' if nothing and whole else ""
    return f"<h3>{whole:,} {e(what)}{rest}</h3>{bar}{keys(said)}"


def _happened(facts: Facts) -> str:
    if why := facts.missing.get("happened"):
        return section("happened", "What happened", text=f"{why[0].upper()}{why[1:]}.")
    rows = [(f"{h.at - facts.began:,.1f} s", "" if h.step is None else h.step, h.kind, h.text) for h in facts.happened]
    return section("happened", "What happened", table(("time", "step", "kind", "what"), rows, (0, 1)))


def _settings(facts: Facts) -> str:
    if why := facts.missing.get("settings"):
        return lacking("settings", "Settings", why)
    body = table(("setting", "value", "default"), facts.changed)
    whole = f"<details><summary>all of them, config.toml</summary><pre>{e(facts.settings)}</pre></details>"
    return section("settings", f"{many(len(facts.changed), 'settings')} differ from the defaults", body, whole)


def _software(facts: Facts) -> str:
    if why := facts.missing.get("software"):
        return lacking("software", "Versions", why)
    names = list(dict.fromkeys(name for of in facts.software.values() for name in of))
    kinds: dict[tuple[str, ...], list[str]] = {}
    for peer, of in facts.software.items():
        kinds.setdefault(tuple(of.get(name, "–") for name in names), []).append(peer)
    alike = len(kinds) == 1
    heads = ["", *("all peers" if alike else ", ".join(peers) for peers in kinds.values())]
    rows = [(name, *(kind[n] for kind in kinds)) for n, name in enumerate(names)]
    title = "All peers ran the same software" if alike else "Peers ran different software"
    return section("software", title, table(heads, rows))


def _summary(facts: Facts) -> str:
    if why := facts.missing.get("summary"):
        return lacking("summary", "Summary", why)
    flat = [(k.replace("_", " "), _said(v)) for k, v in facts.summary.items() if not isinstance(v, dict | list)]
    return section("summary", "Summary", table(("", "at the end of the run"), flat))


def _said(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None:
        return "not measured"
    return number(value) if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
