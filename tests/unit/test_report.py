"""The page of ``mesh report``, from run directories made here: of runs that ended, died, wrote nothing or nonsense."""

import json
import os
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mesh.rundir import RunDir
from mesh.version import Ballot, Version
from roles.report import charts, write_report
from roles.report.facts import gather
from roles.report.page import Present
from roles.trainer.ledger import Ledger
from transport.accounts import Delivered, Ended, Issued, Trained

BEGAN = 1_800_000_000.0
NASTY = "rollout-1<img src=x onerror=alert(1)>&\"'"
STEPS = 12
SECTIONS = ["learning", "lag", "time", "peers", "ledger", "happened", "settings", "software", "summary"]
VOID = {"meta"}


def row(step, trainer):
    wait = 0.5 + 0.1 * trainer
    return {
        "time": BEGAN + step, "step": step, "reward": step / 20, "lag_0": 0.25, "lag_1": 0.5, "lag_2": 0.25,
        "term": 1.0 if step < 6 else 2.0, "time/wait_s": wait, "time/learn_s": 0.25, "time/step_s": wait + 0.35,
    }  # fmt: skip


def evaluation(step, value):
    return {"time": BEGAN + step, "step": step, "eval_version": step, "eval_accuracy": value,
            "eval_low": value - 0.05, "eval_high": value + 0.05, "eval_samples": 128.0}  # fmt: skip


def lines(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))


@pytest.fixture
def run(tmp_path):
    """Two trainers and two rollouts; one rollout died at step 5, and has an absurd name."""
    directory = tmp_path / "run"
    died = {"time": BEGAN + 5.5, "step": 5, "event": "died", "text": f"{NASTY} died"}
    seen_later = died | {"time": BEGAN + 5.9}
    warned = {"time": BEGAN + 7, "step": 7, "event": "warning", "text": "<script>alert(2)</script> is low"}
    steps = range(1, STEPS + 1)
    lines(directory / "metrics" / "trainer-0.jsonl",
          [evaluation(0, 0.1), *(row(n, 0) for n in steps), died, warned, evaluation(STEPS, 0.6)])  # fmt: skip
    lines(directory / "metrics" / "trainer-1.jsonl", [*(row(n, 1) for n in steps), seen_later])
    for peer, role, until in (("trainer-0", "trainer", 12), ("rollout-0", "rollout", 12), (NASTY, "rollout", 5)):
        header = {"peer": peer, "id": peer, "role": role, "host": "a", "time": BEGAN, "software": {"torch": "2.13.0"}}
        made = {"span": "generate", "lane": "credits", "at": BEGAN + until / 4, "s": until / 4}
        wait = {"span": "wait for credit", "lane": "main", "at": BEGAN + until / 2, "s": until / 2}
        lines(directory / "spans" / f"{peer[:9]}.jsonl", [header, made, wait])
    (directory / "config.toml").write_text('[run]\nname = "a <b>run"\nsteps = 20\n[trainer]\nmax_lag = 2\n')
    ledger = Ledger(directory / "ledger" / "t.jsonl", peer="t", run="r")
    for n in range(4):
        ledger.append(Issued(n, "r", 0, n, 0))
        ledger.append(Delivered(n, 10))
    ledger.append(Trained([0, 1, 2], Version(Ballot(1, "t"), 0), [4, 0, 0]))
    ledger.append(Ended("superseded", [3], "age <i>"))
    ledger.close()
    return directory


class Page(HTMLParser):
    """Tags that are not closed, or closed twice, are errors; so is whatever could make a browser fetch or run."""

    def __init__(self, text):
        super().__init__()
        self.open, self.ids, self.words, self.svgs = [], [], [], 0
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        assert tag not in ("script", "link", "iframe", "object", "embed", "img", "base", "form", "image", "use")
        for name, value in attributes:
            assert name not in ("src", "href", "srcset", "xlink:href", "action", "data"), (tag, name)
            assert not name.startswith("on"), (tag, name)
            assert "url(" not in (value or "")
            if name == "id":
                self.ids.append(value)
        self.svgs += tag == "svg"
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)

    @property
    def text(self):
        return " ".join("".join(f"{w}\n" for w in self.words).split())


