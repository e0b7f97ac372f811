"""Train a tiny Qwen3.5 with a head for multi-token prediction on a text,
and measure how often the head guesses right.

    python -m benchmarks.mtp train /tmp/tiny-qwen35 --seconds 100
    python -m benchmarks.mtp measure /tmp/tiny-qwen35 --contexts 1000,8000
    python -m benchmarks.mtp passes /tmp/random-qwen35 --layers 12

The text is a novel and Python's own documentation. The head reads the state after the model's final
norm, and is trained along. ``train`` also trains one that reads the state before that norm, whose
weights begin at random so that the two differ, and tells how well each guesses from either state.
``measure`` tells how many drafts came true, by level, with a window and without. ``passes`` times
passes of one node and of a tree of eight, in turns, of a random model of 0.3 billion weights (12
layers) or 0.6 (24).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping
from pathlib import Path
from pydoc_data.topics import topics

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3_5TextConfig

import tswift
from recipes.corpus import train_tokenizer
from tswift.caches import FullKV
from tswift.drafting.options import DraftOptions
from tswift.forward.passes import Nodes
from tswift.forward.text import prefill
from tswift.sampling.parameters import SamplingParams

_NOVEL = Path(__file__).parents[1] / "prompts" / "long-novel.txt"
_ROWS, _LENGTH, _VOCAB = 8, 160, 768
_LEVELS = 6


class StockHead(nn.Module):
    """The head by transformers' own modules, as Qwen's checkpoints have it."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        config = model.config
        hidden = config.hidden_size
        attending = config.layer_types.index("full_attention")
        decoder = model.get_decoder()
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden, self.norm = (
            type(decoder.norm)(hidden) for _ in range(3)
        )
        self.fc = nn.Linear(2 * hidden, hidden, bias=False)
        self.layers = nn.ModuleList([type(decoder.layers[attending])(config, attending)])

    def forward(self, model: PreTrainedModel, states: Tensor, tokens: Tensor) -> Tensor:
        """``[rows, n, V]`` logits of what follows ``tokens``,
        which follow those of the states ``[rows, n, H]``.
        """
        return model.lm_head(self.after(model, states, tokens))

    def after(self, model: PreTrainedModel, states: Tensor, tokens: Tensor) -> Tensor:
        """``[rows, n, H]`` states of its own."""
        decoder = model.get_decoder()
        count = tokens.shape[1]
        parts = (
            self.pre_fc_norm_embedding(decoder.embed_tokens(tokens)),
            self.pre_fc_norm_hidden(states),
        )
        rows = self.fc(torch.cat(parts, -1))
        mask = torch.full((count, count), -torch.inf).triu(1)[None, None]
        three = hasattr(decoder.rotary_emb, "mrope_section")  # for images
        places = torch.arange(count).expand(3 if three else 1, -1)
        turns = decoder.rotary_emb(rows, places[:, None] if three else places)
        return self.norm(self.layers[0](rows, position_embeddings=turns, attention_mask=mask))

    def save(self, folder: Path) -> None:
        """Add it to a checkpoint of several files."""
        add_tensors(folder, {f"mtp.{name}": each for name, each in self.named_parameters()})


