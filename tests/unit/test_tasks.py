"""Tasks: prompts that are apart, rewards that are exact, completions of one and of several turns."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from mesh.config import Task as TaskSettings
from mesh.version import Ballot, Version
from roles.rollout.engines.base import Sampled, sample_seed
from roles.rollout.tasks import Sampler, Transcript, load_reward, load_task
from roles.rollout.tasks.base import Prompt, encode, single_turn
from transport.messages import Span

V = Version(Ballot(1, "aa"), 3)


def contents(prompts):
    return [json.dumps(p.content) for p in prompts]


# -- sort --------------------------------------------------------------------------------------------------------------


def test_sort_has_distinct_prompts_and_holds_some_out():
    task = load_task(TaskSettings())
    train, heldout = contents(task.train), contents(task.heldout)
    assert (len(train), len(heldout)) == (99_488, 512)  # all there are, less those held out
    assert len({*train, *heldout}) == 100_000
    assert task.train[0].index == 0
    assert task.train[-1].index == 99_487
    prompt = task.heldout[7]
    assert prompt.columns["answer"] == "".join(sorted(prompt.content[:-1]))
    assert prompt.content[-1] == "="


def test_sort_rewards_the_exact_answer_only():
    reward = load_reward(TaskSettings())
    completions = ["12458", " 12458\n", "1245", "124588", "52814"]
    assert reward(["52814="] * 5, completions, answer=["12458"] * 5) == [1, 1, 0, 0, 0]


@given(length=st.integers(1, 9), seed=st.integers(0, 99), train=st.integers(1, 300), heldout=st.integers(0, 9))
@settings(max_examples=30, deadline=None)
def test_sort_is_repeatable_and_apart_at_any_size(length, seed, train, heldout):
    made = [
        load_task(TaskSettings(seed=seed, train_prompts=train, heldout_prompts=heldout, options={"length": length}))
        for _ in range(2)
    ]
    assert made[0].digest == made[1].digest
    assert contents(made[0].train) == contents(made[1].train)
    assert not set(contents(made[0].train)) & set(contents(made[0].heldout))
    assert len(made[0].heldout) == heldout
    assert len(made[0].train) == min(train, 10**length - heldout)
    assert all(len(p.content) == length + 1 for p in made[0].train)


def test_another_seed_length_or_size_is_other_data():
    base = {"train_prompts": 50, "heldout_prompts": 5}
    variants = [{}, {"seed": 1}, {"options": {"length": 6}}, {"train_prompts": 51}, {"heldout_prompts": 6}]
    assert len({load_task(TaskSettings(**(base | v))).digest for v in variants}) == len(variants)


# -- reasoning-gym -----------------------------------------------------------------------------------------------------


def gym(name, **settings):
    base = {"train_prompts": 60, "heldout_prompts": 12, "options": {}}
    return TaskSettings(data=f"reasoning-gym:{name}", **(base | settings))


def test_reasoning_gym_questions_are_apart_even_where_few_exist():
    options = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    few = gym("chain_sum", options=options, heldout_prompts=40, train_prompts=400)
    task = load_task(few)
    heldout = contents(task.heldout)
    assert len(set(heldout)) == len(heldout) == 40
    train = contents(task.train)
    assert len(train) == 400
    assert not set(train) & set(heldout)
    assert len(set(train)) < 400  # the domain is small: this is the case the rule is for
    assert load_task(few).digest == task.digest


def test_reasoning_gym_says_when_there_are_too_few_questions():
    options = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    with pytest.raises(ValueError, match=r"few distinct questions.*lower task\.heldout_prompts"):
        load_task(gym("chain_sum", options=options, heldout_prompts=2000))


@pytest.mark.parametrize("name", ["chain_sum", "spell_backward", "number_sequence", "lcm", "gsm_symbolic", "countdown"])
def test_reasoning_gym_rewards_its_own_answer_in_a_process_of_its_own(name):
    wanted = gym(name, train_prompts=5, heldout_prompts=3)
    prompts = [*load_task(wanted).train, *load_task(wanted).heldout]
    columns = {k: [p.columns[k] for p in prompts] for k in prompts[0].columns}
    json.dumps(columns)  # they must travel to the worker
    reward = load_reward(wanted)
    assert reward(None, columns["answer"], **columns) == [1.0] * 8
    assert reward(None, ["no idea"] * 8, **columns) == [0.0] * 8


def test_reasoning_gym_gives_partial_credit_only_when_asked():
    for partial in (False, True):
        wanted = gym("chain_sum", options={"partial": partial})
        prompt = load_task(wanted).train[0]
        columns = {k: [v] for k, v in prompt.columns.items()}
        (value,) = load_reward(wanted)(None, [f"it is {prompt.columns['answer']}, I think"], **columns)
        assert (0 < value < 1) if partial else value == 0


def test_reasoning_gym_refuses_to_score_another_question():
    wanted = gym("chain_sum")
    columns = {k: [v] for k, v in load_task(wanted).train[0].columns.items()} | {"question": ["another?"]}
    with pytest.raises(RuntimeError, match="another question here for index"):
        load_reward(wanted)(None, ["1"], **columns)


def test_a_system_prompt_makes_reasoning_gym_a_chat():
    prompt = load_task(gym("chain_sum", system_prompt="Answer only.")).train[0]
    assert [m["role"] for m in prompt.content] == ["system", "user"]
    prompt = load_task(gym("chain_sum", options={"chat": True})).train[0]
    assert [m["role"] for m in prompt.content] == ["user"]


# -- JSONL -------------------------------------------------------------------------------------------------------------


def write(path: Path, rows) -> str:
    path.write_text("\n".join(json.dumps(r) for r in rows) + "\n\n")
    return str(path)


@given(values=st.lists(st.integers(0, 30), min_size=12, max_size=60), seed=st.integers(0, 9), heldout=st.integers(0, 5))
@settings(max_examples=40, deadline=None)
def test_a_file_is_split_by_content_however_often_prompts_repeat(tmp_path_factory, values, seed, heldout):
    path = write(tmp_path_factory.mktemp("data") / "p.jsonl", [{"prompt": f"q{n}", "answer": n} for n in values])
    wanted = TaskSettings(data=path, seed=seed, heldout_prompts=heldout)
    if len(set(values)) <= heldout:
        with pytest.raises(ValueError, match="leaves none to train on"):
            load_task(wanted)
        return
    task = load_task(wanted)
    train, held = contents(task.train), contents(task.heldout)
    assert len(set(held)) == len(held) == heldout
    assert not set(train) & set(held)
    assert sorted(train) == sorted(json.dumps(f"q{n}") for n in values if json.dumps(f"q{n}") not in held)
    assert task.digest == load_task(wanted).digest


def test_columns_and_chats_of_a_file_come_through(tmp_path):
    chat = [{"role": "user", "content": "2+2?"}]
    path = write(tmp_path / "m.jsonl", [{"prompt": chat, "answer": "4", "level": n, "tags": ["a"]} for n in range(3)])
    task = load_task(TaskSettings(data=path, heldout_prompts=0, system_prompt="Be brief."))
    prompt = task.train[0]
    assert prompt.content == [{"role": "system", "content": "Be brief."}, *chat]
    assert prompt.columns["answer"] == "4"
    assert prompt.columns["tags"] == ["a"]
    assert task.name == "m"
    assert len(task.train) == 3
    assert len(task.heldout) == 0


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (['{"prompt": "a"}', '{"prompt": "a",}'], "line 2: not JSON: .* at column 16"),
        (['{"prompt": "a"}', "", "[1]"], 'line 3: needs an object with "prompt"'),
        (['{"question": "a"}'], 'line 1: needs an object with "prompt"'),
        (['{"prompt": 3}'], 'line 1: "prompt" must be a text or a list of chat messages'),
        (['{"prompt": ""}'], 'line 1: "prompt" is empty'),
        (['{"prompt": [{"role": "usr", "content": "x"}]}'], 'line 1: a chat message needs "role"'),
        (
            ['{"prompt": "a", "answer": 1}', '{"prompt": "b"}'],
            r"prompt 2 and the first differ in their columns \(answer",
        ),
        ([""], "has no lines"),
        (['{"prompt": "a"}'], "has 1 prompts and task.heldout_prompts = 512 leaves none to train on: lower it"),
    ],
)
def test_a_file_that_is_wrong_is_one_clear_line(tmp_path, lines, said):
    (tmp_path / "x.jsonl").write_text("\n".join(lines))
    with pytest.raises(ValueError, match=said):
        load_task(TaskSettings(data=str(tmp_path / "x.jsonl")))


def test_math_rewards_equal_values_and_tells_of_an_answer_that_is_none():
    reward = load_reward(TaskSettings(data="x.jsonl", reward="math"))
    completions = [r"So it is $\frac{1}{2}$.", r"\boxed{0.5}", "1/3", "", "it is $2x$"]
    assert reward(None, completions, answer=["1/2", r"\frac{1}{2}", "0.5", "0.5", "$2x$"]) == [1, 1, 0, 0, 1]
    (error,) = reward(None, ["1"], answer=[" "])
    assert isinstance(error, ValueError)


def test_exact_compares_text_whatever_the_column_is():
    reward = load_reward(TaskSettings(data="x.jsonl"))
    assert reward(None, [" 4 ", "5", "4.0"], answer=[4, 4, 4]) == [1, 0, 0]


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ({"data": "srot"}, 'task.data = "srot" is unknown; did you mean sort?'),
        ({"data": "reasoning-gym:chain_sun"}, "reasoning-gym has no chain_sun; did you mean chain_sum?"),
        ({"data": "reasoning-gym:"}, "reasoning-gym has no empty name"),
        ({"data": "gsm8k"}, 'task.data = "gsm8k" is unknown; known: FILE.jsonl, reasoning-gym:NAME, sort'),
        ({"options": {"lenght": 5}}, "task.options.lenght is unknown for task.data = sort; did you mean length?"),
        ({"options": {"length": "5"}}, "task.options.length = '5' must be a whole number"),
        ({"options": {"length": 2}, "heldout_prompts": 100}, "leaves nothing to train on: there are 100 numbers"),
        ({"data": "reasoning-gym:chain_sum", "options": {"max_term": 2}}, "did you mean max_terms?"),
        ({"data": "reasoning-gym:chain_sum", "options": {"max_terms": 0}}, "task.options do not suit"),
        ({"rollout": "nowhere.at_all:f"}, 'task.rollout = "nowhere.at_all:f": cannot import nowhere.at_all'),
        ({"rollout": "json:lods"}, "lods does not exist in json; did you mean loads?"),
        ({"train_prompts": 0}, "task.train_prompts = 0 must be at least 1"),
    ],
)
def test_a_wrong_setting_is_named_with_the_nearest_right_one(wanted, said):
    with pytest.raises(ValueError, match=r"task") as error:
        load_task(TaskSettings(**wanted))
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_a_file_that_is_not_there_names_its_neighbour(tmp_path):
    write(tmp_path / "train.jsonl", [{"prompt": "a"}])
    with pytest.raises(ValueError, match=r"trian\.jsonl\" does not exist; did you mean .*train\.jsonl\?"):
        load_task(TaskSettings(data=str(tmp_path / "trian.jsonl")))


def test_tasks_load_without_torch():
    code = (
        "import sys; from mesh.config import Task; from roles.rollout.tasks import load_task, load_reward;"
        "load_task(Task()); load_reward(Task()); import roles.rollout.engines;"
        "sys.exit(bool({'torch', 'transformers', 'reasoning_gym'} & set(sys.modules)))"
    )
    root = Path(__file__).resolve().parents[2]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, timeout=60).returncode == 0


# -- completions -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer():
    """Characters; a text begins with <bos>, as many models' tokenizers have it."""
    words = ["<pad>", "<bos>", "<eos>", "<unk>", *"0123456789=?! abcdefghijklmnopqrstuvwxyz:\n"]
    raw = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    raw.decoder = decoders.Fuse()
    raw.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>"
    )


