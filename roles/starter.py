"""The quickstart's model: ``starter:sort``, a small Llama made on first use, so that a first run needs no download.

402,048 parameters over 64 characters, warmed up in about ten seconds to answer prompts of the sort task (``52814=``)
with the right digits in the wrong order: 4% of what it is taught is ascending (right), 66% descending, the rest
shuffled. Sampled at temperature 1 it is right in less than one answer of a hundred, so what it can do after training
it learned from reinforcement. Warm-up draws its prompts at random and mostly teaches wrong answers to them; held-out
prompts of the task are not kept out of it, since a wrong answer gives nothing away.

The same seed gives the same weights on one machine: one thread, own generators. The directory is named by the digest of
the recipe, made under a lock, and renamed into place when complete, so peers that start at once make it once.
"""

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
from msgspec import Struct

from roles import smollm2

CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyz =+-*/,.:;!?()[]<>_'\"#&%"
SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")
PREFIX = "starter:"
WAIT_S = 180.0  # for another process that makes the same model: ten times what it takes


class Recipe(Struct, frozen=True):
    """What decides the weights; its digest names the directory."""

    steps: int = 210
    batch: int = 64
    length: int = 5  # digits in a prompt
    ascending: float = 0.04  # share of right answers in what is taught
    descending: float = 0.66  # the rest is shuffled
    learning_rate: float = 2e-3
    ramp_steps: int = 30
    layers: int = 2
    hidden: int = 128
    feed_forward: int = 384
    heads: int = 4
    kv_heads: int = 2
    characters: str = CHARACTERS


SORT = Recipe()


def resolve(path: str, seed: int = 0) -> str:
    """``model.path`` as something transformers can load: ``starter:sort`` becomes its directory, made if need be."""
    if path.startswith(("/", "./", "../", "~")) and not Path(path).is_dir():  # a hub id does not begin like this
        raise ValueError(
            f'model.path = "{path}" cannot be loaded: there is no such directory; set model.path to one, to a hub id, '
            "or to starter:sort"
        )
    if Path(path).is_dir() and not (Path(path) / "config.json").exists():
        raise ValueError(
            f'model.path = "{path}" cannot be loaded: it has no config.json; set model.path to a directory with '
            "config.json, tokenizer and *.safetensors"
        )
    if not path.startswith(PREFIX):
        return path
    if path == "starter:smollm2-135m":
        return str(made("smollm2-135m", smollm2.convert))
    if path != "starter:sort":
        raise ValueError(f'model.path = "{path}": made here are only starter:sort and starter:smollm2-135m')
    return str(ensure(SORT, seed))


def ensure(recipe: Recipe = SORT, seed: int = 0, cache: Path | None = None, wait_s: float = WAIT_S) -> Path:
    """The directory of the model of this recipe and seed; made if it is not there yet.

    Raises ValueError when the cache cannot be written, or another process holds the lock longer than ``wait_s``."""
    digest = hashlib.blake2b(msgspec.json.encode(recipe), digest_size=4).hexdigest()
    return made(f"starter-sort-{digest}-{seed}", lambda scratch: _warmed_up(recipe, seed, scratch), cache, wait_s)


def made(name: str, make: Callable[[Path], None], cache: Path | None = None, wait_s: float = WAIT_S) -> Path:
    """The directory ``name`` of the user's cache, filled by ``make`` if it is not there yet: whole, and once."""
    cache = cache or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mesh-node"
    target = cache / name
    if target.is_dir():
        return target
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _lock(cache / f"{name}.lock", wait_s):
            if not target.is_dir():
                _make(make, target)
    except OSError as e:
        raise ValueError(f"{name} cannot be made in {cache}: {e}; set XDG_CACHE_HOME to a writable place") from e
    return target


@contextmanager
def _lock(path: Path, wait_s: float) -> Iterator[None]:
    """Hold a file lock. The kernel frees it when its holder dies, so a killed process blocks nobody."""
    deadline = time.monotonic() + wait_s
    with open(path, "w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ValueError(
                        f"another process has held {path} for {wait_s:.0f} s; if none is making the starting model, "
                        "delete that file"
                    ) from None
                time.sleep(0.1)
        yield


