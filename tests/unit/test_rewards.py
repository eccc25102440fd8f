"""Rewards from real worker processes, with reward functions that do everything wrong there is."""

import asyncio
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from mesh.config import Rollout, Task
from roles.rollout.reward_worker import outcome, outcomes
from roles.rollout.rewards import RewardPool, Scored
from roles.rollout.tasks.base import Prompt

FUNCTIONS = '''
import os, re, signal, sys, time

def length(prompts, completions, **columns):
    return [float(len(c)) for c in completions]

def by_kind(prompts, completions, **columns):
    """The completion says what is to go wrong."""
    word = completions[0]
    if word == "raise": raise KeyError("no such thing")
    if word == "exit": sys.exit(3)
    if word == "crash": os.kill(os.getpid(), signal.SIGSEGV)
    if word == "sleep": time.sleep(3600)
    if word == "linger": open("lingering", "w").close(); time.sleep(0.3)
    if word == "C": re.match("(a+)+$", "a" * 40 + "b")
    if word == "print": [print("x" * (1 << 20)) for _ in range(256)]
    if word == "print and hang": print("the last words", flush=True); time.sleep(3600)
    if word == "few": return [1.0] * (len(completions) - 1)
    if word == "number": return 1.0
    if word == "odd": return [1, None, float("nan"), float("inf"), "1.0", True, ValueError("bad one"), 10**400]
    if word == "array":
        import numpy
        return numpy.arange(len(completions), dtype=numpy.float32)
    if word == "scalars":
        import numpy
        return [numpy.float32(0.5), numpy.int64(2)]
    if word == "fork":
        pid = os.fork()
        return [float(pid > 0)] * len(completions)  # both return
    if word == "orphan":
        if os.fork() == 0:
            open(completions[1], "w").write(str(os.getpid()))
            time.sleep(3600)
        time.sleep(3600)
    if word == "alarm":
        def ring(*_): raise TimeoutError("the alarm rang")
        signal.signal(signal.SIGALRM, ring)
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        time.sleep(3600)
    if word == "alarm left":
        signal.signal(signal.SIGALRM, lambda *_: 1 / 0)
        signal.setitimer(signal.ITIMER_REAL, 0.01)
    if word == "write": os.write(1, b"not an answer"); sys.stdin.read()
    if word == "vandal":
        for fd in range(3, 64):
            try: os.write(fd, b"\\xff" * 64)
            except OSError: pass
    if word == "environment": return [float(any(k.startswith("MESH_") for k in os.environ))] * len(completions)
    return [1.0] * len(completions)

def echo(prompts, completions, answer, **columns):
    assert prompts[0][0]["content"] == "hello"
    assert completions[0][0]["role"] == "assistant"
    assert columns == {"big": [2**80] * 2, "odd": ["\\ud800"] * 2, "deep": [{"a": [1, None]}] * 2}
    return [float(c[-1]["content"] == a) for c, a in zip(completions, answer)]
'''


