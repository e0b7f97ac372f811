"""A small model that drafts for another one: ``python -m recipes.draft --model MODEL --corpus
FOLDER --out DIR``.

It begins with random weights, has the vocabulary of the model, and learns from the text alone:
fitted to the large model's distributions for as long, it drew its token less often. The folder is
for ``--draft-model DIR``. The same command goes on with a training that was stopped, from its last
checkpoint: on a CPU it comes to the same weights, bit for bit.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from recipes.agreement import Scores, mean, measure_agreement
from recipes.corpus import PG19, jumping_positions
from recipes.pretrain import CAUSAL, muon
from recipes.work import claim
from tswift.errors import InputError, Object
from tswift.forward.target import Target
from tswift.loading.model import LoadedModel, load
from tswift.machine import environment
from tswift.models.checkpoint import silence
from tswift.models.config import DEMO, NO_HEADS
from tswift.models.devices import find_device
from tswift.sampling.parameters import SamplingParams, apply_eos_policy
from tswift.training.config import HeadsConfig
from tswift.training.data import prepare
from tswift.training.tasks import Trainer, learning_rate

MODEL, RECORD, CHECKPOINT = "model.safetensors", "train.json", "checkpoint.safetensors"
# held at a time: 256 MB in float32, and a few times as much on the way to their gradient
_MAX_LOGITS = 1 << 26


def _shape(
    hidden: int, mlp: int, positions: int, layers: int, heads: int, theta: float, **more: object
) -> Object:
    return {
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "max_position_embeddings": positions,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        **more,
    }


# Published shapes of draft models; vocabulary and special tokens are the large model's.
SHAPES: dict[str, Object] = {
    # The paper's table 11. It says nothing of layers and embeddings; two layers and an LM head of
    # its own, as the model of 68M parameters has that TriForce drafts with, make 205.9 x 2^20
    # parameters with LLaMA3.1's vocabulary of 128,256.
    "205m": _shape(768, 3072, 2048, 2, 12, 500_000.0, hidden_act="silu", tie_word_embeddings=False),
    # the bundled one's, half a million parameters with a vocabulary of 2,048
    "demo": _shape(128, 512, 131_072, 1, 1, 100_000.0, head_dim=64, tie_word_embeddings=True),
}


@dataclass(frozen=True)
class DraftPlan:
    """What is trained on what, for how long."""

    corpus: str  # folder, file or hub id
    steps: int
    shape: str = "demo"
    reach: int | None = None  # positions it is made for; None for the shape's
    seq_len: int = 512  # tokens of a row
    batch: int = 8  # rows of a step
    lr: float = 0.02  # Muon's highest; 0.15 of it is AdamW's
    weight_decay: float = 0.01
    warmup: int = 50
    seed: int = 0
    held_out: int | None = None  # documents; None for 4, a tenth at most
    save_every: int = 200  # steps between checkpoints

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "save_every"):
            if getattr(self, name) < 1:
                raise InputError(f"must be at least 1, got {getattr(self, name)}", name)
        if self.seq_len > self.positions:
            raise InputError(
                f"is {self.seq_len:,}, the draft model is to have {self.positions:,} positions",
                "seq_len",
            )

    @property
    def positions(self) -> int:
        """Positions that the draft model is made for."""
        return int(self.reach or SHAPES[self.shape]["max_position_embeddings"])


def train_draft(model: LoadedModel, plan: DraftPlan, out: Path, work: Path) -> Object:
    """Train a small model for a large one, or go on with that, and write it to ``out`` with the
    large one's tokenizer, in bfloat16.

    Returns:
        Steps, tokens, seconds, the machine, and scores of the held-out texts before and after.

    Raises:
        InputError: the corpus cannot be used, or ``work`` holds another training.
    """
    log = claim(work, plan)
    path = work / RECORD
    if path.exists() and (out / MODEL).exists():
        return dict(json.loads(path.read_text()))
    target = model.target
    rows = HeadsConfig(plan.corpus, seq_len=plan.seq_len, held_out=plan.held_out)
    documents = prepare(rows, model.tokenizer, target.vocab_size)
    held_out = documents.held_out_rows(plan.seq_len)
    params, _ = apply_eos_policy(SamplingParams(), model.eos_ids, False)

    def scores(network: PreTrainedModel) -> Scores:
        draft = Target(deepcopy(network).to(target.device, target.dtype))
        return mean([measure_agreement(target, draft, row.tolist(), params) for row in held_out])

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(plan.seed)
        network = _network(target, plan).to(target.device)
    log(f"draft model of {network.num_parameters():,} parameters, {plan.positions:,} positions")
    before = scores(network)
    log(f"held out, before: {before}")
    ends = (network.get_input_embeddings().weight, network.get_output_embeddings().weight)
    trainer = Trainer(network, muon(network, ends, plan.lr, plan.weight_decay), "draft")
    done, seconds = _load(trainer, work / CHECKPOINT)
    started = time.monotonic() - seconds
    for step in range(done, plan.steps):
        key = (plan.seed, step, 0)
        ids = torch.from_numpy(documents.batch(plan.batch, plan.seq_len, key)).to(target.device)
        positions = None
        if plan.positions >= plan.seq_len + 2:  # far positions are learnt from short rows
            rng = np.random.default_rng([*key, 1])
            jumping = jumping_positions(plan.batch, plan.seq_len, plan.positions, rng)
            positions = torch.from_numpy(jumping).to(target.device)
        halves = target.dtype == torch.bfloat16
        with torch.autocast(target.device.type, torch.bfloat16, enabled=halves):
            loss = text_loss(network, ids, positions)
        loss.backward()
        trainer.step(learning_rate(step, step / plan.steps, plan.warmup))
        if step % 20 == 0 or step == plan.steps - 1:
            took = time.monotonic() - started
            log(f"step {step}/{plan.steps} loss {loss.item():.3f} {took:.0f} s")
        if (step + 1) % plan.save_every == 0:
            _save(trainer, work / CHECKPOINT, step + 1, time.monotonic() - started)
    seconds = time.monotonic() - started
    out.mkdir(parents=True, exist_ok=True)
    with silence():
        deepcopy(network).to(torch.bfloat16).save_pretrained(out, max_shard_size="1000GB")
        model.tokenizer.save_pretrained(out)
        # what was written is what is measured, whose weights are rounded
        after = scores(LlamaForCausalLM.from_pretrained(out, dtype=target.dtype))
    log(f"held out, after: {after}")
    record = {
        "steps": plan.steps,
        "tokens": plan.steps * plan.batch * plan.seq_len,
        "seconds": seconds,
        "environment": environment(target.device),
        "before": before,
        "after": after,
    }
    path.write_text(json.dumps(record, indent=2))
    return record


def load_large(model: str, device: str = "auto") -> LoadedModel:
    """The model that is drafted for, in bfloat16 on a GPU."""
    dtype = "bfloat16" if find_device(device).type == "cuda" else "float32"
    return load(model, device=device, dtype=dtype, heads=NO_HEADS, exact=False)


def _network(target: Target, plan: DraftPlan) -> LlamaForCausalLM:
    """A Llama of random weights with the vocabulary of a model."""
    text = target.model.config.get_text_config()
    shape = {**SHAPES[plan.shape], "vocab_size": target.vocab_size}
    shape["max_position_embeddings"] = plan.positions
    ends = {"bos_token_id": text.bos_token_id, "eos_token_id": text.eos_token_id}
    network = LlamaForCausalLM(LlamaConfig(**shape, **ends)).float()
    network.set_attn_implementation(CAUSAL)
    return network


def text_loss(
    network: PreTrainedModel, ids: Tensor, positions: Tensor | None, max_logits: int = _MAX_LOGITS
) -> Tensor:
    """Mean loss of ``[B, T]`` int64 token ids, in nats, of a model whose attention is ``CAUSAL``.

    Where there are more than ``max_logits``, they are computed again for the backward pass.
    """
    hidden = network.get_decoder()(
        input_ids=ids, position_ids=positions, use_cache=False
    ).last_hidden_state
    count = ids.shape[1] - 1
    width = max(1, max_logits // (len(ids) * network.config.vocab_size))

    def stretch(hidden: Tensor, tokens: Tensor) -> Tensor:
        logits = network.get_output_embeddings()(hidden).flatten(0, 1)
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return F.cross_entropy(wide, tokens, reduction="sum")

    losses = []
    for start in range(0, count, width):
        end = min(start + width, count)
        inputs = hidden[:, start:end], ids[:, start + 1 : end + 1].flatten()
        losses.append(
            checkpoint(stretch, *inputs, use_reentrant=False) if width < count else stretch(*inputs)
        )
    return torch.stack(losses).sum() / (len(ids) * count)


def _save(trainer: Trainer, path: Path, step: int, seconds: float) -> None:
    about = {"step": str(step), "seconds": str(seconds)}
    tensors = {name: value.contiguous() for name, value in trainer.tensors().items()}
    save_file(tensors, f"{path}.new", metadata=about)
    os.replace(f"{path}.new", path)


def _load(trainer: Trainer, path: Path) -> tuple[int, float]:
    """Steps done and seconds they took, by the last checkpoint."""
    if not path.exists():
        return 0, 0.0
    with safe_open(path, framework="pt") as file:
        trainer.load({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
        about = file.metadata()
    return int(about["step"]), float(about["seconds"])


def main() -> None:
    """Parse the command line and train."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    usual = DraftPlan("", 2000)
    parser.add_argument("--model", default=DEMO, help="that it drafts for: %(default)s")
    parser.add_argument(
        "--corpus", default=PG19, help="folder of .parquet or .txt files, or a hub id: %(default)s"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the model")
    parser.add_argument("--work", type=Path, help="intermediate results: OUT/work")
    parser.add_argument("--steps", type=int, default=usual.steps, help="%(default)s")
    parser.add_argument("--shape", choices=SHAPES, default=usual.shape, help="%(default)s")
    parser.add_argument("--reach", type=int, help="positions it is made for: the shape's")
    for name, what in {
        "seq_len": "tokens of a row",
        "batch": "rows of a step",
        "seed": "of first weights and rows",
    }.items():
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, type=int, default=getattr(usual, name), help=what)
    parser.add_argument("--device", default="auto")
    args = parser.parse_args()
    names = ("corpus", "steps", "shape", "reach", "seq_len", "batch", "seed")
    try:
        plan = DraftPlan(**{name: getattr(args, name) for name in names})
        train_draft(
            load_large(args.model, args.device), plan, args.out, args.work or args.out / "work"
        )
    except InputError as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        parser.exit(130, "interrupted; the same command goes on from the last checkpoint\n")


if __name__ == "__main__":
    main()
