"""The model being trained, its tokenizer and its optimizer: what one trainer does to them in one step.

A step has two halves, so that several trainers can meet in between:

    scores = policy.accumulate(samples, threshold)     # forward and backward: the *summed* gradient, N x dL
    gradient = policy.flat_gradient()                  # only with several trainers: sum this and scores.tokens over
    policy.load_flat_gradient(reduced)                 # them, then put the sum back
    figures = policy.step(tokens)                      # divide by N (of all trainers), clip, AdamW

The model stays in eval mode: dropout would make the trained policy another one than the sampled policy. Not
thread-safe: one thread owns it. Threads of torch are set by the caller.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch.func import functional_call

from mesh.config import Config
from roles.models import DTYPES as DTYPES
from roles.models import load_model, load_tokenizer
from roles.starter import resolve
from roles.trainer.batch import MicroBatch, Sample, micro_batches
from roles.trainer.losses import DriftThreshold, failures_already_avoided, mean_drift, summed_loss, token_logprobs


@dataclass
class Scores:
    """What the forward passes of one batch of S samples said; entries of samples that teach nothing stay empty.

    ``current`` and ``entropy``: float32 of a sample's sampled tokens, the current policy's log-probability and entropy.
    ``drift`` float64 (S,), NaN where not scored; ``avoided`` and ``cut`` bool (S,): masked by ``mask_negatives`` and by
    ``mask_truncated``. ``loss_sum`` is N x L over this trainer's samples; ``tokens`` its part of N."""

    current: list[np.ndarray | None]
    entropy: list[np.ndarray | None]
    drift: np.ndarray
    avoided: np.ndarray
    cut: np.ndarray
    threshold: float
    tokens: int
    loss_sum: float = 0.0
    micro_batches: int = 0
    padded_tokens: int = 0

    @property
    def masked(self) -> np.ndarray:
        return self.avoided | self.cut


