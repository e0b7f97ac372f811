"""What can be trained: heads for a model, and small models that draft for one."""

from __future__ import annotations

import math
import shutil
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from copy import deepcopy
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from tswift.decoding.params import SamplingParams
from tswift.distributed import Dist
from tswift.engine import ending
from tswift.errors import Fault, InputError
from tswift.models.checkpoint import silence
from tswift.models.fingerprint import fingerprint_in_any_dtype
from tswift.models.heads import HEAD_TYPES, Heads
from tswift.models.heads_io import load_heads
from tswift.models.load import LoadedModel
from tswift.models.target import Target
from tswift.training.config import SHAPES, DraftConfig, HeadsConfig, Progress, TrainConfig
from tswift.training.data import Documents, jumping_positions
from tswift.training.evaluate import Agreement, HeadsScores, agreements, evaluate_heads
from tswift.training.folder import TrainFolder
from tswift.training.losses import CAUSAL, DraftLoss, Metrics, heads_loss

HEADS, MODEL = "heads.safetensors", "model.safetensors"
_WARMUP_SHARE = 0.25  # most of a training in which the rate rises: table 9's 50 steps of 200


class Trainer:
    """A module that is trained in place by optimizers made with the highest learning rates; both go to checkpoints.

    ``name`` is what the weights are called there.
    """

    def __init__(self, module: nn.Module, optimizers: Sequence[torch.optim.Optimizer], name: str) -> None:
        module.train().requires_grad_(True)
        self._module, self._optimizers, self._name = module, optimizers, name
        self._rates = [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizers]

    def step(self, factor: float) -> None:
        """Update the weights by the gradients, at this factor of the learning rates."""
        for optimizer, rates in zip(self._optimizers, self._rates, strict=True):
            for group, highest in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = highest * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def tensors(self) -> dict[str, Tensor]:
        """The whole state: weights and optimizer states."""
        state = {f"{self._name}.{name}": value for name, value in self._weights().items()}
        for number, optimizer in enumerate(self._optimizers):
            for index, memory in optimizer.state_dict()["state"].items():
                state |= {f"optimizer.{number}.{index}.{name}": value for name, value in memory.items()}
        return state

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Continue from such a state.

        Raises:
            KeyError, RuntimeError, ValueError: it is not of such a module.
        """
        weights = _with_prefix(self._name, tensors)
        different = self._weights().keys() ^ weights.keys()
        if different:
            raise KeyError(*different)
        self._module.load_state_dict(weights, strict=False)  # of tied weights only one name is kept
        for number, optimizer in enumerate(self._optimizers):
            memories: dict[int, dict[str, Tensor]] = {}
            for name, value in _with_prefix(f"optimizer.{number}", tensors).items():
                index, _, what = name.partition(".")
                memories.setdefault(int(index), {})[what] = value
            optimizer.load_state_dict({"state": memories, "param_groups": optimizer.state_dict()["param_groups"]})

    def _weights(self) -> dict[str, Tensor]:
        return {name: weight.detach() for name, weight in self._module.named_parameters()}


class Trainee(ABC):
    """What is trained for a model, and how it is evaluated."""

    scores: type  # the dataclass of what evaluate() returns

    def __init__(self, module: nn.Module, optimizers: Sequence[torch.optim.Optimizer], name: str, ranks: Dist) -> None:
        self.trainer, self._wrapped = Trainer(module, optimizers, name), ranks.wrap(module)

    def learn(self, ids: Tensor, key: Sequence[int], of: int = 1, last: bool = True) -> Metrics:
        """Add the gradient of a micro-batch.

        Args:
            ids: ``[B, T]`` int64 token ids.
            key: of the random generator.
            of: number of micro-batches in a step.
            last: whether this is the step's last one, after which processes average their gradients.
        """
        with self._wrapped.no_sync() if self._wrapped is not None and not last else nullcontext():
            return self._backward(ids, key, 1 / of)

    @abstractmethod
    def _backward(self, ids: Tensor, key: Sequence[int], scale: float) -> Metrics:
        """Add the gradient of a micro-batch's mean loss, times a factor."""

    @abstractmethod
    def evaluate(self, folder: TrainFolder | None = None, quick: bool = False) -> Any:
        """Scores on the held-out texts, of the result in a folder or of the module as it is; ``quick`` without alpha.

        Raises:
            InputError: no memory to do so.
        """

    @abstractmethod
    def write(self, folder: TrainFolder) -> None:
        """Write the result."""