def add_tensors(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Add a file with more tensors to a checkpoint of several."""
    stored = {name: each.detach().clone().contiguous() for name, each in tensors.items()}
    save_file(stored, folder / "mtp.safetensors", {"format": "pt"})
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"] |= dict.fromkeys(stored, "mtp.safetensors")
    index.write_text(json.dumps(content))


def corpus() -> str:
    """The text that is trained on."""
    return "\n".join([_NOVEL.read_text(), *topics.values()])


def train(folder: Path, seconds: float) -> None:
    """Train model and head, and save both."""
    torch.manual_seed(0)
    text = corpus()
    tokenizer = train_tokenizer([text], _VOCAB)
    ids = torch.tensor(tokenizer(text)["input_ids"])
    held, ids = ids[-10 * _LENGTH :], ids[: -10 * _LENGTH]
    config = Qwen3_5TextConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        max_position_embeddings=131_072,
        mtp_num_hidden_layers=1,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = AutoModelForCausalLM.from_config(config)
    model.set_attn_implementation("eager")
    heads = {side: StockHead(model) for side in ("after", "before")}
    nn.init.normal_(model.get_decoder().norm.weight, std=0.5)
    before: list[Tensor] = []
    model.get_decoder().norm.register_forward_pre_hook(lambda norm, given: before.append(given[0]))
    weights = [
        *model.parameters(),
        *(each for head in heads.values() for each in head.parameters()),
    ]
    optimizer = torch.optim.AdamW(weights, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.05)
    started = time.perf_counter()
    step = 0
    while (spent := (time.perf_counter() - started) / seconds) < 1:
        optimizer.param_groups[0]["lr"] = 3e-3 * min(1.0, (step + 1) / 30, 2 * (1 - spent) + 0.02)
        rows = torch.stack(
            [ids[at : at + _LENGTH] for at in torch.randint(len(ids) - _LENGTH, (_ROWS,)).tolist()]
        )
        states = model.get_decoder()(rows, use_cache=False).last_hidden_state
        losses = [
            F.cross_entropy(model.lm_head(states[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        ]
        for head, read in zip(heads.values(), (states, before.pop()), strict=True):
            logits = head(model, read[:, :-2], rows[:, 1:-1])
            losses.append(F.cross_entropy(logits.flatten(0, 1), rows[:, 2:].flatten()))
        optimizer.zero_grad()
        sum(losses).backward()  # type: ignore[union-attr]
        nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        step += 1
    with torch.no_grad():
        rows = held.view(10, _LENGTH)
        states = model.get_decoder()(rows, use_cache=False).last_hidden_state
        wanted = model.lm_head(states[:, 1:-1]).argmax(-1)
        sides = {"after": states, "before": before.pop()}
        guesses = {
            (trained, side): head(model, read[:, :-2], rows[:, 1:-1]).argmax(-1)
            for trained, head in heads.items()
            for side, read in sides.items()
        }
        loss = F.cross_entropy(model.lm_head(states[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
    print(
        f"{step} steps, loss {float(loss):.2f} on held-out text; the model's likeliest token is "
        "the likeliest of a head"
    )
    for (trained, side), guessed in guesses.items():
        share = float((guessed == wanted).float().mean())
        print(f"  trained {trained} the final norm, with the state {side} it: {share:.1%}")
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder, max_shard_size="400KB")
    tokenizer.save_pretrained(folder)
    heads["after"].save(folder)


def measure(folder: Path, contexts: list[int], length: int) -> None:
    """Print how many tokens came true, by level, after prompts of these lengths."""
    model = tswift.load(str(folder), device="cpu")
    ids = model.encode(corpus())
    print(
        "| tokens before | window | tokens a step | "
        + " | ".join(f"level {level + 1}" for level in range(_LEVELS))
        + " |"
    )
    print("|" + " ---: |" * (3 + _LEVELS))
    for context in contexts:
        prompt = (ids * (1 + context // len(ids)))[:context]
        for window in (256, context + length):
            options = DraftOptions(tree=(1,) * _LEVELS, budget=window)
            steps = [
                *tswift.generate(
                    model,
                    prompt,
                    length,
                    method="mtp",
                    options=options,
                    params=SamplingParams(min_p=0.05, penalty=1.0),
                )
            ]
            reached = [sum(step.accepted > level for step in steps) for level in range(_LEVELS)]
            shares = [
                a / b if b else 0.0 for a, b in zip(reached, [len(steps), *reached], strict=False)
            ]
            cells = [
                f"{context:,}",
                f"{window:,}",
                f"{length / len(steps):.2f}",
                *(f"{share:.0%}" for share in shares),
            ]
            print("| " + " | ".join(cells) + " |", flush=True)


def passes(folder: Path, layers: int) -> None:
    """Print the least milliseconds of passes, with their logits, behind 100 tokens."""
    if not folder.exists():
        config = Qwen3_5TextConfig(
            vocab_size=32_768 * layers // 12,
            hidden_size=1024,
            intermediate_size=3072 if layers == 12 else 3584,
            num_hidden_layers=layers,
            num_attention_heads=8,
            num_key_value_heads=2,
            linear_num_value_heads=16,
            max_position_embeddings=131_072,
            tie_word_embeddings=True,
            bos_token_id=0,
            eos_token_id=0,
        )
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        train_tokenizer(["a"], 300).save_pretrained(folder)
    print("| weights | 1 node | 8 nodes | times |\n| --- | ---: | ---: | ---: |")
    given: list[dict[str, str]] = [{"dtype": kind} for kind in ("float32", "bfloat16")]
    for options in [*given, *({"weights": kind} for kind in ("int8", "int4"))]:
        target = tswift.load(str(folder), device="cpu", **options).target  # type: ignore[arg-type]
        kv = FullKV(target.kv_shape, 200)
        prefill(target, [*range(100)], kv)
        parents = [-1, 0, 1, 2, 0, 4, 5, 5]
        least = dict.fromkeys((1, len(parents)), float("inf"))
        for _ in range(7):
            for nodes in least:
                ancestors = torch.eye(nodes, dtype=torch.bool)
                for node, parent in enumerate(parents[1:nodes], 1):
                    ancestors[node] |= ancestors[parent]
                started = time.perf_counter()
                places = 99 + ancestors.sum(1)
                passed = target.forward(Nodes(torch.arange(nodes), places, kv, ancestors))
                target.logits(passed.hidden)
                least[nodes] = min(least[nodes], time.perf_counter() - started)
        one, eight = (1000 * seconds for seconds in least.values())
        kind = next(iter(options.values()))
        print(f"| {kind} | {one:.1f} | {eight:.1f} | {eight / one:.2f} |", flush=True)


def main() -> None:
    """Parse and run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("train", "measure", "passes"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, default=100)
    parser.add_argument("--contexts", default="1000,8000")
    parser.add_argument("--len", type=int, default=400)
    parser.add_argument("--layers", type=int, choices=(12, 24), default=12)
    args = parser.parse_args()
    if args.what == "train":
        train(args.folder, args.seconds)
    elif args.what == "passes":
        passes(args.folder, args.layers)
    else:
        measure(args.folder, [int(each) for each in args.contexts.split(",")], args.len)


if __name__ == "__main__":
    main()
