"""What a task is: prompts to train on, others to measure on, a reward, and how one completion comes about.

By default a completion is one turn: the policy continues the prompt until it stops. A task may say otherwise with a
function of its own (``task.rollout = "package.module:function"``)::

    async def guess_again(prompt, sample):
        talk = Transcript(prompt, sample)
        answer = await talk.sample()
        if answer.strip() != prompt.columns["answer"]:
            talk.give(" No. Again: ")
            await talk.sample()
        return talk

What was sampled carries loss and what was given does not; token ids are kept as they were, never decoded and encoded
again.
"""

import difflib
import hashlib
import importlib
import os
import sys
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

import numpy as np

from mesh.config import Task as TaskSettings
from mesh.version import Version
from roles.rollout.engines.base import Engine, Request, Sampled, sample_seed
from transport.messages import FinishReason, Segment

Messages = list[dict[str, Any]]
"""A chat: ``[{"role": "user", "content": "..."}, ...]``."""

Reward = Callable[..., list[float | None]]
"""``reward(prompts, completions, **columns)``, one number (or None: no reward) a completion. ``prompts`` are texts or
chats; each column is a list as long as ``prompts``."""


@dataclass(frozen=True)
class Prompt:
    """``content``: a text to continue, or a chat to answer. ``columns`` reach the reward function by name."""

    index: int
    content: str | Messages
    columns: dict[str, Any] = field(default_factory=dict)


class Prompts(Sequence[Prompt]):
    """Prompts made when they are asked for: a hundred thousand cost nothing."""

    def __init__(self, count: int, make: Callable[[int], Prompt]) -> None:
        self._count, self._make = count, make

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> list[Prompt]: ...
    def __getitem__(self, index):
        if isinstance(index, slice):
            return [self._make(i) for i in range(*index.indices(self._count))]
        if not -self._count <= index < self._count:
            raise IndexError(f"prompt {index} of {self._count}")
        return self._make(index % self._count)

    def __iter__(self) -> Iterator[Prompt]:
        return map(self._make, range(self._count))


@dataclass(frozen=True)
class Task:
    """``train`` and ``heldout`` share no content. ``digest`` (hex) names the data: peers and checkpoints compare it.
    The reward is found by ``tasks.load_reward(settings)``, in the process that runs it."""

    name: str
    settings: TaskSettings
    train: Sequence[Prompt]
    heldout: Sequence[Prompt]
    digest: str
    rollout: "Rollout"


# ----------------------------------------------------------------------------------------------------------------------
# One completion
# ----------------------------------------------------------------------------------------------------------------------


class Sampler:
    """Samples for one completion of one prompt: ``await sampler(tokens)`` continues ``tokens`` (int32 (n,)).

    ``max_new_tokens`` bounds the completion over all its turns; when nothing is left, in tokens or in the model's
    positions, a further turn is empty and ends by ``length``. ``encoded``: a prompt's content and its tokens, which the
    completions of a group share."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Any,
        *,
        seed: int,
        index: int,
        max_new_tokens: int,
        temperature: float,
        top_p: float = 1.0,
        pinned: Version | None = None,
        encoded: tuple[str | Messages, np.ndarray] | None = None,
    ) -> None:
        self.engine, self.tokenizer, self.encoded = engine, tokenizer, encoded
        self.seed, self.index, self.turn = seed, index, 0
        self.left, self.temperature, self.top_p, self.pinned = max_new_tokens, temperature, top_p, pinned

    async def __call__(self, tokens: np.ndarray) -> Sampled:
        room = self.left
        if self.turn and self.engine.longest is not None:
            room = min(room, self.engine.longest - len(tokens))
        if room < 1:
            return Sampled(tokens=np.empty(0, np.int32), logprobs=np.empty(0, np.float32), spans=[], finish="length")
        request = Request(
            prompt=tokens,
            max_new_tokens=room,
            temperature=self.temperature,
            top_p=self.top_p,
            seed=sample_seed(self.seed, self.index, self.turn),
            pinned=self.pinned,
        )
        sampled = await self.engine.sample(request)
        self.turn += 1
        self.left -= len(sampled.tokens)
        return sampled

    def encode(self, content: str | Messages) -> np.ndarray:
        if self.encoded is not None and content is self.encoded[0]:
            return self.encoded[1]
        return encode(content, self.tokenizer)

    def encode_more(self, text: str) -> np.ndarray:
        """A text that stands in the middle: without the special tokens that begin one."""
        return np.array(self.tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int32)

    def decode(self, tokens: np.ndarray) -> str:
        return self.tokenizer.decode(tokens.tolist(), skip_special_tokens=True)


class Transcript:
    """A completion as it grows. ``segments[0]`` is the prompt; ``finish`` is why the last turn ended, and may be set
    (``turns``: no more turns were allowed)."""

    def __init__(self, prompt: Prompt, sampler: Sampler) -> None:
        self.sampler = sampler
        self.segments: list[Segment] = []
        self.finish: FinishReason = "stop"
        self._last: tuple[Segment, str] | None = None  # what was sampled last, decoded
        self.give(sampler.encode(prompt.content))

    @property
    def tokens(self) -> np.ndarray:
        """All tokens so far, the prompt's included: int32 (n,)."""
        return np.concatenate([s.tokens for s in self.segments])

    def give(self, what: str | np.ndarray) -> None:
        """Append a text or token ids that the policy did not produce."""
        tokens = self.sampler.encode_more(what) if isinstance(what, str) else np.asarray(what, dtype=np.int32)
        self.segments.append(Segment(tokens=tokens, sampled=False, logprobs=np.empty(0, np.float32)))

    async def sample(self) -> str:
        """Let the policy continue; returns the text of this turn."""
        sampled = await self.sampler(self.tokens)
        self.finish = sampled.finish
        text = self.sampler.decode(sampled.tokens)
        if len(sampled.tokens):
            self.segments.append(sampled.segment())
            self._last = self.segments[-1], text
        return text

    def text(self) -> str:
        """Everything after the prompt, without special tokens: what the reward function sees."""
        after = self.segments[1:]
        if len(after) == 1 and self._last is not None and after[0] is self._last[0]:
            return self._last[1]
        return self.sampler.decode(np.concatenate([s.tokens for s in after])) if after else ""