class Scripted:
    """An engine that says what the script says and remembers what it was asked."""

    longest = 40

    def __init__(self, tokenizer, *lines):
        self.lines, self.requests = [tokenizer(line, add_special_tokens=False)["input_ids"] for line in lines], []

    async def sample(self, request):
        tokens = np.array(self.lines[len(self.requests)], np.int32)[: request.max_new_tokens]
        self.requests.append(request)
        n = len(tokens)
        finish = "stop" if n and tokens[-1] == 2 else "length"
        return Sampled(
            tokens=tokens,
            logprobs=np.full(n, -0.5, np.float32),
            spans=[Span(version=V, start=0, stop=n)],
            finish=finish,
        )


def sampler(engine, tokenizer, max_new_tokens=20):
    return Sampler(engine, tokenizer, seed=5, index=2, max_new_tokens=max_new_tokens, temperature=0.7, pinned=V)


def test_one_turn_is_a_prompt_and_what_was_sampled(tokenizer):
    engine = Scripted(tokenizer, "12<eos>")
    talk = asyncio.run(single_turn(Prompt(0, "21="), sampler(engine, tokenizer)))
    given_, sampled = talk.segments
    assert given_.tokens.tolist() == [1, 6, 5, 14]
    assert not given_.sampled
    assert sampled.sampled
    assert sampled.tokens.tolist() == [5, 6, 2]
    assert (talk.finish, talk.text()) == ("stop", "12")
    (request,) = engine.requests
    assert (request.seed, request.temperature, request.pinned) == (sample_seed(5, 2, 0), 0.7, V)


