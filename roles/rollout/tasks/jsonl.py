"""A file of one JSON object a line: ``{"prompt": "..." or [chat messages], "answer": ..., other columns}``.

The file is split by ``task.seed``: the first ``heldout_prompts`` distinct prompts are held out, and whatever equals one
of them in content is kept out of training.
"""

import json
import random
from pathlib import Path
from typing import Any

from mesh.config import Task as TaskSettings
from roles.rollout.tasks.base import Prompt, Prompts, Task, chat, check_options, digest, nearest, single_turn

ROLES = ("system", "user", "assistant", "tool")


def make(settings: TaskSettings) -> Task:
    check_options(settings, [])
    rows = _read(settings.data)
    order = list(range(len(rows)))
    random.Random(f"{settings.seed} split").shuffle(order)
    heldout: dict[str, int] = {}
    train: list[int] = []
    for i in order:
        key = _content(rows[i])
        if key in heldout:
            continue
        if len(heldout) < settings.heldout_prompts:
            heldout[key] = i
        else:
            train.append(i)
    # whatever equals a held-out prompt was skipped: training begins only once all of them are chosen
    train = train[: settings.train_prompts]
    if not train:
        raise ValueError(
            f"{settings.data} has {len(rows)} prompts and task.heldout_prompts = {settings.heldout_prompts} leaves "
            "none to train on: lower it"
        )

    def prompt(index: int, row: dict[str, Any]) -> Prompt:
        content = row["prompt"]
        if settings.system_prompt or not isinstance(content, str):
            content = chat(settings, content)
        return Prompt(index, content, {k: v for k, v in row.items() if k not in ("prompt", "completion")})

    held = list(heldout.values())
    return Task(
        name=Path(settings.data).stem,
        settings=settings,
        train=Prompts(len(train), lambda i: prompt(i, rows[train[i]])),
        heldout=Prompts(len(held), lambda i: prompt(i, rows[held[i]])),
        digest=digest(settings.system_prompt, *(json.dumps(rows[i], sort_keys=True) for i in [*held, *train])),
        rollout=single_turn,
    )


def _content(row: dict[str, Any]) -> str:
    return json.dumps(row["prompt"], sort_keys=True)


def _read(name: str) -> list[dict[str, Any]]:
    path = Path(name)
    if not path.is_file():
        near = path.parent if path.parent.is_dir() else Path()
        there = [str(p) for p in sorted(near.glob("*.jsonl"))]
        raise ValueError(f'task.data = "{name}" does not exist{nearest(name, there) if there else ""}')
    rows = []
    with path.open(encoding="utf-8") as lines:
        try:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    rows.append(_row(line, f"{name}, line {number}"))
        except UnicodeDecodeError as e:
            raise ValueError(f"{name} is not UTF-8 text: {e}") from None
    if not rows:
        raise ValueError(f"{name} has no lines")
    columns = set(rows[0])
    for number, row in enumerate(rows, 1):
        if set(row) != columns:
            odd = ", ".join(sorted(set(row) ^ columns))
            raise ValueError(f"{name}: prompt {number} and the first differ in their columns ({odd}): give all alike")
    return rows


def _row(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as e:
        raise ValueError(f"{where}: not JSON: {e.msg} at column {e.colno}") from None
    if not isinstance(row, dict) or "prompt" not in row:
        raise ValueError(f'{where}: needs an object with "prompt"')
    prompt = row["prompt"]
    if isinstance(prompt, str):
        if not prompt:
            raise ValueError(f'{where}: "prompt" is empty')
        return row
    if not isinstance(prompt, list) or not prompt:
        raise ValueError(f'{where}: "prompt" must be a text or a list of chat messages')
    for message in prompt:
        if not isinstance(message, dict) or message.get("role") not in ROLES or "content" not in message:
            raise ValueError(f'{where}: a chat message needs "role" ({", ".join(ROLES)}) and "content"')
    return row