@dataclass
class Policy:
    model: torch.nn.Module
    tokenizer: object
    settings: Config
    steps: int = 0  # optimizer steps begun, skipped ones included
    skipped: int = 0  # steps whose gradient was not finite
    notes: list[str] = field(default_factory=list)  # what a user should be told, one line each

    def __post_init__(self) -> None:
        self.model.eval()
        names = [clean_name(n) for n, _ in self.model.named_parameters()]
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        trained = [n for n, p in zip(names, self.model.parameters(), strict=True) if p.requires_grad]
        if not parameters:
            raise ValueError("the model has no parameter that takes a gradient")
        self.parameters: dict[str, torch.nn.Parameter] = dict(zip(trained, parameters, strict=True))
        self.optimizer = adamw(parameters, self.settings)
        first = parameters[0]
        self.device, self.dtype = first.device, first.dtype
        takes = inspect.signature(unwrapped(self.model).forward).parameters
        self._keeps_logits = "logits_to_keep" in takes
        self._passes_positions = "position_ids" in takes

    @property
    def vocabulary(self) -> int:
        """Rows of the embedding: the bound of token ids."""
        return self.model.get_input_embeddings().weight.shape[0]

    # ---- the step ----------------------------------------------------------------------------------------------------

    def accumulate(
        self, samples: Sequence[Sample], threshold: DriftThreshold, given_up: Callable[[], bool] = lambda: False
    ) -> Scores | None:
        """Forward and backward over the batch: leaves the gradient of N x L, summed over these samples, in ``.grad``.
        None, and nothing of use there, when ``given_up``, which is asked between two micro-batches.

        A failure is masked by what this forward says of it; those masked whatever it says (too old under ``age``, cut
        under ``mask_truncated``) are scored without a backward pass. With nothing to teach the gradient is zero."""
        rule = self.settings.trainer.mask_negatives
        cut = np.array([s.cut and s.teaches and self.settings.trainer.mask_truncated for s in samples], bool)
        old = np.array([s.teaches and s.advantage < 0 and s.lag > 0 and rule == "age" for s in samples], bool)
        scores = Scores(
            current=[None] * len(samples),
            entropy=[None] * len(samples),
            drift=np.full(len(samples), np.nan),
            avoided=old & ~cut,
            cut=cut,
            threshold=threshold.value,
            tokens=sum(s.sampled_tokens for s in samples if s.counts),
        )
        for p in self.parameters.values():
            p.grad = None
        taught = [i for i, s in enumerate(samples) if s.teaches]
        for silent in (False, True):
            members = [i for i in taught if (cut[i] or old[i]) == silent]
            for batch in micro_batches(samples, members, self.settings.trainer.micro_batch_tokens):
                if given_up():
                    return None
                with torch.set_grad_enabled(not silent):
                    self._one(batch, samples, scores, rule)
        for i in taught:
            if samples[i].lag == 0:
                threshold.observe(samples[i].recorded - scores.current[i])
        if not np.isfinite(scores.loss_sum):  # said through the gradient, so that all trainers skip this step
            first = next(iter(self.parameters.values()))
            first.grad = torch.full_like(first, torch.nan)
        return scores

    def _one(self, batch: MicroBatch, samples: Sequence[Sample], scores: Scores, rule: str) -> None:
        current, entropy = self._score(batch, self.settings.rollout.temperature)
        rows = torch.from_numpy(batch.rows).to(self.device)
        recorded = torch.from_numpy(batch.recorded).to(self.device)
        advantages = torch.tensor(
            [samples[i].advantage for i in batch.members], dtype=torch.float64, device=self.device
        )
        drift = mean_drift(recorded, current, rows, len(batch.members))
        if current.requires_grad:
            lags = torch.tensor([samples[i].lag for i in batch.members], device=self.device)
            avoided = failures_already_avoided(advantages, drift, lags, rule, scores.threshold)
            loss = summed_loss(current, advantages.masked_fill(avoided, 0.0)[rows])
            loss.backward()
            scores.loss_sum += float(loss.detach())
            scores.avoided[batch.members] = avoided.cpu().numpy()
        scores.drift[batch.members] = drift.cpu().numpy()
        scores.micro_batches += 1
        scores.padded_tokens += batch.tokens.size
        ends = np.cumsum([samples[i].sampled_tokens for i in batch.members])[:-1]
        for into, values in ((scores.current, current), (scores.entropy, entropy)):
            for i, part in zip(batch.members, np.split(values.detach().float().cpu().numpy(), ends), strict=True):
                into[i] = part

    def _score(self, batch: MicroBatch, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probability and entropy of the n sampled tokens of a micro-batch, each (n,)."""
        tokens = torch.from_numpy(batch.tokens).to(self.device)
        first, last = int(batch.columns.min()) - 1, int(batch.columns.max())
        inputs = {"input_ids": tokens, "use_cache": False}
        if not batch.attention.all():  # without padding a plain causal mask is faster
            inputs["attention_mask"] = torch.from_numpy(batch.attention).to(self.device)
        if self._passes_positions:
            inputs["position_ids"] = torch.from_numpy(batch.positions).to(self.device)
        if self._keeps_logits:  # no logits for prompts: often most of the memory
            inputs["logits_to_keep"] = torch.arange(first, last, device=self.device)
        logits = self.model(**inputs).logits
        if not self._keeps_logits:
            logits = logits[:, first:last]
        rows, columns = (torch.from_numpy(x).to(self.device) for x in (batch.rows, batch.columns))
        where = rows * logits.shape[1] + columns - 1 - first
        return token_logprobs(logits.flatten(0, 1), where, tokens[rows, columns], temperature)

    def flat_gradient(self) -> torch.Tensor:
        """A float32 copy of the summed gradient, one dimension, in the order of ``parameters``; zeros where a parameter
        got none. Trainers add these up; the untouched ``.grad`` stays for another try."""
        parts = [
            torch.zeros(p.numel(), device=p.device) if p.grad is None else p.grad.reshape(-1).float()
            for p in self.parameters.values()
        ]
        return torch.cat(parts)

    def load_flat_gradient(self, flat: torch.Tensor) -> None:
        """Put back what ``flat_gradient`` gave, summed over trainers. Raises ValueError when the length is another."""
        expected = sum(p.numel() for p in self.parameters.values())
        if flat.shape != (expected,):
            raise ValueError(f"a gradient of shape {tuple(flat.shape)} came for a model of {expected} parameters")
        at = 0
        for p in self.parameters.values():
            p.grad = flat[at : at + p.numel()].view_as(p).to(device=p.device, dtype=p.dtype, copy=True)
            at += p.numel()

    def step(self, tokens: int) -> dict[str, float]:
        """Divide the summed gradient by ``tokens`` (N, over all trainers), clip its norm, take one AdamW step.

        A gradient that is not finite changes nothing and counts in ``skipped``; trainers that hold the same sum decide
        the same. Returns grad_norm (before clipping), learning_rate, step_skipped (0 or 1), skipped_steps (so far)."""
        rate = warm(self.settings.trainer.learning_rate, self.settings.trainer.warmup_steps, self.steps)
        self.steps += 1
        before = self.skipped
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        norm = 0.0
        if tokens > 0 and gradients:
            norm = float(torch.nn.utils.get_total_norm(gradients)) / tokens
            if np.isfinite(norm):
                limit = self.settings.trainer.max_grad_norm
                clip = limit / norm if 0 < limit < norm else 1.0
                torch._foreach_mul_(gradients, clip / tokens)
                for group in self.optimizer.param_groups:
                    group["lr"] = rate
                self.optimizer.step()
            else:
                self.skipped += 1
        self.optimizer.zero_grad(set_to_none=True)
        return {
            "grad_norm": norm,
            "learning_rate": rate,
            "step_skipped": float(self.skipped - before),
            "skipped_steps": float(self.skipped),
        }

    # ---- what others need of the weights -----------------------------------------------------------------------------

    def named_state(self) -> dict[str, torch.Tensor]:
        """Live tensors to publish, by the names a plain transformers model has: parameters and persistent buffers. Tied
        parameters appear under each of their names and share storage."""
        state = self.model.state_dict()
        named = {clean_name(name): tensor for name, tensor in state.items()}
        if len(named) != len(state):
            raise ValueError("two weights of the model have one name once wrappers are taken off; unwrap the model")
        return named

    @torch.no_grad()
    def probe(self, tokens: np.ndarray, wire_dtype: torch.dtype) -> np.ndarray:
        """Log-probability of each of ``tokens`` (int32, (n,)) after the first, at temperature 1; float32 (n-1,).

        Under the weights as they travel: cast to the wire dtype and back; computed in the master dtype."""
        ids = torch.from_numpy(np.asarray(tokens, np.int64)).to(self.device)
        inputs = {"input_ids": ids[None], "use_cache": False}
        if wire_dtype == self.dtype:
            logits = self.model(**inputs).logits
        else:
            state = dict(self.model.named_parameters()) | _persistent_buffers(self.model)
            travelled = {n: t.to(wire_dtype).to(t.dtype) if t.is_floating_point() else t for n, t in state.items()}
            logits = functional_call(self.model, travelled, kwargs=inputs).logits
        where = torch.arange(len(ids) - 1, device=self.device)
        logprobs, _ = token_logprobs(logits[0], where, ids[1:], 1.0)
        return logprobs.float().cpu().numpy()


def _persistent_buffers(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    kept = {clean_name(name) for name in model.state_dict()}
    return {name: buffer for name, buffer in model.named_buffers() if clean_name(name) in kept}


WRAPPED = ("_orig_mod", "_checkpoint_wrapped_module")
"""What torch.compile and activation checkpointing call the module that they wrap, wherever it stands. They leave its
weights what they are. (FSDP2 has no wrapper; sharded tensors are refused where weights are described.)"""


def clean_name(name: str) -> str:
    """A weight's name without the marks of wrappers. Raises ValueError for those that change what it is."""
    parts = [part for part in name.split(".") if part not in WRAPPED]
    changed = (
        "in data-parallel training" if parts[0] == "module"
        else "sharded by FSDP" if "_fsdp_wrapped_module" in parts
        else "with an adapter" if parts[:2] == ["base_model", "model"] or any(
            p == "base_layer" or p.startswith("lora_") for p in parts)
        else "with a parametrization" if "parametrizations" in parts
        else ""
    )  # fmt: skip
    if changed:
        raise ValueError(
            f"weight {name} is that of a model {changed}; rollouts know only plain models: unwrap or merge it before "
            "training"
        )
    return ".".join(parts)


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """The module inside of its wrappers."""
    while inner := next((m for name, m in model.named_children() if name in WRAPPED), None):
        model = inner
    return model


def adamw(parameters: list[torch.nn.Parameter], settings: Config) -> torch.optim.AdamW:
    """AdamW; weight decay on matrices only, as usual: gains and biases have no reason to shrink."""
    t = settings.trainer
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": t.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([g for g in groups if g["params"]], t.learning_rate, (t.adam_beta1, t.adam_beta2))


def warm(rate: float, warmup_steps: int, step: int) -> float:
    """The learning rate of step ``step`` (from 0): a linear ramp over ``warmup_steps``, then constant."""
    return rate * min(1.0, (step + 1) / max(1, warmup_steps))


def load_policy(settings: Config, device: torch.device | str = "cpu") -> Policy:
    """The policy of ``settings``, on ``device``. Raises ValueError naming model.path and what to change."""
    path = resolve(settings.model.path, settings.run.seed)
    tokenizer = load_tokenizer(path, settings.model)
    policy = Policy(load_model(path, settings.model).to(device), tokenizer, settings)
    rate = settings.trainer.learning_rate
    if policy.dtype == torch.bfloat16 and rate < 1e-4:
        policy.notes.append(
            f"model.dtype = bfloat16 with trainer.learning_rate = {rate:g}: most updates are too small for a "
            "weight's last place and round to nothing; use float32 master weights (the wire may stay bfloat16)"
        )
    return policy