def test_the_completions_of_a_group_share_the_tokens_of_their_prompt(tokenizer):
    prompt, tokens = Prompt(0, "21="), np.array([9, 8, 7], np.int32)
    sample = sampler(Scripted(tokenizer, "12<eos>"), tokenizer)
    sample.encoded = (prompt.content, tokens)
    talk = asyncio.run(single_turn(prompt, sample))
    assert talk.segments[0].tokens is tokens
    assert Transcript(Prompt(1, "3="), sample).segments[0].tokens.tolist() == [1, 7, 14]


async def guess_again(prompt, sample):
    talk = Transcript(prompt, sample)
    while await talk.sample() != prompt.columns["answer"]:
        if talk.finish == "length":
            break
        talk.give("no:")
    return talk


def test_several_turns_keep_every_token_and_know_who_said_it(tokenizer):
    engine = Scripted(tokenizer, "21<eos>", "12<eos>")
    talk = asyncio.run(guess_again(Prompt(0, "21=", {"answer": "12"}), sampler(engine, tokenizer)))
    assert [s.sampled for s in talk.segments] == [False, True, False, True]
    assert talk.segments[2].tokens.tolist() == tokenizer("no:", add_special_tokens=False)["input_ids"]
    assert all(len(s.logprobs) == (len(s.tokens) if s.sampled else 0) for s in talk.segments)
    first, second = engine.requests
    assert second.prompt.tolist() == np.concatenate([s.tokens for s in talk.segments[:3]]).tolist()
    assert second.max_new_tokens == first.max_new_tokens - 3
    assert first.seed != second.seed
    assert talk.text() == "21no:12"