def written(run):
    return write_report(run).read_text()


def test_what_the_page_says_is_what_the_files_say(run):
    facts = gather(run)
    assert facts.rewards == [(n, n / 20) for n in range(1, STEPS + 1)]
    assert facts.lags == {0: 0.25, 1: 0.5, 2: 0.25}
    assert [t["eval_accuracy"] for t in facts.tests] == [0.1, 0.6]
    assert facts.times[3]["waiting for groups"] == pytest.approx(0.55), "the mean of both trainers"
    assert facts.times[3]["rest"] == pytest.approx(0.1)
    assert [(step, term) for _, step, term in facts.terms] == [(1, 1), (6, 2)]
    assert [(h.at - BEGAN, h.step, h.kind) for h in facts.happened] == [(5.5, 5, "died"), (7, 7, "warning")]
    lives = {life.peer: life for life in facts.lives}
    assert set(lives) == {"trainer-0", "trainer-1", "rollout-0", NASTY}
    assert lives[NASTY].happened == [(5.5, "died")]
    (*unknown, none), (*known, cells) = lives["rollout-0"].spans
    assert (unknown, none, known) == ([0.0, 3.0], [], [3.0, 12.0])
    third = len(cells) / 3
    assert sum(cells) == pytest.approx(third), "it worked for a third of the time of which there are spans"
    assert cells[: int(third)] == pytest.approx([1.0] * int(third))
    page = Page(written(run))
    for said in (
        "Accuracy on held-out prompts rose from 0.10 to 0.60",
        "Samples were 1.00 versions old on average",
        "A step takes 0.90 s; waiting for groups is 61% of it",
        "trained 3 (75%)", "superseded 1 (25%)", "age <i>",
        "trained 26 (65%)", "masked 4 (10%)",
        "The ledger closes: 75% of 4 ordered groups were trained",
        "12 of 20 steps", "torch 2.13.0", "trainer.max_lag = 2",
    ):  # fmt: skip
        assert said in page.text, said
    assert page.ids == SECTIONS
    assert page.svgs == 2 * 6, "each for a wide window and for a narrow one"


def test_what_others_wrote_is_text_and_nothing_is_fetched(run):
    text = written(run)
    page = Page(text)
    assert NASTY in page.text
    assert "<script>alert(2)</script> is low" in page.text
    assert "a <b>run" in page.text
    assert "://" not in text
    assert "@import" not in text
    assert re.search(r"default-src 'none'", text)


def test_of_an_empty_directory_every_section_says_what_is_missing(tmp_path):
    page = Page(written(tmp_path))
    assert page.ids == SECTIONS
    assert page.text.count("Not to be seen here") == len(SECTIONS) - 1
    assert "ended before its last step" in page.text
    with pytest.raises(ValueError, match="is not a run directory"):
        write_report(tmp_path / "nothing")


@pytest.mark.parametrize("part", ["metrics", "spans", "ledger", "config.toml"])
def test_a_run_that_lacks_a_part_has_a_report_of_the_rest(run, part):
    path = run / part
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    text = Page(written(run)).text
    assert "Not to be seen here" in text
    assert ("Accuracy on held-out prompts rose" in text) == (part != "metrics")
    assert ("The ledger closes" in text) == (part != "ledger")


def test_files_that_a_kill_tore_or_that_contradict_themselves_do_no_harm(run):
    for path in run.rglob("*.jsonl"):
        with open(path, "a") as file:
            file.write('{"time": "x", "step": null, "event": "died", "text": 3}\n{"time": 1e400, "rew')
    (run / "summary.json").write_text('{"ledger": 3')
    (run / "config.toml").write_text("[run\n")
    text = Page(written(run)).text
    assert "not a ledger record" in text
    assert "summary.json cannot be read" in text
    assert "Accuracy on held-out prompts rose" in text


