"""What can be trained: heads for a model, and small models that draft for one."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any, Generic

import numpy as np
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from tswift.decoding.stats import DecodeStats
from tswift.distributed import Dist
from tswift.engine import Request, begin
from tswift.errors import InputError, renamed
from tswift.forward.target import Target
from tswift.loading.model import LoadedModel
from tswift.models.checkpoint import silence
from tswift.models.hashes import fingerprint_in_any_dtype
from tswift.sampling.parameters import SamplingParams, apply_eos_policy
from tswift.speculators.heads import HEAD_TYPES
from tswift.speculators.heads_files import load_heads
from tswift.tables import Reporter
from tswift.training.agreement import Scores, mean, measure_agreement
from tswift.training.config import DISTILL, TIMES, Config, DraftConfig, HeadsConfig, TrainConfig
from tswift.training.data import Documents, jumping_positions
from tswift.training.losses import (
    CAUSAL,
    DraftLoss,
    HeadsLoss,
    Metrics,
    total,
)
from tswift.training.teacher import LIKELIEST, Lessons, Taught, teach

HEADS, MODEL = "heads.safetensors", "model.safetensors"
TEACHER = "teacher-{}.bin"  # by rank
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


class Trainee(ABC, Generic[Config]):
    """What is trained for a model, and how it is evaluated."""

    name: str  # in checkpoints

    def __init__(
        self,
        config: Config,
        model: LoadedModel,
        documents: Documents,
        ranks: Dist,
        progress: Reporter,
        folder: Path,
    ) -> None:
        self._config = config
        self._model = model
        self._target = model.target
        self._progress = progress
        self._documents = documents
        self._ranks = ranks
        self._folder = folder
        self._rows = [torch.from_numpy(row) for row in documents.held_out_rows(config.seq_len)]
        # at least float32: beside a model in bfloat16, small updates would be lost on weights in
        # bfloat16
        dtype = torch.promote_types(self._target.dtype, torch.float32)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            self.network: Any = self.build().to(self._target.device, dtype)
        self.loss = self.make_loss()
        self.trainer = Trainer(self.network, self.optimizers(), self.name)
        self._wrapped = ranks.wrap(self.loss)

    @abstractmethod
    def build(self) -> nn.Module:
        """The network with random weights."""

    @abstractmethod
    def make_loss(self) -> nn.Module:
        """The network and its loss: one module for several processes to wrap."""

    @abstractmethod
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Those of the network, with the highest learning rates."""

    def learn(self, step: int, number: int, share: float) -> Metrics:
        """Add the gradient of a micro-batch.

        Args:
            step: how many steps were done before.
            number: of the micro-batch in its step. After the last one, processes average their
                gradients.
            share: of the training that is done.
        """
        accumulate = self._config.accumulate
        apart = self._wrapped is not None and number < accumulate - 1
        with self._wrapped.no_sync() if self._wrapped is not None and apart else nullcontext():
            found = self._metrics(self._wrapped or self.loss, *self.rows(step, number, share))
            (found.loss.sum() / (accumulate * found.positions)).backward()
        return replace(found, loss=found.loss.detach().double())

    def _metrics(self, network: nn.Module, *inputs: Tensor | None) -> Metrics:
        target = self._target
        with torch.autocast(target.device.type, torch.bfloat16, enabled=self.halves):
            metrics: Metrics = network(
                *(each if each is None else each.to(target.device) for each in inputs)
            )
        return metrics

    @property
    def halves(self) -> bool:
        """Whether products are taken in bfloat16."""
        return self._target.dtype == torch.bfloat16

    def rows(self, step: int, number: int, share: float) -> tuple[Tensor | None, ...]:
        """What the loss takes for a micro-batch; the arguments are as of :meth:`learn`."""
        config = self._config
        ranks = self._ranks
        key = (config.seed, step, number * ranks.count + ranks.rank)
        ids = torch.from_numpy(self._documents.batch(config.batch, config.seq_len, key))
        return ids, *self.places(len(ids), key)

    def places(self, rows: int, key: Sequence[int]) -> tuple[Tensor | None, ...]:
        """What the loss takes beside token ids: positions, None for 0, 1, ...;
        rows are drawn with the key alone.
        """
        return (None,)

    @abstractmethod
    def evaluate(self, folder: Path | None = None, quick: bool = False) -> Scores:
        """Scores on the held-out texts, of the result in a folder or the module as it is;
        ``quick`` without alpha.
        """

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write the result's files."""


