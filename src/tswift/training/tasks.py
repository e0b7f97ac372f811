"""Heads in training: what they learn from, how they are evaluated and saved."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from tswift.decoding.stats import DecodeStats
from tswift.engine import Request, begin
from tswift.errors import InputError, Object, renaming
from tswift.loading.model import LoadedModel
from tswift.models.hashes import fingerprint_in_any_dtype
from tswift.speculators.heads import HEAD_TYPES
from tswift.speculators.heads_files import load_heads
from tswift.tables import Reporter
from tswift.training.config import DISTILL, TIMES, HeadsConfig
from tswift.training.data import Documents
from tswift.training.losses import HeadsLoss, Metrics, total
from tswift.training.ranks import Dist
from tswift.training.teacher import LIKELIEST, Lessons, Taught, teach

HEADS = "heads.safetensors"
TEACHER = "teacher-{}.bin"  # by rank
Scores = Object  # of the held-out texts, as metrics.jsonl and train.json have them
_PROMPT = 1024  # most tokens of a held-out text that decoding continues
_NEW = 0.5  # share of a training of heads in which rows are new ones
_WARMUP_SHARE = 0.25  # most of a training in which the rate rises: table 9's 50 steps of 200
_NO_ALPHA: Scores = {"alpha": None, "tokens_per_step": None, **dict.fromkeys(TIMES)}
_PLAIN = 64  # tokens that plain decoding writes after each held-out text, to be timed


class Trainer:
    """A module that is trained in place by optimizers made with the highest learning rates;
    both go to checkpoints.

    ``name`` is what the weights are called there.
    """

    def __init__(
        self, module: nn.Module, optimizers: Sequence[torch.optim.Optimizer], name: str
    ) -> None:
        module.train().requires_grad_(True)
        self._module = module
        self._optimizers = optimizers
        self._name = name
        self._rates = [
            [group["lr"] for group in optimizer.param_groups] for optimizer in optimizers
        ]

    def step(self, factor: float) -> None:
        """Update the weights by the gradients, at this factor of the learning rates."""
        for optimizer, rates in zip(self._optimizers, self._rates, strict=True):
            for group, highest in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = highest * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def tensors(self) -> dict[str, Tensor]:
        """The whole state: weights and optimizer states."""
        state = {
            f"{self._name}.{name}": weight.detach()
            for name, weight in self._module.named_parameters()
        }
        for number, optimizer in enumerate(self._optimizers):
            for index, memory in optimizer.state_dict()["state"].items():
                state |= {
                    f"optimizer.{number}.{index}.{name}": value for name, value in memory.items()
                }
        return state

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Continue from such a state; a KeyError, RuntimeError or ValueError if it is not of such a
        module.
        """
        weights = _with_prefix(f"{self._name}.", tensors)
        different = dict(self._module.named_parameters()).keys() ^ weights.keys()
        if different:
            raise KeyError(*different)
        self._module.load_state_dict(weights, strict=False)  # of tied weights only one name is kept
        for number, optimizer in enumerate(self._optimizers):
            memories: dict[int, dict[str, Tensor]] = {}
            for name, value in _with_prefix(f"optimizer.{number}.", tensors).items():
                index, _, what = name.partition(".")
                memories.setdefault(int(index), {})[what] = value
            optimizer.load_state_dict(
                {"state": memories, "param_groups": optimizer.state_dict()["param_groups"]}
            )


