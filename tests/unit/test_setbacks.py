from roles.rollout.setbacks import HOPELESS, KINDS, Setbacks


def test_a_kind_of_failure_is_logged_at_its_first_tenth_and_hundredth_time():
    setbacks = Setbacks()
    said = {n: line for n in range(1, 1001) if (line := setbacks.failed(ValueError(f"prompt {n} of {n} tokens")))}
    assert said == {
        1: "prompt 1 of 1 tokens",
        10: "prompt 10 of 10 tokens (10 times so far)",
        100: "prompt 100 of 100 tokens (100 times so far)",
        1000: "prompt 1000 of 1000 tokens (1000 times so far)",
    }
    assert setbacks.failed(RuntimeError("else")) == "RuntimeError: else"
    assert setbacks.counts == {"prompt # of # tokens": 1000, "RuntimeError: else": 1}


def test_however_many_kinds_there_are_few_lines_are_logged():
    setbacks = Setbacks()
    said = [setbacks.failed(KeyError("x" * n)) for n in range(5000)]
    assert len([line for line in said if line]) == KINDS + 4, "the first, tenth, hundredth and thousandth of all others"
    assert sum(setbacks.counts.values()) == 5000


def test_so_many_failures_in_a_row_are_hopeless_and_a_success_is_hope():
    setbacks = Setbacks()
    for _ in range(HOPELESS - 1):
        setbacks.failed(KeyError("answer"))
    assert setbacks.hopeless() == ""
    setbacks.succeeded()
    setbacks.failed(KeyError("answer"))
    assert setbacks.hopeless() == ""
    for _ in range(HOPELESS - 1):
        setbacks.failed(KeyError("answer"))
    line = setbacks.hopeless()
    assert str(HOPELESS) in line
    assert line.endswith("the last: KeyError: 'answer'")


def test_an_error_of_several_lines_is_one():
    assert Setbacks().failed(RuntimeError("a\n  b")) == "RuntimeError: a b"