def _warmed_up(recipe: Recipe, seed: int, scratch: Path) -> None:
    tokenizer = character_tokenizer(recipe.characters)
    warm_up(recipe, seed).save_pretrained(scratch)
    tokenizer.save_pretrained(scratch)
    (scratch / "recipe.json").write_text(json.dumps(msgspec.to_builtins(recipe), indent=1))


def _make(make: Callable[[Path], None], target: Path) -> None:
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        make(scratch)
        for file in scratch.iterdir():
            with open(file, "rb") as f:
                os.fsync(f.fileno())
        scratch.chmod(0o755)
        os.rename(scratch, target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def character_tokenizer(characters: str = CHARACTERS):
    """A tokenizer of one token a character (PreTrainedTokenizerFast); special tokens come first, none is added to a
    text. A character it does not know becomes ``<unk>``."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate((*SPECIAL, *characters))}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    pad, bos, eos, unk = SPECIAL
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=pad,
        bos_token=bos,
        eos_token=eos,
        unk_token=unk,
        clean_up_tokenization_spaces=False,
    )


def warm_up(recipe: Recipe, seed: int):
    """The model after its warm-up: cross-entropy on answer tokens only, float32, on one thread."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # sums in one order: the same seed, the same weights
    try:
        with torch.random.fork_rng(devices=[]):  # layers draw their first weights from the global generator
            torch.manual_seed(seed)
            model = _llama(recipe)
        generator = torch.Generator().manual_seed(seed)
        optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, weight_decay=0.0)
        for step in range(recipe.steps):
            for group in optimizer.param_groups:
                group["lr"] = recipe.learning_rate * min(1.0, (step + 1) / recipe.ramp_steps)
            tokens = _lessons(recipe, generator)
            logits = model(input_ids=tokens).logits[:, recipe.length : -1]
            loss = torch.nn.functional.cross_entropy(
                logits.flatten(0, 1).float(), tokens[:, recipe.length + 1 :].flatten()
            )
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    finally:
        torch.set_num_threads(threads)
    return model.eval()


def _llama(recipe: Recipe):
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    pad, bos, eos, _ = range(len(SPECIAL))
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(SPECIAL) + len(recipe.characters),
            hidden_size=recipe.hidden,
            intermediate_size=recipe.feed_forward,
            num_hidden_layers=recipe.layers,
            num_attention_heads=recipe.heads,
            num_key_value_heads=recipe.kv_heads,
            max_position_embeddings=128,
            tie_word_embeddings=True,
            pad_token_id=pad,
            bos_token_id=bos,
            eos_token_id=eos,
        )
    )
    model.generation_config = GenerationConfig(pad_token_id=pad, bos_token_id=bos, eos_token_id=eos)
    return model


def _lessons(recipe: Recipe, generator):
    """Token ids (batch, 2 x length + 2): digits, ``=``, the answer taught, ``<eos>``."""
    import torch

    digit0 = len(SPECIAL) + recipe.characters.index("0")
    equals = len(SPECIAL) + recipe.characters.index("=")
    shape = (recipe.batch, recipe.length)
    digits = torch.randint(0, 10, shape, generator=generator)
    ascending = digits.sort(dim=1).values
    shuffled = digits.gather(1, torch.rand(shape, generator=generator).argsort(dim=1))
    kind = torch.rand(recipe.batch, 1, generator=generator)
    taught = torch.where(kind < recipe.ascending + recipe.descending, ascending.flip(1), shuffled)
    taught = torch.where(kind < recipe.ascending, ascending, taught)
    signs = [torch.full((recipe.batch, 1), i) for i in (equals, SPECIAL.index("<eos>"))]
    return torch.cat([digits + digit0, signs[0], taught + digit0, signs[1]], dim=1)