class HeadsTrainee(Trainee):
    """Heads that learn to predict what a frozen model says next; heads of the model's own are not used.

    Raises:
        InputError: measuring alpha would need more positions than the model has.
    """

    scores = HeadsScores

    def __init__(
        self, config: HeadsConfig, model: LoadedModel, documents: Documents, ranks: Dist, progress: Progress
    ) -> None:
        target = model.target
        if config.alpha_tokens >= target.max_positions:
            raise InputError(f"must be below the model's {target.max_positions:,} positions", "--alpha-tokens")
        self._config, self._model, self._progress = config, model, progress
        self._rows = documents.held_out_rows(config.seq_len)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            self.heads: Heads = HEAD_TYPES[config.kind](target.hidden_size, config.heads_count)
        self.heads.to(target.device, _trained_dtype(target))
        super().__init__(self.heads, adamw(self.heads, config.lr, config.weight_decay), "heads", ranks)

    def _backward(self, ids: Tensor, key: Sequence[int], scale: float) -> Metrics:
        objective = self._config.objective
        return heads_loss(self._model.target, self.heads, ids, objective, scale=scale, wrapped=self._wrapped)

    def evaluate(self, folder: TrainFolder | None = None, quick: bool = False) -> HeadsScores:
        """Loss and accuracy of each head, and alpha."""
        heads, target = self.heads, self._model.target
        if folder is not None:  # the file is evaluated, whose weights are rounded to bfloat16
            heads = load_heads(folder.path / HEADS, target.hidden_size, target.dtype, target.device)
        tokens = 0 if quick else self._config.alpha_tokens
        on_progress = partial(self._progress.update, "alpha, before" if folder is None else "alpha, after")
        return evaluate_heads(self._model, heads, self._rows, self._config, tokens, on_progress)

    def write(self, folder: TrainFolder) -> None:
        """Write the heads file."""
        folder.write(HEADS, partial(self.heads.save, base=fingerprint_in_any_dtype(self._model.target.model)))


