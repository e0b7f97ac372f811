"""What several tests share: tiny random models, a toy target with exact probabilities,
drafts that lie.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import json
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from random import Random

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.generation import GenerateDecoderOnlyOutput

from tswift.attention.backends import why_not
from tswift.caches import FullKV, KVBuffer, KVShape, States
from tswift.decoding.drafter import Context, Drafter, DraftTree, Source, Step
from tswift.decoding.loop import Decoding
from tswift.drafting.adaptive import AdaptiveDrafter
from tswift.drafting.methods import make_drafter
from tswift.drafting.options import METHODS as _METHODS
from tswift.drafting.options import DraftOptions, RecordedOptions, find_method
from tswift.errors import InputError
from tswift.forward.eager import EagerRunner
from tswift.forward.passes import Forwarded, Nodes
from tswift.forward.target import Target
from tswift.sampling.parameters import SamplingParams
from tswift.sampling.rule import Sampler
from tswift.speculators.heads import HEAD_TYPES, Heads, MedusaHeads

torch.set_num_threads(1)  # the models are tiny: a second thread only costs

# Why there is no C program: no compiler, or no AVX2. PyTorch computes instead of it then, and texts
# are not recalled.
NO_PROGRAM = why_not("native", torch.float32, torch.device("cpu"))
needs_program = pytest.mark.skipif(NO_PROGRAM is not None, reason=str(NO_PROGRAM))
CPU = torch.device("cpu")
_NO_TRITON = why_not("triton", torch.bfloat16, CPU)
needs_triton = pytest.mark.skipif(_NO_TRITON is not None, reason=str(_NO_TRITON))
# All but those of published drafters, which need a model of their own:
# tests/drafting/test_networks.py
METHODS = {
    name: method
    for name, method in _METHODS.items()
    if not method.speculator_kinds and (NO_PROGRAM is None or name != "recall")
}

# what transformers calls the cache of a pass, before 5.24 and since
CACHE = "cache" if hasattr(GenerateDecoderOnlyOutput, "cache") else "past_key_values"

VOCAB = 97
HIDDEN = 32
KV_HEADS = {"mha": 4, "gqa": 2, "mqa": 1}
PLAIN = SamplingParams(min_p=0.0, penalty=1.0)


def first(count: int, cases: Iterable[object]) -> list[object]:
    """Cases of a parametrisation, of which all but so many are slow: `make test-all` has them."""
    return [
        each if at < count else pytest.param(*_values(each), marks=pytest.mark.slow)
        for at, each in enumerate(cases)
    ]


def in_turns(*lists: Sequence[object]) -> list[tuple[object, ...]]:
    """Cases with every value of every list, each beside some of the others' values:
    twice as many as the longest list has, the firsts first.
    """
    most = max(map(len, lists))
    return [
        tuple(
            values[(at + place * (at // most)) % len(values)] for place, values in enumerate(lists)
        )
        for at in range(2 * most)
    ]


def _values(case) -> tuple[object, ...]:
    return case if isinstance(case, tuple) else (case,)


def refused(match: str | None = None) -> pytest.RaisesExc[InputError]:
    """What the user gave is refused, in words that match."""
    return pytest.raises(InputError, match=match)


def read_json(path: str | Path):
    return json.loads(Path(path).read_text())


def seeded(seed: int) -> torch.Generator:
    """Random numbers, the same at every call."""
    return torch.Generator().manual_seed(seed)


def options_for(method: str, **options) -> DraftOptions:
    """Of these options, those that a method uses; none counts as typed."""
    uses = find_method(method).uses
    return RecordedOptions(**{name: value for name, value in options.items() if name in uses})


def tiny_llama(
    kind: str, dtype: torch.dtype, attention: str = "sdpa", layers: int = 1
) -> LlamaForCausalLM:
    """A random Llama whose next-token distributions are peaked, not constant;
    the same weights at every call.
    """
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=KV_HEADS[kind],
        head_dim=8,
        max_position_embeddings=16_384,
        initializer_range=0.3,
        tie_word_embeddings=False,
        attn_implementation=attention,
    )
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return LlamaForCausalLM(config).to(dtype).eval()


@functools.cache
def tiny_target(kind: str = "gqa", dtype: torch.dtype = torch.float64, layers: int = 1) -> Target:
    return Target(tiny_llama(kind, dtype, layers=layers))


@functools.cache
def tiny_draft(dtype: torch.dtype = torch.float64) -> Target:
    """A smaller random model with the vocabulary of :func:`tiny_target`."""
    return Target(tiny_llama("mqa", dtype))


@functools.cache
def tiny_heads(dtype: torch.dtype = torch.float64, count: int = 3, kind: str = "chained") -> Heads:
    """Random heads; their weights are not zero.

    Of the kind ``trimmed`` are conditioned ones with a draft vocabulary.
    """
    with torch.random.fork_rng():
        torch.manual_seed(6)
        heads = HEAD_TYPES["conditioned" if kind == "trimmed" else kind](HIDDEN, count)
        for head in heads.heads:
            torch.nn.init.normal_(head.linear.weight, std=0.2)
    if kind == "trimmed":
        heads.draft_ids = torch.arange(1, VOCAB, 2, dtype=torch.int32)
    return heads.to(dtype).eval().requires_grad_(False)


@functools.cache
def medusa_heads(dtype: torch.dtype = torch.float64, count: int = 3, layers: int = 1) -> Heads:
    """Random Medusa heads, whose logits are peaked."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        heads = MedusaHeads(HIDDEN, count, VOCAB, layers)
        for weight in heads.parameters():
            torch.nn.init.normal_(weight, std=0.3)
    return heads.to(dtype).eval().requires_grad_(False)


