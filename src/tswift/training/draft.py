"""Train a small model to draft for a large one, from random weights; the work behind ``tswift train-draft``."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import LlamaForCausalLM

from tswift.decoding.params import SamplingParams
from tswift.engine import ending
from tswift.errors import Fault
from tswift.models.loaded import LoadedModel
from tswift.models.source import silence
from tswift.models.target import Target
from tswift.training.agreement import Agreement, agreements
from tswift.training.course import AFTER, SILENCE, Course, Outcome
from tswift.training.documents import Documents
from tswift.training.draft_plan import SHAPES, DraftPlan
from tswift.training.folder import TrainFolder
from tswift.training.imitation import DraftTrainer, Imitator, optimizers_of
from tswift.training.loop import Show
from tswift.training.pretrain import CAUSAL
from tswift.training.ranks import Ranks
from tswift.training.session import begin, go_on

MODEL = "model.safetensors"


class DraftPupil:
    """A small model that learns to draw what a large one draws.

    Args:
        plan: what is asked.
        model: the large one.
        documents: what is trained on, and held out.
        ranks: the processes.
        show: who is told of the progress.
    """

    def __init__(self, plan: DraftPlan, model: LoadedModel, documents: Documents, ranks: Ranks, show: Show) -> None:
        target = self._target = model.target
        self._tokenizer, self._params = model.tokenizer, ending(SamplingParams(), model.eos_ids, False)[0]
        self._rows = [documents.beginning(document, plan.seq_len).tolist() for document in documents.held_out]
        # where the large one is in bf16, small updates would be lost on weights in bf16
        network = untrained(plan, target).to(target.device, torch.promote_types(target.dtype, torch.float32))
        network.set_attn_implementation(CAUSAL)
        show.say(f"draft model of {network.num_parameters():,} parameters, {plan.farthest:,} positions")
        imitator = Imitator(network, target, plan.objective)
        coarse = target.dtype == torch.bfloat16
        optimizers = optimizers_of(network, plan.lr, plan.weight_decay)
        self.trainer = DraftTrainer(imitator, optimizers, coarse, ranks.wrap(imitator))

    def score(self) -> Mapping[str, Any]:
        """Its loss on the held-out texts, the large one's, and how often both draw the same."""
        found = self._judge(self.trainer.imitator.network)
        return {"loss": found.loss, "target_loss": found.target_loss, "agreement": found.agreement}

    def judge(self, when: str, folder: TrainFolder) -> Agreement:
        """The same: of the model as it is, or of the one in the folder."""
        if when != AFTER:
            return self._judge(self.trainer.imitator.network)
        with silence():
            return self._judge(LlamaForCausalLM.from_pretrained(folder.path, dtype=self._target.dtype))

    def _judge(self, network: LlamaForCausalLM) -> Agreement:
        draft, length = Target(deepcopy(network).to(self._target.device, self._target.dtype)), len(self._rows[0]) - 1
        each = [agreements(self._target, draft, row, (0,), length, self._params)[0][0] for row in self._rows]
        losses, target_losses, same = zip(*((one.loss, one.target_loss, one.agreement) for one in each), strict=True)
        return Agreement(*(sum(values) / len(each) for values in (losses, target_losses, same)))

    def write(self, folder: TrainFolder) -> None:
        """Write the model in bfloat16, with the large one's tokenizer: a folder that ``--draft-model`` takes."""
        network = deepcopy(self.trainer.imitator.network).to(torch.bfloat16)
        try:
            with TemporaryDirectory(dir=folder.path) as place, silence():
                network.save_pretrained(place, max_shard_size="1000GB")
                self._tokenizer.save_pretrained(place)
                # the weights come last: without them it is no model
                for path in sorted(Path(place).iterdir(), key=lambda path: path.name == MODEL):
                    folder.write(path.name, partial(shutil.copyfile, path))
        except OSError as error:
            raise Fault(f"{folder.path} cannot be written to ({error.strerror})") from None


_COURSE = Course("train-draft", DraftPlan, Agreement, DraftPupil)


def train(plan: DraftPlan, out: Path | None = None, show: Show = SILENCE, command: Sequence[str] = ()) -> Outcome:
    """Train a small model from the beginning; see :func:`tswift.training.session.begin`."""
    return begin(_COURSE, plan, out, show, command)


def resume(path: Path, given: Mapping[str, Any], show: Show = SILENCE, command: Sequence[str] = ()) -> Outcome:
    """Go on with a training of a small model; see :func:`tswift.training.session.go_on`."""
    return go_on(_COURSE, path, given, show, command)


def untrained(plan: DraftPlan, target: Target) -> LlamaForCausalLM:
    """The small model that a training begins with, on the CPU in float32."""
    config, text = deepcopy(SHAPES[plan.shape]), target.model.config.get_text_config()
    config.vocab_size, config.max_position_embeddings = target.vocab_size, plan.farthest
    config.bos_token_id, config.eos_token_id = text.bos_token_id, text.eos_token_id
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(plan.seed)
        return LlamaForCausalLM(config)
