"""Texts forwarded in chunks and committed to a cache: prompts, and what was generated before."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from tswift.caches import FullKV, KVBuffer
from tswift.forward.cuda.graphs import StaticPass
from tswift.forward.hf import output_of, watched
from tswift.forward.passes import PROMPT_CHUNK, Forwarded, Nodes
from tswift.forward.target import Target

OnProgress = Callable[[int, int], None]  # tokens forwarded so far, and to forward in all
_REPLAYED = 4  # passes that follow each other from which on it pays to capture one


def forward_wide(target: Target, nodes: Nodes) -> Forwarded:
    """As :meth:`Target.forward`, of any number of tokens that follow each other; only where passes
    are replayed.
    """
    length = torch.full((), nodes.kv.length, dtype=torch.int32, device=target.device)
    return target.compute_static(nodes, length, batch_invariant=True)


@torch.inference_mode()
def first_broken(target: Target, tokens: Sequence[int], kv: KVBuffer) -> tuple[str, int] | None:
    """Where NaN or infinity first shows in a pass over tokens after the cache's;
    nothing is committed.

    Returns:
        The embeddings, layer, final norm or LM head whose output it is, by name, and the first such
        token; None if all are finite.
    """
    broken: list[tuple[str, int]] = []

    def look(name: str, inputs: object, out: Tensor | tuple[Tensor, ...]) -> None:
        first = out[0] if isinstance(out, tuple) else out
        rows = (~first.reshape(len(tokens), -1).isfinite().all(-1)).nonzero()
        if len(rows):
            broken.append((name, int(rows[0])))

    model = target.model
    parts = [model.get_output_embeddings()]
    for part in model.get_decoder().children():
        parts += part if isinstance(part, nn.ModuleList) else [part]
    positions = torch.arange(kv.length, kv.length + len(tokens), device=target.device)
    ids = torch.tensor(tokens, device=target.device)
    with watched({name: part for name, part in model.named_modules() if part in parts}, look):
        output_of(model)(target.forward_eager(Nodes(ids, positions, kv)).hidden)
    return broken[0] if broken else None


def chunks(
    target: Target, tokens: Sequence[int], kv: FullKV, prompt: int | None = None
) -> Iterator[Forwarded]:
    """Forward a text in chunks, commit each, and yield its pass.

    With exact passes the keys and values of a text are those that decoding made, bit for bit. So a
    prompt is always cut at the same places, if its chunks are wide, and what was generated is
    forwarded in passes of the width, unless a token has its bits in wide ones, too.

    Args:
        target: the model.
        tokens: what follows the tokens in the cache.
        kv: the cache.
        prompt: positions below this one are the prompt's, but for its last token, from which
            generation starts; None if all are.
    """
    target.renew()
    end = kv.length + len(tokens)
    replayed = None
    prompt = end if prompt is None else prompt
    while kv.length < end:
        start = kv.length
        wide = start < prompt and target.chunked_prompt
        width = PROMPT_CHUNK
        if not wide and callable(target.chunked_text) and end - start > 1:
            target.chunked_text = target.chunked_text(target)
        batch_invariant = not wide and target.chunked_text is True and target.replays
        if target.fixed_rows is not None and not target.runner.takes(kv, 1) and not batch_invariant:
            width = (
                min(PROMPT_CHUNK - start % PROMPT_CHUNK, prompt - start)
                if wide
                else min(PROMPT_CHUNK, target.fixed_rows)
            )
        ids = torch.tensor(tokens[: min(width, end - start)], device=target.device)
        chunk = Nodes(ids, torch.arange(start, start + len(ids), device=target.device), kv)
        tokens = tokens[len(chunk) :]
        if (
            replayed is None
            and start >= prompt
            and end - start > _REPLAYED * width
            and not batch_invariant
        ):
            replayed = _replayed(target, kv)
        if wide:
            forwarded = target.forward_eager(chunk)
        elif batch_invariant:
            forwarded = forward_wide(target, chunk)
        elif replayed is not None and end - start > width and kv.capacity - start >= width:
            forwarded = replayed(chunk)
        else:  # the last pass, too: what it gives must outlive the program
            forwarded = target.forward(chunk)
        kv.commit(range(len(chunk)))
        yield forwarded


def with_the_same_bits(target: Target, alike: int, prompts: tuple[int, int]) -> int:
    """How many of the first ``alike`` tokens, which two texts have in common, :func:`chunks` gives
    the same keys and values in both.

    Args:
        target: the model.
        alike: how many.
        prompts: of each text the ``prompt`` of :func:`chunks`.
    """
    if target.fixed_rows is None:
        return 0
    first = min(prompts)
    if not target.chunked_prompt or (first == max(prompts) and alike >= first):
        return alike
    return min(alike, first) // PROMPT_CHUNK * PROMPT_CHUNK


def _replayed(target: Target, kv: FullKV) -> StaticPass | None:
    """A pass of the fixed width that is launched as one program, for a long text;
    None where there is none.
    """
    if (
        target.fixed_rows is None
        or kv in target.runner.passes
        or not (target.replays and target.serves(kv))
    ):
        return None
    return StaticPass(target.compute_static, target.capture, kv, target.fixed_rows)


def prefill(
    target: Target, tokens: Sequence[int], kv: FullKV, prompt: int | None = None
) -> Forwarded | None:
    """Forward a text and commit it to a cache; returns the last chunk's pass,
    None for an empty text.

    ``prompt`` is as for :func:`chunks`.
    """
    last: Forwarded | None = None
    for forwarded in chunks(target, tokens, kv, prompt):
        last = forwarded
    return last
