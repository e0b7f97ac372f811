"""A model that was trained on a toy language for half a second, and texts in that language."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from recipes.corpus import token_stream, train_tokenizer
from recipes.pretrain import Plan, pretrain
from tswift.speculators.heads import ChainedHeads

SENTENCE = (
    "the ship sailed over a grey sea and nobody on deck spoke of weather before that night came "
    "down again"
)
WORDS = SENTENCE.split()
SHORT, LONG = 6, 18  # documents of 20 words, and of 300


@dataclass(frozen=True)
class Tiny:
    """Folders of a model (2,048 positions, no heads) and of its corpus;
    one of the long documents is there twice.

    ``deep`` is a model of three layers with random weights.
    """

    model: Path
    deep: Path
    corpus: Path


def make_tiny(folder: Path) -> Tiny:
    rng = random.Random(1)
    after = {word: rng.sample(WORDS, 2) for word in WORDS}

    def text(length: int) -> str:
        words = [rng.choice(WORDS)]
        while len(words) < length:
            words += rng.choices(after[words[-1]], [3, 1])
        return " ".join(words)

    texts = [text(20) for _ in range(SHORT)] + [text(300) for _ in range(LONG)]
    rng.shuffle(texts)
    texts.append(max(texts, key=len))
    (folder / "corpus").mkdir()
    for number, each in enumerate(texts):
        (folder / "corpus" / f"{number:02}.txt").write_text(each)
    tokenizer = train_tokenizer(texts, 300)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            max_position_embeddings=2048,
            tie_word_embeddings=False,
            bos_token_id=0,
            eos_token_id=0,
        )
        model = LlamaForCausalLM(config)
        plan = Plan(
            steps=60,
            tokens_per_step=512,
            short_row=64,
            long_from=2,
            heads_from=2,
            warmup=3,
            position_limit=128,
        )
        pretrain(model, ChainedHeads(32), token_stream(texts, tokenizer), plan, lambda line: None)
        deep = LlamaForCausalLM(
            LlamaConfig(**{**config.to_dict(), "num_hidden_layers": 3, "initializer_range": 0.3})
        )
    for name, made in (("model", model), ("deep", deep)):
        made.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return Tiny(folder / "model", folder / "deep", folder / "corpus")
