"""Any task of the reasoning-gym package: ``task.data = "reasoning-gym:NAME"``.

``task.options`` are the settings of that data set; two are ours: ``partial = true`` rewards what reasoning-gym gives
partial credit (it also gives some for a right answer inside a longer text), else only full marks count; ``chat = true``
puts questions as chats, which is the default where ``task.system_prompt`` is set.

Questions are generated from (seed, index) when asked for, here and in the reward's process alike. The first indices are
held out, each question once; a training question that is among them is replaced by another.
"""

from dataclasses import fields
from functools import lru_cache
from importlib.metadata import version
from typing import Any

from mesh.config import Task as TaskSettings
from roles.rollout.tasks.base import Prompt, Prompts, Reward, Task, chat, digest, nearest, plain, single_turn

PREFIX = "reasoning-gym:"
OURS = ("partial", "chat")


def make(settings: TaskSettings) -> Task:
    data = _dataset(settings)
    name = settings.data.removeprefix(PREFIX)
    reserved, count = _reserved(settings), settings.train_prompts
    apart: dict[str, int] = {}
    for raw in range(reserved):
        if len(apart) == settings.heldout_prompts:
            break
        apart.setdefault(data[raw]["question"], raw)
    few = f"{settings.data} with these task.options has few distinct questions"
    if len(apart) < settings.heldout_prompts:
        raise ValueError(
            f"{few}: {len(apart)} in {reserved}; lower task.heldout_prompts = {settings.heldout_prompts} or make them "
            "more varied"
        )
    seen = [data[reserved + i]["question"] for i in range(min(32, count))]
    if sum(question in apart for question in seen) * 2 > len(seen):
        raise ValueError(
            f"{few}: most training questions are among the {len(apart)} held out; lower task.heldout_prompts"
        )
    as_chat = settings.options.get("chat", bool(settings.system_prompt))

    def prompt(index: int, raw: int, entry: dict[str, Any]) -> Prompt:
        content = chat(settings, entry["question"]) if as_chat else entry["question"]
        return Prompt(index, content, {"answer": entry["answer"], "raw_index": raw, "question": entry["question"]})

    def train(index: int) -> Prompt:
        for attempt in range(128):  # at most half of the questions are held out
            raw = reserved + (index + attempt * 7919) % count
            entry = data[raw]
            if entry["question"] not in apart:
                return prompt(index, raw, entry)
        raise ValueError(f"{few}: none is left for training prompt {index}; lower task.heldout_prompts")

    held = list(apart.values())
    options = sorted((k, repr(v)) for k, v in settings.options.items())
    return Task(
        name=name,
        settings=settings,
        train=Prompts(count, train),
        heldout=Prompts(len(held), lambda i: prompt(i, held[i], data[held[i]])),
        digest=digest(
            settings.data, version("reasoning-gym"), repr(options), str(settings.seed), settings.system_prompt,
            str(count), *apart, *seen,
        ),
        rollout=single_turn,
    )  # fmt: skip


def reward(settings: TaskSettings) -> Reward:
    data = _dataset(settings)
    partial = bool(settings.options.get("partial", False))
    entry_of = lru_cache(maxsize=4096)(data.__getitem__)

    def score(completion: str, raw: int, question: str) -> float | Exception:
        entry = entry_of(raw)
        if entry["question"] != question:
            raise RuntimeError(f"{settings.data} gave another question here for index {raw}: versions differ?")
        try:
            value = float(data.score_answer(completion.strip(), entry))
        except Exception as e:  # of this completion alone: the others of the group keep their rewards
            return e
        return value if partial else float(value == 1.0)

    def score_answer(prompts, completions, raw_index, question, **_):
        return [score(plain(c), r, q) for c, r, q in zip(completions, raw_index, question, strict=True)]

    return score_answer


def _reserved(settings: TaskSettings) -> int:
    """Indices kept for held-out questions: more than questions, since some repeat."""
    return 4 * settings.heldout_prompts + 64


def _dataset(settings: TaskSettings) -> Any:
    from reasoning_gym.factory import DATASETS, create_dataset  # a second to import: only where it is used

    name = settings.data.removeprefix(PREFIX)
    if name not in DATASETS:
        raise ValueError(f'task.data = "{settings.data}": reasoning-gym has no {name or "empty name"}'
                         f"{nearest(name, DATASETS)}")  # fmt: skip
    options = {k: v for k, v in settings.options.items() if k not in OURS}
    known = [f.name for f in fields(DATASETS[name][1]) if f.name not in ("seed", "size")]
    for key in options:
        if key not in known:
            raise ValueError(
                f"task.options.{key} is unknown for task.data = {settings.data}{nearest(key, [*known, *OURS])}"
            )
    try:
        return create_dataset(name, seed=settings.seed, size=_reserved(settings) + settings.train_prompts, **options)
    except Exception as e:  # its checks are assertions, and what a wrong type raises differs by data set
        raise ValueError(f"task.options do not suit {settings.data}: {type(e).__name__}: {e}") from e