@contextlib.contextmanager
def near_tie(network: PreTrainedModel, token: int, other: int, rows: int) -> Iterator[None]:
    """Meanwhile, in passes of more than ``rows`` rows another token's logit is an ulp above this
    one's, else below.

    So the likeliest token depends on how a token is forwarded, by no more than rounding does, on
    every processor.
    """

    def tie(_layer: nn.Module, _given: tuple[Tensor], logits: Tensor) -> Tensor:
        side = math.inf if logits.shape[:-1].numel() > rows else -math.inf
        logits[..., other] = logits[..., token].nextafter(torch.tensor(side, dtype=logits.dtype))
        return logits

    hook = network.get_output_embeddings().register_forward_hook(tie)
    try:
        yield
    finally:
        hook.remove()


def round_single_rows(monkeypatch):
    """From here on, passes that are not exact round a row alone otherwise,
    as they do on some processors only.
    """
    right = Target.logits

    def rounded(self: Target, hidden: Tensor) -> Tensor:
        logits = right(self, hidden)
        return (
            logits.nextafter(logits.abs() + 1)
            if self.fixed_rows is None and len(hidden) == 1
            else logits
        )

    monkeypatch.setattr(Target, "logits", rounded)


def random_prompt(length: int, seed: int = 0, vocab: int = VOCAB) -> list[int]:
    return torch.randint(vocab, (length,), generator=seeded(seed)).tolist()


def context_of(
    text: list[int], params: SamplingParams, seed: int = 3, vocab: int = VOCAB
) -> Context:
    """A decode of the tiny target under way, whose cache is empty."""
    sampler = Sampler(params, seed, vocab, CPU)
    sampler.extend(text)
    return Context(text, sampler, FullKV(tiny_target().kv_shape, 1))


def decode_steps(
    target: Target,
    drafter: Drafter,
    prompt: Sequence[int],
    params: SamplingParams,
    seed: int,
    length: int,
    stop=(),
) -> list[Step]:
    return list(Decoding(target, prompt, params, seed, drafter, length).steps(stop))


def tokens_of(steps: Iterable[Step]) -> list[int]:
    return [token for step in steps for token in step.tokens]


def decode(target, drafter, prompt, params, seed, length, stop=()) -> list[int]:
    return tokens_of(decode_steps(target, drafter, prompt, params, seed, length, stop))


class Unwanted:
    """Tokens that end a text, of which nobody can say whether one does: a decode fails by them."""

    def __contains__(self, token: object) -> bool:
        raise ArithmeticError


def endings(begun: Callable[[], Decoding]) -> dict[str, Callable[[], object]]:
    """Decodes that end in every way, by the way."""
    return {
        "not begun": begun,
        "finished": lambda: [*begun().steps()],
        "left": lambda: [*zip(range(9), begun().steps(), strict=False)],
        "failed": lambda: [*begun().steps(Unwanted())],
    }


def outlived(monkeypatch, runs: dict[str, Callable[[], object]]) -> list[str]:
    """What of the caches and states that runs made is alive after each,
    without a collection of garbage.
    """
    made: list[weakref.ref] = []
    for kind in (KVBuffer, States):
        right = kind.__init__
        monkeypatch.setattr(
            kind,
            "__init__",
            lambda self, *given, right=right: made.append(weakref.ref(self)) or right(self, *given),
        )
    left = []
    gc.disable()
    try:
        for name, run in runs.items():
            with contextlib.suppress(ArithmeticError):
                run()
            assert made
            left += [f"{name}: {type(each).__name__}" for ref in made if (each := ref())]
            del made[:]
    finally:
        gc.enable()
    return left


def drafter_of(method: str, target: Target, options: DraftOptions) -> Drafter:
    if method == "medusa" and options.tree:
        # three heads draft three levels; tokenswift's first is the LM head's
        options = dataclasses.replace(options, tree=options.tree[-3:])
    return make_drafter(method, target, tiny_heads(target.dtype), options, tiny_draft(target.dtype))