@pytest.fixture
def directory(tmp_path, monkeypatch):
    (tmp_path / "judges.py").write_text(FUNCTIONS)
    (tmp_path / "broken.py").write_text("import a_package_that_is_not_there\n")
    (tmp_path / "random.py").write_text("raise RuntimeError('a file of the user was taken for the standard library')\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def workers() -> list[psutil.Process]:
    """The reward workers of this process; other tests may have left helpers of their own."""
    return [child for child in psutil.Process().children() if "roles.rollout.reward_worker" in child.cmdline()]


def run(body, *, function="by_kind", timeout_s=20.0, workers=1, reward=None):
    """``await body(pool, score)`` with a started pool; score takes completions and returns Scored."""

    async def whole():
        reward_name = reward if reward is not None else f"judges:{function}"
        pool = RewardPool(Task(reward=reward_name), Rollout(reward_timeout_s=timeout_s, reward_workers=workers))
        await pool.start()
        try:
            return await body(pool, lambda *words: pool.score(Prompt(0, "p", {"answer": "a"}), words))
        finally:
            await pool.close()

    return asyncio.run(whole())


def test_rewards_come_back_in_order_and_are_counted(directory):
    async def body(pool, score):
        assert await score("a", "bbb", "") == [Scored(1.0), Scored(3.0), Scored(0.0)]
        assert pool.counts == {"ok": 3}

    run(body, function="length")


def test_a_function_gets_chats_for_chats_and_its_columns_as_they_were(directory):
    async def body(pool, score):
        columns = {"answer": "b", "big": 2**80, "odd": "\ud800", "deep": {"a": [1, None]}}
        chat = Prompt(0, [{"role": "user", "content": "hello"}], columns)
        assert await pool.score(chat, ["a", "b"]) == [Scored(0.0), Scored(1.0)]

    run(body, function="echo")


def test_everything_that_is_not_a_number_is_no_reward_and_says_why(directory, caplog):
    async def body(pool, score):
        wanted = [(1.0, ""), (None, "none"), (None, "nonfinite"), (None, "nonfinite"), (None, "type"), (1.0, "")]
        wanted += [(None, "exception"), (None, "nonfinite")]
        assert await score("odd", *"1234567") == [Scored(*w) for w in wanted]
        assert await score("few", "x") == [Scored(None, "count")] * 2
        assert await score("number", "x") == [Scored(None, "count")] * 2
        assert await score("array", "x", "y") == [Scored(0.0), Scored(1.0), Scored(2.0)]
        assert await score("scalars", "x") == [Scored(0.5), Scored(2.0)]
        assert pool.counts == {"ok": 7, "none": 1, "nonfinite": 3, "type": 1, "exception": 1, "count": 4}

    run(body)
    assert "by_kind returned 1 rewards for 2 completions" in caplog.text
    assert "by_kind returned float, not a list of 2 rewards" in caplog.text


def test_an_exception_keeps_its_traceback_once(directory, caplog):
    async def body(pool, score):
        for _ in range(3):
            assert await score("raise", "x") == [Scored(None, "exception")] * 2
        assert await score("exit") == [Scored(None, "exception")]
        assert await score("fine") == [Scored(1.0)]
        assert pool.counts == {"exception": 7, "ok": 1}

    run(body)
    assert caplog.text.count("KeyError: 'no such thing'") == 1
    assert "judges.py" in caplog.text


@pytest.mark.parametrize("word", ["sleep", "C"])
def test_a_call_that_hangs_is_stopped_and_the_next_one_works(directory, word):
    async def body(pool, score):
        assert await score(word, "x") == [Scored(None, "timeout")] * 2
        pool.timeout_s = 20.0
        assert await score("fine") == [Scored(1.0)]
        assert pool.counts == {"timeout": 2, "restarts": 1, "ok": 1}

    run(body, timeout_s=0.3)


def test_a_crash_costs_its_own_completions_only_and_is_named(directory, caplog):
    async def body(pool, score):
        results = await asyncio.gather(score("crash", "x"), *(score("fine") for _ in range(20)))
        assert results[0] == [Scored(None, "died")] * 2
        assert results[1:] == [[Scored(1.0)]] * 20

    run(body, workers=2)
    assert f"exit status -{int(signal.SIGSEGV)}" in caplog.text


def test_a_worker_that_was_killed_while_idle_costs_nothing(directory):
    async def body(pool, score):
        (child,) = workers()
        child.kill()
        child.wait(5)
        assert await score("fine") == [Scored(1.0)]
        assert pool.counts == {"restarts": 1, "ok": 1}

    run(body)


def test_printing_without_end_and_writing_to_every_descriptor_disturb_nothing(directory, caplog):
    async def body(pool, score):
        assert await score("print") == [Scored(1.0)]
        assert await score("write") == [Scored(1.0)]
        assert await score("vandal") == [Scored(None, "died")]
        assert await score("fine") == [Scored(1.0)]
        pool.timeout_s = 0.3
        assert await score("print and hang") == [Scored(None, "timeout")]

    run(body, timeout_s=60.0)
    assert "it printed last: the last words" in caplog.text


def test_forks_and_alarms_stay_with_the_call_that_made_them(directory):
    async def body(pool, score):
        assert await score("fork", "x") == [Scored(1.0)] * 2
        assert await score("alarm") == [Scored(None, "exception")]
        assert await score("alarm left") == [Scored(1.0)]
        await asyncio.sleep(0.05)  # long enough for the alarm, had it been left
        assert await score("fine") == [Scored(1.0)]
        assert pool.counts["restarts"] == 0

    run(body)


def test_what_a_stopped_function_forked_ends_with_it(directory):
    note = directory / "child"

    async def body(pool, score):
        assert await score("orphan", str(note)) == [Scored(None, "timeout")] * 2

    run(body, timeout_s=1.0)
    assert gone(int(note.read_text()))


def test_a_cancelled_call_keeps_its_worker(directory):
    async def body(pool, score):
        (child,) = workers()
        task = asyncio.ensure_future(score("linger"))
        async with asyncio.timeout(20):
            while not (directory / "lingering").exists():
                await asyncio.sleep(0.005)
        task.cancel()
        assert isinstance((await asyncio.gather(task, return_exceptions=True))[0], asyncio.CancelledError)
        assert await score("fine") == [Scored(1.0)]
        assert child in workers()
        assert pool.counts == {"ok": 2}

    run(body)


def test_a_cancelled_call_that_hangs_is_stopped_at_its_deadline(directory):
    async def body(pool, score):
        task = asyncio.ensure_future(score("sleep"))
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert await score("fine") == [Scored(1.0)]
        assert pool.counts == {"timeout": 1, "restarts": 1, "ok": 1}

    run(body, timeout_s=1.0)


def test_the_mesh_secrets_are_not_in_the_workers_environment(directory, monkeypatch):
    monkeypatch.setenv("MESH_SECRET", "open sesame")

    async def body(pool, score):
        assert await score("environment") == [Scored(0.0)]

    run(body)


@pytest.mark.parametrize(
    ("reward", "said"),
    [
        ("judges:lenght", 'task.reward = "judges:lenght": lenght does not exist in judges; did you mean length?'),
        ("jugdes:length", 'task.reward = "jugdes:length": cannot import jugdes: ModuleNotFoundError'),
        ("broken:f", "cannot import broken: ModuleNotFoundError: No module named 'a_package_that_is_not_there'"),
        ("judges:", 'task.reward = "judges:": write it as package.module:function'),
        ("exakt", 'task.reward = "exakt" is unknown; did you mean exact?'),
    ],
)
def test_a_function_that_cannot_be_had_is_one_clear_error_at_the_start(directory, reward, said):
    async def body(pool, score):
        pytest.fail("it started")

    with pytest.raises(ValueError, match=r"task\.reward") as error:
        run(body, reward=reward, workers=2)
    assert said in str(error.value)
    assert "\n" not in str(error.value)
    assert not workers()


def test_no_worker_outlives_a_parent_that_was_killed(directory):
    script = (
        "import asyncio, psutil\n"
        "from mesh.config import Rollout, Task\n"
        "from roles.rollout.rewards import RewardPool\n"
        "from roles.rollout.tasks.base import Prompt\n"
        "async def main():\n"
        "    pool = RewardPool(Task(reward='judges:by_kind'), Rollout(reward_timeout_s=3600))\n"
        "    await pool.start()\n"
        "    print(psutil.Process().children()[0].pid, flush=True)\n"
        "    await pool.score(Prompt(0, 'p'), ['C'])\n"
        "asyncio.run(main())\n"
    )
    root = str(Path(__file__).resolve().parents[2])
    env = os.environ | {"PYTHONPATH": root, "PYTHONSAFEPATH": "1"}
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, env=env, text=True)
    worker = int(parent.stdout.readline())
    assert psutil.pid_exists(worker)
    parent.kill()
    parent.wait(10)
    parent.stdout.close()
    assert gone(worker)


def test_outcomes_of_odd_values():
    assert outcome(True).reward == 1.0
    assert outcome([1.0]).reason == "type"
    assert outcome(b"1").reason == "type"
    found, fault = outcomes((0.5, "x"), 2, "f")
    assert [o.reason for o in found] == ["", "type"]
    assert str(fault) == "f returned a str as a reward"


def gone(pid: int, timeout_s: float = 10.0) -> bool:
    """Whether the process ends in time; one that is a zombie of somebody else has ended."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.01)
    return False


@pytest.fixture(autouse=True)
def log_level(caplog):
    caplog.set_level(logging.WARNING)