def test_turns_end_when_the_tokens_of_the_completion_or_the_positions_are_used_up(tokenizer):
    engine = Scripted(tokenizer, *["21<eos>"] * 9)
    talk = asyncio.run(guess_again(Prompt(0, "21=", {"answer": "12"}), sampler(engine, tokenizer, 7)))
    assert talk.finish == "length"
    assert sum(len(s.tokens) for s in talk.segments if s.sampled) == 7
    engine = Scripted(tokenizer, *["21<eos>"] * 9)
    talk = asyncio.run(guess_again(Prompt(0, "21=", {"answer": "12"}), sampler(engine, tokenizer, 100)))
    assert talk.finish == "length"
    assert len(talk.tokens) - 3 <= engine.longest


def test_a_users_rollout_is_found_by_name_and_held_to_its_contract(tmp_path, monkeypatch, tokenizer):
    (tmp_path / "my_talk.py").write_text(
        "from roles.rollout.tasks import Transcript\n"
        "async def silent(prompt, sample):\n    return Transcript(prompt, sample)\n"
        "async def wrong(prompt, sample):\n    return 'text'\n"
        "def plain(prompt, sample):\n    return Transcript(prompt, sample)\n"
    )
    monkeypatch.chdir(tmp_path)

    def talk(name):
        task = load_task(TaskSettings(rollout=f"my_talk:{name}", train_prompts=1, heldout_prompts=1))
        return asyncio.run(task.rollout(task.train[0], sampler(Scripted(tokenizer), tokenizer)))

    silent = talk("silent")
    assert [s.sampled for s in silent.segments] == [False]
    assert silent.text() == ""
    with pytest.raises(ValueError, match='"my_talk:wrong" returned str; it must return its Transcript'):
        talk("wrong")
    with pytest.raises(ValueError, match="must be an async function"):
        talk("plain")


def test_chats_go_through_the_template_and_texts_as_the_tokenizer_has_it(tokenizer):
    chat = [{"role": "user", "content": "hi"}]
    with pytest.raises(ValueError, match="no chat template"):
        encode(chat, tokenizer)
    tokenizer.chat_template = "{% for m in messages %}<bos>{{ m.role }}:{{ m.content }}{% endfor %}<eos>"
    try:
        ids = encode(chat, tokenizer)
    finally:
        tokenizer.chat_template = None
    assert tokenizer.decode(ids.tolist()).replace(" ", "") == "<bos>user:hi<eos>"
    assert ids.dtype == np.int32
    assert encode("hi", tokenizer).tolist()[0] == 1