Rollout = Callable[[Prompt, Sampler], Awaitable[Transcript]]


async def single_turn(prompt: Prompt, sample: Sampler) -> Transcript:
    talk = Transcript(prompt, sample)
    await talk.sample()
    return talk


def encode(content: str | Messages, tokenizer: Any) -> np.ndarray:
    """int32 token ids of a prompt: a chat through the tokenizer's template, a text as the tokenizer does it."""
    if isinstance(content, str):
        return np.array(tokenizer(content)["input_ids"], dtype=np.int32)
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError("prompts are chats, but the model's tokenizer has no chat template: use plain text prompts")
    ids = tokenizer.apply_chat_template(content, add_generation_prompt=True, tokenize=True, return_dict=False)
    return np.array(ids, dtype=np.int32)


# ----------------------------------------------------------------------------------------------------------------------
# For those who make tasks
# ----------------------------------------------------------------------------------------------------------------------


def chat(settings: TaskSettings, content: str | Messages) -> Messages:
    """``content`` as a chat, with the settings' system prompt first unless it brings its own."""
    messages = [{"role": "user", "content": content}] if isinstance(content, str) else content
    if settings.system_prompt and messages[0].get("role") != "system":
        messages = [{"role": "system", "content": settings.system_prompt}, *messages]
    return messages


def plain(completion: str | Messages) -> str:
    """The text of a completion, also where it comes as a chat."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


def digest(*parts: str | bytes) -> str:
    """16 hex digits over parts, each with its length."""
    h = hashlib.blake2b(digest_size=8)
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        h.update(len(data).to_bytes(8, "little") + data)
    return h.hexdigest()


def nearest(name: str, valid: Collection[str]) -> str:
    """``; did you mean ...?``, or what there is."""
    close = difflib.get_close_matches(name, valid, n=1, cutoff=0.6)
    if close:
        return f"; did you mean {close[0]}?"
    names = sorted(valid)
    return f"; known: {', '.join(names[:12])}{', ...' if len(names) > 12 else ''}"


def check_options(settings: TaskSettings, valid: Collection[str]) -> None:
    for key in settings.options:
        if key not in valid:
            known = nearest(key, valid) if valid else "; it takes none"
            raise ValueError(f"task.options.{key} is unknown for task.data = {settings.data}{known}")


def import_function(spec: str, setting: str) -> Callable:
    """The function ``package.module:function``; modules of the working directory count. Raises ValueError naming the
    setting and what is wrong."""
    module_name, sep, name = spec.partition(":")
    if not sep or not module_name or not name:
        raise ValueError(f'{setting} = "{spec}": write it as package.module:function')
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except Exception as e:  # whatever the user's module raises is the user's to read
        raise ValueError(f'{setting} = "{spec}": cannot import {module_name}: {type(e).__name__}: {e}') from e
    if not callable(function := getattr(module, name, None)):
        there = [n for n, value in vars(module).items() if callable(value) and not n.startswith("_")]
        what = "is not callable" if hasattr(module, name) else "does not exist"
        raise ValueError(f'{setting} = "{spec}": {name} {what} in {module_name}{nearest(name, there)}')
    return function