def decode_method(method, target, prompt, params, seed, length, options=None, stop=()) -> list[int]:
    drafter = drafter_of(method, target, options or DraftOptions())
    return decode(target, drafter, prompt, params, seed, length, stop)


def path_to(tree: DraftTree, node: int) -> tuple[int, ...]:
    """Tokens from below the root to a node."""
    return (*path_to(tree, tree.parents[node]), tree.tokens[node]) if node else ()


class Proposals(Source):
    """A draft source from a function: context -> paths."""

    name = "proposals"

    def __init__(self, paths: Callable[[Context], Sequence[Sequence[int]]]):
        self.paths = paths

    def propose(self, tree: DraftTree, context: Context):
        for path in self.paths(context):
            tree.add(path, self.name)


class ToyTarget:
    """A target whose logits are ``table[token before, token]``,
    and which reads the token before from the KV cache.

    So the exact probabilities are known, and a commit of the wrong slots would show.
    """

    def __init__(self, table: Tensor):
        self.table = table
        self.vocab_size = table.shape[-1]
        self.device = CPU
        self.dtype = torch.float64
        self.kv_shape = KVShape(1, 1, 1, self.dtype, self.device)
        self.forwarded_nodes: list[int] = []
        self.caches: weakref.WeakSet[FullKV] = weakref.WeakSet()
        self.replays = self.on_cuda = self.chunked_prompt = self.chunked_text = False
        self.fixed_rows = None
        self.runner = EagerRunner(self)

    def forward(self, nodes: Nodes) -> Forwarded:
        tokens, positions, kv, ancestors = vars(nodes).values()
        values = tokens.double().view(1, -1, 1)
        kv.write(0, values, values)
        self.forwarded_nodes.append(len(tokens))
        if ancestors is None:
            ancestors = torch.ones(len(tokens), len(tokens), dtype=torch.bool).tril()
        parents = ancestors & (positions == positions[:, None] - 1)
        committed = kv.buffers[0][0, 0, kv.length - 1, 0].long() if kv.length else 0
        before = torch.where(parents.any(1), tokens[parents.long().argmax(1)], committed)
        return Forwarded(torch.stack([before, tokens], dim=1), [torch.zeros(1, len(tokens), 1)])

    verify = Target.verify

    def logits(self, hidden: Tensor) -> Tensor:
        return self.table[hidden[:, 0], hidden[:, 1]]

    def renew(self):
        pass

    def prepare(self, kv: KVBuffer, limit: int):
        pass


def toy_target(vocab: int = 4, seed: int = 1, scale: float = 1.0) -> ToyTarget:
    generator = seeded(seed)
    return ToyTarget(
        torch.randn(vocab, vocab, vocab, generator=generator, dtype=torch.float64) * scale
    )


def exact_step(table: Tensor, text: Sequence[int], params: SamplingParams) -> list[float]:
    """Probabilities of the token after ``text``, in plain Python: temperature, penalty, min-p,
    top-k.
    """
    logits = table[text[-2], text[-1]].tolist()
    logits = [x / params.temperature for x in logits]
    for token in set(text[max(0, len(text) - params.window) :] if params.window else []):
        x = logits[token]
        logits[token] = x / params.penalty if x > 0 else x * params.penalty
    best = max(logits)
    weights = [math.exp(x - best) for x in logits]
    weights = [w if w >= params.min_p else 0.0 for w in weights]
    if params.top_k:
        least = sorted(weights)[-params.top_k]
        weights = [w if w >= least else 0.0 for w in weights]
    return [w / sum(weights) for w in weights]


def exact_joint(
    table: Tensor, prompt: Sequence[int], params: SamplingParams, length: int
) -> dict[tuple[int, ...], float]:
    """Probability of every text of ``length`` tokens after the prompt."""
    joint: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        joint = {
            (*path, token): probability * step
            for path, probability in joint.items()
            for token, step in enumerate(exact_step(table, [*prompt, *path], params))
            if step > 0
        }
    return joint


def random_tree(nodes: int, random: Random, vocab: int = VOCAB) -> DraftTree:
    """A tree of exactly so many nodes."""
    tree = DraftTree(random.randrange(vocab), nodes)
    while len(tree) < nodes:
        tree.grow(random.randrange(len(tree)), random.randrange(vocab), "random")
    return tree


def take_turns(drafter: AdaptiveDrafter):
    """Have each arm draft every so many steps, whatever it costs."""
    bandit = drafter.bandit
    arms = len(drafter.arms)
    bandit.learn = lambda *given, **named: setattr(bandit, "chosen", (bandit.chosen + 1) % arms)
