"""The recipe of the bundled model: ``python -m recipes.demo --corpus FOLDER --out DIR``.

Every stage leaves its result in the work folder and is skipped when that is there: tokenizer, token
streams, base model with heads trained along, text written by the model itself, heads fitted to that
text, held-out loss, model card.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from recipes.agreement import read_logits
from recipes.corpus import PG19, load_documents, random_rows, split, token_stream, train_tokenizer
from recipes.heads import HeadsPlan, train_heads, write_text
from recipes.pretrain import Plan, pretrain
from recipes.work import claim
from tswift.caches import FullKV
from tswift.errors import InputError
from tswift.forward.target import Target
from tswift.models.hashes import fingerprint_in_any_dtype
from tswift.sampling.parameters import SamplingParams
from tswift.speculators.heads import ChainedHeads, ConditionedHeads
from tswift.speculators.heads_files import load_heads

_DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
POSITIONS = (0, 10_000, 40_000, 100_000)
CHAINED, CONDITIONED = HeadsPlan(steps=180, matrix_lr=0.01), HeadsPlan(steps=600, matrix_lr=0.02)
_CONDITIONED_HEADS = 4
_ROW = 512  # tokens of a row that the model writes for its heads
WINDOW, TEXTS = 2048, 3  # tokens measured at each position, and in how many texts


def demo_config(vocab_size: int) -> LlamaConfig:
    """The bundled model's shape: one query head on one KV head of 64 per layer.

    One row per node and KV head keeps a pass over eight nodes bound by reading the KV cache, as a
    pass over one is.
    """
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=131_072,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
    )


@dataclass(frozen=True)
class Recipe:
    """What is trained on what, for how long."""

    corpus: str  # folder or hub id
    about: str  # what the corpus is, for the model card
    base: Plan
    vocab_size: int = 2048
    rows: int = 4096  # that the model writes for its heads; the chained ones see the first half
    chained: HeadsPlan = CHAINED
    conditioned: HeadsPlan = CONDITIONED


def build(out: Path, work: Path, recipe: Recipe) -> None:
    """Run the stages that are not done yet, then write the finished model to ``out``.

    Raises:
        InputError: the work folder holds stages of another recipe.
    """
    log = claim(work, recipe)
    tokenizer, train, held_out = _streams(recipe.corpus, work, recipe.vocab_size, log)
    base = _base(work / "base", train, recipe, log)
    own = _own_text(work / "own.npy", base, train, recipe.rows, log)
    out.mkdir(parents=True, exist_ok=True)
    chained = load_heads(
        work / "base" / "heads.safetensors", base.config.hidden_size, torch.float32, base.device
    )
    torch.manual_seed(recipe.base.seed)
    conditioned = ConditionedHeads(base.config.hidden_size, _CONDITIONED_HEADS).to(base.device)
    for heads, plan, rows, name in (
        (chained, recipe.chained, recipe.rows // 2, "heads-chained.safetensors"),
        (conditioned, recipe.conditioned, recipe.rows, "heads.safetensors"),
    ):
        if not (work / name).exists():
            train_heads(base, heads, own[:rows].ravel(), plan, log)
            heads.save(work / name, torch.float32)
        finished = load_heads(work / name, base.config.hidden_size, torch.float32, base.device)
        finished.save(out / name, base=fingerprint_in_any_dtype(base))
    tokenizer.save_pretrained(out)
    base.to(torch.bfloat16).save_pretrained(out)
    (out / "generation_config.json").unlink(missing_ok=True)
    # what was shipped is what is measured: the weights as rounded to bf16
    shipped = LlamaForCausalLM.from_pretrained(out, dtype=torch.float32)
    figures = held_out_losses(shipped, held_out, log)
    log(f"held-out loss by position: {figures}")
    facts = json.loads((work / "corpus.json").read_text())
    (out / "README.md").write_text(_card(shipped, recipe, facts, figures))


def held_out_losses(
    model: LlamaForCausalLM, stream: np.ndarray, log: Callable[[str], None]
) -> dict[int, float]:
    """Mean next-token loss, in nats, over a window from each position on:
    the whole text before it is in the context.

    Args:
        model: the model; its attention is replaced by ours.
        stream: ``[n]`` token ids nobody trained on; texts are read from several places of it.
        log: takes a line of progress.
    """
    target = Target(model)
    length = POSITIONS[-1] + WINDOW
    sums = dict.fromkeys(POSITIONS, 0.0)
    for start in np.linspace(0, len(stream) - length - 1, TEXTS).astype(int):
        text = stream[start : start + length + 1].tolist()
        kv = FullKV(target.kv_shape, length)
        for position in POSITIONS:
            goal = torch.tensor(text[position + 1 : position + 1 + WINDOW], device=target.device)
            logits = read_logits(target, text, position, WINDOW, kv)
            sums[position] += F.cross_entropy(logits, goal).item()
        log(
            f"held-out text from token {start}: { ({p: round(s, 3) for p, s in sums.items()}) } "
            "(sums)"
        )
    return {position: total / TEXTS for position, total in sums.items()}


def _card(
    model: LlamaForCausalLM, recipe: Recipe, facts: dict[str, float], losses: dict[int, float]
) -> str:
    config = model.config
    bits = [loss / facts["characters_per_token"] / math.log(2) for loss in losses.values()]
    kv_bytes = (
        2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4 * 100_000
    )
    template = (Path(__file__).parent / "model_card.md").read_text()
    return template.format(
        model=model.num_parameters(),
        config=config,
        kv_mb=round(kv_bytes / 1e6),
        recipe=recipe,
        plan=recipe.base,
        decay=1 - recipe.base.decay_from,
        long=1 - recipe.base.long_from,
        heads_share=1 - recipe.base.heads_from,
        heads=_CONDITIONED_HEADS,
        facts=facts,
        device=torch.cuda.get_device_name()
        if torch.cuda.is_available()
        else f"{torch.get_num_threads()} CPU cores",
        date=time.strftime("%Y-%m-%d"),
        window=WINDOW,
        texts=TEXTS,
        head=" | ".join(f"{position:,}" for position in losses),
        rule=" | ".join("---" for _ in losses),
        losses=" | ".join(f"{loss:.3f}" for loss in losses.values()),
        bits=" | ".join(f"{each:.3f}" for each in bits),
    )


def _streams(
    corpus: str, work: Path, vocab_size: int, log: Callable[[str], None]
) -> tuple[PreTrainedTokenizerFast, np.ndarray, np.ndarray]:
    if not (work / "held.npy").exists():
        documents = load_documents(corpus)
        kept, held = split(documents)
        tokenizer = train_tokenizer(kept[::4], vocab_size)
        tokenizer.save_pretrained(work / "tokenizer")
        train, held_out = token_stream(kept, tokenizer), token_stream(held, tokenizer)
        facts = {
            "documents": len(documents),
            "held_out": len(held),
            "train_tokens": len(train),
            "characters_per_token": sum(map(len, held)) / len(held_out),
        }
        (work / "corpus.json").write_text(json.dumps(facts))
        log(f"corpus: {facts}")
        np.save(work / "train.npy", train)
        np.save(work / "held.npy", held_out)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(work / "tokenizer")
    return tokenizer, np.load(work / "train.npy", mmap_mode="r"), np.load(work / "held.npy")


def _base(
    folder: Path, stream: np.ndarray, recipe: Recipe, log: Callable[[str], None]
) -> LlamaForCausalLM:
    if not (folder / "heads.safetensors").exists():
        torch.manual_seed(recipe.base.seed)
        model = LlamaForCausalLM(demo_config(recipe.vocab_size)).to(_DEVICE)
        heads = ChainedHeads(model.config.hidden_size).to(_DEVICE)
        pretrain(model, heads, stream, recipe.base, log)
        model.save_pretrained(folder)
        heads.save(folder / "heads.safetensors", torch.float32)
    # heads and text are made for the weights that are shipped, which are bf16
    rounded = LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    return rounded.float().to(_DEVICE)


def _own_text(
    path: Path, model: LlamaForCausalLM, stream: np.ndarray, rows: int, log: Callable[[str], None]
) -> np.ndarray:
    if not path.exists():
        starts = random_rows(stream, rows, 32, np.random.default_rng(3))
        np.save(path, write_text(model, starts, _ROW, SamplingParams(), 128, log))
    return np.load(path)


def main() -> None:
    """Parse the command line and build."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--corpus", default=PG19, help="folder of .parquet or .txt files, or a hub id: %(default)s"
    )
    parser.add_argument("--out", type=Path, default=Path("src/tswift/models/demo"))
    parser.add_argument(
        "--work", type=Path, default=Path("build/demo-model"), help="intermediate results"
    )
    parser.add_argument(
        "--steps", type=int, default=1100, help="steps of 8,192 tokens for the base model"
    )
    parser.add_argument(
        "--about", default="", help="what the corpus is, for the model card (default: its name)"
    )
    parser.add_argument(
        "--compile",
        action="store_true",
        help="torch.compile the base: faster, needs a C++ compiler",
    )
    args = parser.parse_args()
    plan = Plan(steps=args.steps, compiled=args.compile)
    try:
        build(args.out, args.work, Recipe(args.corpus, args.about or f"`{args.corpus}`", plan))
    except InputError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
