"""Tasks by name: ``sort``, ``reasoning-gym:NAME``, or a ``.jsonl`` file. Nothing here imports torch."""

import inspect
from dataclasses import replace

from mesh.config import Task as TaskSettings
from roles.rollout.tasks import jsonl, reasoning_gym, sort
from roles.rollout.tasks.base import Prompt, Rollout, Sampler, Task, Transcript, import_function, nearest
from roles.rollout.tasks.rewards import load_reward

__all__ = ["Prompt", "Sampler", "Task", "Transcript", "load_reward", "load_task"]


def load_task(settings: TaskSettings) -> Task:
    """The task that the settings name. Raises ValueError in one line: the setting, and the nearest valid name."""
    data = settings.data
    if settings.train_prompts < 1:
        raise ValueError(f"task.train_prompts = {settings.train_prompts} must be at least 1")
    if data == "sort":
        task = sort.make(settings)
    elif data.startswith(reasoning_gym.PREFIX):
        task = reasoning_gym.make(settings)
    elif data.endswith(".jsonl"):
        task = jsonl.make(settings)
    else:
        known = ["sort", f"{reasoning_gym.PREFIX}NAME", "FILE.jsonl"]
        raise ValueError(f'task.data = "{data}" is unknown{nearest(data, known)}')
    if settings.rollout:
        task = replace(task, rollout=_users_rollout(settings.rollout))
    return task


def _users_rollout(spec: str) -> Rollout:
    function = import_function(spec, "task.rollout")
    if not inspect.iscoroutinefunction(function):
        raise ValueError(f'task.rollout = "{spec}" must be an async function: async def rollout(prompt, sample)')

    async def rollout(prompt: Prompt, sample: Sampler) -> Transcript:
        talk = await function(prompt, sample)
        if not isinstance(talk, Transcript):
            raise ValueError(f'task.rollout = "{spec}" returned {type(talk).__name__}; it must return its Transcript')
        return talk

    return rollout