class Trainee:
    """Heads that learn to predict what a frozen model says next, and how they are evaluated;
    heads of the model's own are not used.
    """

    _ids: Tensor | None = None  # the draft vocabulary

    def __init__(
        self,
        config: HeadsConfig,
        model: LoadedModel,
        documents: Documents,
        ranks: Dist,
        progress: Reporter,
        folder: Path,
    ) -> None:
        self._config = config
        self._model = model
        self._target = target = model.target
        self._progress = progress
        self._documents = documents
        self._ranks = ranks
        if config.alpha_tokens >= target.max_positions:
            raise InputError(
                f"must be below the model's {target.max_positions:,} positions", "alpha_tokens"
            )
        self._rows = [torch.from_numpy(row) for row in documents.held_out_rows(config.seq_len)]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            heads = HEAD_TYPES[config.kind](target.hidden_size, config.heads_count)
        size = config.draft_vocabulary
        if 0 < size < target.vocab_size:
            heads.draft_ids = torch.from_numpy(documents.frequent(size, target.vocab_size))
            self._ids = heads.draft_ids.to(target.device)
        self._held_out = [self._teach(row[None]) for row in self._rows]
        shape = config.seq_len, target.hidden_size, self._held_out[0].likeliest.shape[-1]
        path = folder / TEACHER.format(ranks.rank)
        self._lessons = Lessons(path, self._read, config.kept_rows, shape, config.seed)
        if config.kept_rows:
            where = f"{path}, {self._lessons.bytes / 1e9:.1f} GB"
            progress.say(f"what the model says of up to {config.keep_tokens:,} tokens: {where}")
        # at least float32: beside a model in bfloat16, small updates would be lost on weights in
        # bfloat16
        dtype = torch.promote_types(target.dtype, torch.float32)
        self.heads = heads.to(target.device, dtype)
        self._loss = HeadsLoss(self.heads, target, config.objective)
        self.trainer = Trainer(
            self.heads,
            [  # the paper's (table 9)
                torch.optim.AdamW(
                    self.heads.parameters(),
                    config.lr,
                    (0.9, 0.999),
                    weight_decay=config.weight_decay,
                )
            ],
            "heads",
        )
        self._wrapped = ranks.wrap(self._loss)

    def _teach(self, ids: Tensor) -> Taught:
        count = LIKELIEST if self._config.objective == DISTILL else 0
        return teach(self._target, ids.to(self._target.device), self._ids, count=count)

    def _read(self, number: int) -> Taught:
        config = self._config
        ranks = self._ranks
        # processes take batches in turns, as one takes all
        batch, place = divmod(number, config.batch)
        key = (config.seed, (batch * ranks.count + ranks.rank) * config.batch + place)
        return self._teach(torch.from_numpy(self._documents.batch(1, config.seq_len, key)))

    def learn(self, step: int, number: int, share: float) -> Metrics:
        """Add the gradient of a micro-batch.

        Its rows are new ones in the first half of the training; the same ones again after that, as
        these cost no pass.

        Args:
            step: how many steps were done before.
            number: of the micro-batch in its step. After the last one, processes average their
                gradients.
            share: of the training that is done.
        """
        config = self._config
        device = self._target.device
        first = (step * config.accumulate + number) * config.batch
        taught = self._lessons.take(first, config.batch, share < _NEW)
        apart = self._wrapped is not None and number < config.accumulate - 1
        with self._wrapped.no_sync() if self._wrapped is not None and apart else nullcontext():
            with torch.autocast(device.type, torch.bfloat16, enabled=self._halves):
                found: Metrics = (self._wrapped or self._loss)(
                    *(each.to(device) for each in taught)
                )
            (found.loss.sum() / (config.accumulate * found.positions)).backward()
        return replace(found, loss=found.loss.detach().double())

    @property
    def _halves(self) -> bool:
        """Whether products are taken in bfloat16: also beside a model in float32 on a processor
        that multiplies bfloat16 faster.
        """
        target = self._target
        known = torch.cpu.get_capabilities()
        fast = target.device.type == "cpu" and (known.get("avx512_bf16") or known.get("amx_bf16"))
        return target.dtype == torch.bfloat16 or bool(fast and target.dtype == torch.float32)

    def evaluate(self, folder: Path | None = None, quick: bool = False) -> Scores:
        """Loss and accuracy of each head on the held-out texts, and what ``tokenswift`` with its
        defaults makes of their drafts.

        It is of the result in a folder, or of the heads as they are; ``quick`` without alpha.
        """
        config = self._config
        target = self._target
        tokens = 0 if quick else self._config.alpha_tokens
        if folder is not None:  # the file is evaluated, whose weights are rounded to bfloat16
            heads = load_heads(folder / HEADS, target.hidden_size, target.dtype, target.device)
        else:
            heads = (
                deepcopy(self.heads).to(target.device, target.dtype).eval().requires_grad_(False)
            )
        loss = HeadsLoss(heads, target, config.objective)
        with torch.no_grad():
            scores = total([loss(*taught) for taught in self._held_out]).scores() | _NO_ALPHA
        if not tokens:
            return scores
        stats = DecodeStats(1)
        plain = DecodeStats(0)
        longest = min(config.seq_len, _PROMPT, target.max_positions - tokens)
        for row in self._rows:
            with renaming(length="alpha_tokens"):
                model = replace(self._model, heads=heads)
                prompt = row[:longest].tolist()
                generation = begin(
                    model,
                    Request(prompt=prompt, length=tokens, seed=config.seed, method="tokenswift"),
                )
            stats.depth = generation.depth
            for step in generation.steps():
                stats.add(step)
                name = "alpha, before" if folder is None else "alpha, after"
                self._progress.update(name, stats.tokens, tokens * len(self._rows))
            for step in begin(
                model,
                Request(prompt=prompt, length=min(tokens, _PLAIN), seed=config.seed, method="ar"),
            ).steps():
                plain.add(step)
        times = dict(
            zip(TIMES, (stats.seconds, stats.tokens / plain.tokens_per_second), strict=True)
        )
        return scores | {"alpha": stats.alpha, "tokens_per_step": stats.tokens_per_step, **times}

    def save(self, path: Path) -> None:
        """Write the heads file."""
        self.heads.save(path, base=fingerprint_in_any_dtype(self._target.model))


def learning_rate(step: int, share: float, warmup: int) -> float:
    """Factor of the learning rates at a step from 0, when a share of the training is done:
    half a cosine.

    It rises linearly for ``warmup`` steps, a quarter of the training at most.
    """
    risen = max((step + 1) / warmup if warmup else 1.0, share / _WARMUP_SHARE)
    return min(1.0, risen) * 0.5 * (1 + math.cos(math.pi * min(share, 1.0)))


def _with_prefix(start: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {
        name.removeprefix(start): value for name, value in tensors.items() if name.startswith(start)
    }