class DraftTrainee(Trainee):
    """A small model that learns to draw what a large one draws."""

    scores = Agreement

    def __init__(
        self, config: DraftConfig, model: LoadedModel, documents: Documents, ranks: Dist, progress: Progress
    ) -> None:
        target = self._target = model.target
        self._config, self._tokenizer = config, model.tokenizer
        self._params = ending(SamplingParams(), model.eos_ids, False)[0]
        self._rows = [row.tolist() for row in documents.held_out_rows(config.seq_len)]
        self.network = draft_network(config, target).to(target.device, _trained_dtype(target))
        self.network.set_attn_implementation(CAUSAL)
        parameters = self.network.num_parameters()
        progress.say(f"draft model of {parameters:,} parameters, {config.positions:,} positions")
        self.loss = DraftLoss(self.network, target, config.objective)
        super().__init__(self.loss, muon(self.network, config.lr, config.weight_decay), "draft", ranks)

    def positions(self, key: Sequence[int]) -> Tensor | None:
        """Positions of a batch with jumps, so that far positions are learnt from short rows; None for 0, 1, ..."""
        config = self._config
        if config.positions < config.seq_len + 2:
            return None  # no room to jump
        rng = np.random.default_rng([*key, 1])  # the rows are drawn with the key alone
        return torch.from_numpy(jumping_positions(config.batch, config.seq_len, config.positions, rng))

    def _backward(self, ids: Tensor, key: Sequence[int], scale: float) -> Metrics:
        device, positions = self.network.device, self.positions(key)
        ids, positions = ids.to(device), None if positions is None else positions.to(device)
        count = ids.shape[0] * (ids.shape[1] - 1)
        with torch.autocast(device.type, torch.bfloat16, enabled=self._target.dtype == torch.bfloat16):
            loss, hits = (self._wrapped or self.loss)(ids, positions)
        (loss * (scale / count)).backward()
        return Metrics(loss.detach().double().unsqueeze(0), hits.unsqueeze(0), count)

    def evaluate(self, folder: TrainFolder | None = None, quick: bool = False) -> Agreement:
        """Losses of both models, and how often they draw the same token."""
        network = self.network
        if folder is not None:
            with silence():
                network = LlamaForCausalLM.from_pretrained(folder.path, dtype=self._target.dtype)
        draft = Target(deepcopy(network).to(self._target.device, self._target.dtype))
        window = self._config.seq_len - 1
        each = [agreements(self._target, draft, row, (0,), window, self._params)[0][0] for row in self._rows]
        return Agreement.mean(each)

    def write(self, folder: TrainFolder) -> None:
        """Write the model in bfloat16 with the large one's tokenizer: a folder for ``--draft-model``."""
        network = deepcopy(self.network).to(torch.bfloat16)
        try:
            with TemporaryDirectory(dir=folder.path) as place, silence():
                network.save_pretrained(place, max_shard_size="1000GB")
                self._tokenizer.save_pretrained(place)
                # the weights come last: without them it is no model
                for path in sorted(Path(place).iterdir(), key=lambda path: path.name == MODEL):
                    folder.write(path.name, partial(shutil.copyfile, path))
        except OSError as error:
            raise Fault(f"{folder.path} cannot be written to ({error.strerror})") from None


TRAINEES: dict[type[TrainConfig], Any] = {HeadsConfig: HeadsTrainee, DraftConfig: DraftTrainee}


def draft_network(config: DraftConfig, target: Target) -> LlamaForCausalLM:
    """A draft model with random weights, on the CPU in float32."""
    text = target.model.config.get_text_config()
    shape = {**SHAPES[config.shape], "vocab_size": target.vocab_size, "max_position_embeddings": config.positions}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        return LlamaForCausalLM(LlamaConfig(**shape, bos_token_id=text.bos_token_id, eos_token_id=text.eos_token_id))


def learning_rate(step: int, share: float, warmup: int) -> float:
    """Factor of the learning rates at a step from 0, when a share of the training is done: half a cosine.

    It rises linearly for ``warmup`` steps, a quarter of the training at most.
    """
    risen = max((step + 1) / warmup if warmup else 1.0, share / _WARMUP_SHARE)
    return min(1.0, risen) * 0.5 * (1 + math.cos(math.pi * min(share, 1.0)))


def adamw(heads: Heads, rate: float, decay: float) -> list[torch.optim.Optimizer]:
    """The paper's optimizer for heads (table 9)."""
    return [torch.optim.AdamW(heads.parameters(), lr=rate, betas=(0.9, 0.999), weight_decay=decay)]


def muon(network: PreTrainedModel, rate: float, decay: float) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices; AdamW at 0.15 of its rate for embeddings and norms."""
    ends = {id(network.get_input_embeddings().weight), id(network.get_output_embeddings().weight)}
    matrices = [weight for weight in network.parameters() if weight.ndim == 2 and id(weight) not in ends]
    inside = {id(weight) for weight in matrices}
    others = [weight for weight in network.parameters() if id(weight) not in inside]
    return [
        torch.optim.Muon(matrices, lr=rate, momentum=0.95, weight_decay=decay, adjust_lr_fn="original"),
        torch.optim.AdamW(others, lr=0.15 * rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def _trained_dtype(target: Target) -> torch.dtype:
    """At least float32: beside a model in bfloat16, small updates would be lost on weights in bfloat16."""
    return torch.promote_types(target.dtype, torch.float32)


def _with_prefix(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    start = f"{prefix}."
    return {name.removeprefix(start): value for name, value in tensors.items() if name.startswith(start)}