def test_a_pause_before_a_resume_is_left_out_of_the_timeline(run):
    path = run / "spans" / "rollout-0.jsonl"
    header, *rows = [json.loads(line) for line in path.read_text().splitlines()]
    again = [r | {"at": r["at"] + 3600} for r in rows]
    lines(path, [header, *rows, header | {"id": "again", "time": BEGAN + 3600}, *again])
    axis = Present(gather(run).lives)
    assert axis.pauses == [(12.0, 3600.0)]
    assert [axis.at(t) for t in (5.0, 12.0, 2000.0, 3600.0, 3606.0)] == [5.0, 12.0, 12.0, 12.0, 18.0]
    assert "60 min of nobody" in Page(written(run)).text


def test_the_same_words_much_later_are_another_event(run):
    with open(run / "metrics" / "trainer-1.jsonl", "a") as file:
        died = {"time": BEGAN + 605.5, "step": 5, "event": "died", "text": f"{NASTY} died"}
        file.write(json.dumps(died) + "\n")
    assert [h.at - BEGAN for h in gather(run).happened if h.kind == "died"] == [5.5, 605.5]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just(10**400),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
    max_leaves=4,
)


@given(data=st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_stands_in_a_field_there_is_a_page(run, data):
    paths = sorted([*run.rglob("*.jsonl"), run / "summary.json"])
    (run / "summary.json").write_text(
        '{"steps": 12, "tokens_per_s": 3.5, "ledger": {"issued": 4}, "ledger_tokens": {}}'
    )
    path = data.draw(st.sampled_from(paths))
    before = path.read_text()
    rows = before.splitlines()
    number = data.draw(st.integers(0, len(rows) - 1))
    row = json.loads(rows[number])
    row[data.draw(st.sampled_from(sorted(row)))] = data.draw(JSON)
    rows[number] = json.dumps(row)
    path.write_text("\n".join(rows) + "\n")
    assert Page(written(run)).ids == SECTIONS
    path.write_text(before)


def test_a_run_that_is_held_by_a_trainer_goes_on(run):
    held = RunDir(run).claim("trainer")
    assert gather(run).state == "goes on"
    os.close(held)
    assert gather(run).state == "ended before its last step"


def test_ticks_are_round_numbers_within_the_range():
    assert charts.ticks(0, 1, 5) == [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert charts.ticks(-3.2, 1.7, 5) == [-3.0, -2.0, -1.0, 0.0, 1.0]
    assert charts.ticks(0, 2, 6, whole=True) == [0, 1, 2]
    assert charts.ticks(5, 5, 5) == [5]


def test_a_chart_of_a_long_run_is_no_larger_than_one_of_its_width():
    long = [(float(n), n % 7 / 7) for n in range(100_000)]
    assert len(charts.learning(340, "", long, [], 100_000, [])) < 20_000
    assert len(charts.stack(340, "", [x for x, _ in long], [("a", "c0", [y for _, y in long])])) < 20_000


FRAMES = """<!doctype html><body><pre id="out"></pre>
{frames}<script>
onload = () => {{
  const seen = [...document.querySelectorAll('iframe')].map(f => {{
    const page = f.contentDocument.documentElement;
    const out = [...page.querySelectorAll('section *')].filter(e => !e.closest('.scroll') &&
      e.getBoundingClientRect().right > page.clientWidth + 1).length;
    return [f.clientWidth, page.scrollWidth - page.clientWidth, out, page.querySelectorAll('section').length];
  }});
  document.getElementById('out').textContent = JSON.stringify(seen);
}}
</script></body>"""


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium in PATH")
def test_in_a_browser_nothing_is_wider_than_the_window_and_nothing_is_wrong(run, tmp_path):
    write_report(run, tmp_path / "report.html")
    frames = "".join(
        f'<iframe src="report.html" width="{w}" height="900" frameborder="0"></iframe>' for w in (400, 1280)
    )
    (tmp_path / "frames.html").write_text(FRAMES.format(frames=frames))
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--allow-file-access-from-files"]
    profile = f"--user-data-dir={tmp_path / 'profile'}"
    command = ["chromium", *flags, profile, "--dump-dom", f"file://{tmp_path}/frames.html"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    seen = json.loads(re.search(r'<pre id="out">(.*?)</pre>', done.stdout)[1])
    assert seen == [[400, 0, 0, len(SECTIONS)], [1280, 0, 0, len(SECTIONS)]]
    assert [line for line in done.stderr.splitlines() if "CONSOLE" in line] == []