class HeadsTrainee(Trainee[HeadsConfig]):
    """Heads that learn to predict what a frozen model says next;
    heads of the model's own are not used.
    """

    name = "heads"
    _ids: Tensor | None = None  # the draft vocabulary

    def build(self) -> nn.Module:
        """Heads with random weights; what they learn from is made ready, too."""
        config = self._config
        target = self._target
        if config.alpha_tokens >= target.max_positions:
            raise InputError(
                f"must be below the model's {target.max_positions:,} positions", "alpha_tokens"
            )
        heads = HEAD_TYPES[config.kind](target.hidden_size, config.heads_count)
        size = config.draft_vocabulary
        if 0 < size < target.vocab_size:
            heads.draft_ids = torch.from_numpy(self._documents.frequent(size, target.vocab_size))
            self._ids = heads.draft_ids.to(target.device)
        self._held_out = [self._teach(row[None]) for row in self._rows]
        shape = config.seq_len, target.hidden_size, self._held_out[0].likeliest.shape[-1]
        path = self._folder / TEACHER.format(self._ranks.rank)
        self._lessons = Lessons(path, self._read, config.kept_rows, shape, config.seed)
        if config.kept_rows:
            where = f"{path}, {self._lessons.bytes / 1e9:.1f} GB"
            self._progress.say(
                f"what the model says of up to {config.keep_tokens:,} tokens: {where}"
            )
        return heads

    def make_loss(self) -> HeadsLoss:
        """Over the draft vocabulary."""
        return HeadsLoss(self.network, self._target, self._config.objective)

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

    def rows(self, step: int, number: int, share: float) -> tuple[Tensor | None, ...]:
        """New rows in the first half of the training; the same ones again after that,
        as these cost no pass.
        """
        config = self._config
        first = (step * config.accumulate + number) * config.batch
        return self._lessons.take(first, config.batch, share < _NEW)

    @property
    def halves(self) -> bool:
        """Also beside a model in float32 on a processor that multiplies bfloat16 faster."""
        known = torch.cpu.get_capabilities()
        fast = self._target.device.type == "cpu" and (
            known.get("avx512_bf16") or known.get("amx_bf16")
        )
        return super().halves or bool(fast and self._target.dtype == torch.float32)

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The paper's (table 9)."""
        config = self._config
        return [
            torch.optim.AdamW(
                self.network.parameters(), config.lr, (0.9, 0.999), weight_decay=config.weight_decay
            )
        ]

    def evaluate(self, folder: Path | None = None, quick: bool = False) -> Scores:
        """Loss and accuracy of each head, and what ``tokenswift`` with its defaults makes of their
        drafts.
        """
        config = self._config
        target = self._target
        tokens = 0 if quick else self._config.alpha_tokens
        if folder is not None:  # the file is evaluated, whose weights are rounded to bfloat16
            heads = load_heads(folder / HEADS, target.hidden_size, target.dtype, target.device)
        else:
            heads = (
                deepcopy(self.network).to(target.device, target.dtype).eval().requires_grad_(False)
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
            try:
                model = replace(self._model, heads=heads)
                prompt = row[:longest].tolist()
                generation = begin(
                    model,
                    Request(prompt=prompt, length=tokens, seed=config.seed, method="tokenswift"),
                )
            except InputError as error:
                raise renamed(error, {"length": "alpha_tokens"}) from None
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

    def save(self, folder: Path) -> None:
        """Write the heads file."""
        self.network.save(folder / HEADS, base=fingerprint_in_any_dtype(self._target.model))


class DraftTrainee(Trainee[DraftConfig]):
    """A small model that learns to draw what a large one draws."""

    name = "draft.network"

    def build(self) -> nn.Module:
        """A Llama of the published shape, with the vocabulary of the model."""
        config = self._config
        text = self._target.model.config.get_text_config()
        shape = {
            **config.sizes,
            "vocab_size": self._target.vocab_size,
            "max_position_embeddings": config.positions,
        }
        ends = {"bos_token_id": text.bos_token_id, "eos_token_id": text.eos_token_id}
        network = LlamaForCausalLM(LlamaConfig(**shape, **ends))
        network.set_attn_implementation(CAUSAL)
        parameters = network.num_parameters()
        self._progress.say(
            f"draft model of {parameters:,} parameters, {config.positions:,} positions"
        )
        return network

    def make_loss(self) -> DraftLoss:
        """Of the text."""
        return DraftLoss(self.network)

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Muon and AdamW."""
        ends = (
            self.network.get_input_embeddings().weight,
            self.network.get_output_embeddings().weight,
        )
        return muon(self.network, ends, self._config.lr, self._config.weight_decay)

    def places(self, rows: int, key: Sequence[int]) -> tuple[Tensor | None, ...]:
        """Positions with jumps, so that far ones are learnt from short rows,
        where there is room to jump.
        """
        config = self._config
        rng = np.random.default_rng([*key, 1])
        if config.positions < config.seq_len + 2:
            return (None,)
        return (torch.from_numpy(jumping_positions(rows, config.seq_len, config.positions, rng)),)

    def evaluate(self, folder: Path | None = None, quick: bool = False) -> Scores:
        """Losses of both models, and how often they draw the same token."""
        network = self.network
        if folder is not None:
            with silence():
                network = LlamaForCausalLM.from_pretrained(folder, dtype=self._target.dtype)
        draft = Target(deepcopy(network).to(self._target.device, self._target.dtype))
        params, _ = apply_eos_policy(SamplingParams(), self._model.eos_ids, False)
        return mean(
            [measure_agreement(self._target, draft, row.tolist(), params) for row in self._rows]
        )

    def save(self, folder: Path) -> None:
        """Write the model in bfloat16 with the large one's tokenizer:
        a folder for ``--draft-model``.
        """
        with silence():
            deepcopy(self.network).to(torch.bfloat16).save_pretrained(
                folder, max_shard_size="1000GB"
            )
            self._model.tokenizer.save_pretrained(folder)


def trainee_of(config: TrainConfig) -> type[Trainee[Any]]:
    """What these settings train."""
    return HeadsTrainee if isinstance(config, HeadsConfig) else DraftTrainee


def learning_rate(step: int, share: float, warmup: int) -> float:
    """Factor of the learning rates at a step from 0, when a share of the training is done:
    half a cosine.

    It rises linearly for ``warmup`` steps, a quarter of the training at most.
    """
    risen = max((step + 1) / warmup if warmup else 1.0, share / _WARMUP_SHARE)
    return min(1.0, risen) * 0.5 * (1 + math.cos(math.pi * min(share, 1.0)))


def muon(
    network: nn.Module, ends: Sequence[Tensor], rate: float, decay: float
) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices; AdamW at 0.15 of its rate for norms and the ``ends``,
    such as embeddings.
    """
    apart = {id(weight) for weight in ends}
    matrices = [
        weight for weight in network.parameters() if weight.ndim == 2 and id(weight) not in apart
    ]
    inside = {id(weight) for weight in matrices}
    others = [weight for weight in network.parameters() if id(weight) not in inside]
    return [
        torch.optim.Muon(
            matrices, lr=rate, momentum=0.95, weight_decay=decay, adjust_lr_fn="original"
        ),
        torch.optim.AdamW(others, lr=0.15 * rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def _with_prefix(start: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {
        name.removeprefix(start): value for name, value in tensors.items() if name.startswith(start)
    }
