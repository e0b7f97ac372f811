"""What a frozen model says of rows of text, for heads to learn from.

Each row passes the model once. What heads read of the pass, and the likeliest tokens that follow,
are kept in a file that is mapped into memory, so later epochs cost no pass.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tswift.caches import FullKV
from tswift.errors import DecodeError
from tswift.files import open_own
from tswift.forward.hf import output_of
from tswift.forward.passes import Nodes
from tswift.forward.target import Target
from tswift.speculators.heads import lm_head_rows

LIKELIEST = 64  # tokens whose probabilities are learnt; on SmolLM2's own text they have 97% of all
_FORWARDED_TOGETHER = 512  # tokens of a row in one pass of the model


class Taught(NamedTuple):
    """Rows of text, and what a model says of them."""

    ids: Tensor  # [B, T] int64 tokens
    hidden: Tensor  # [B, T, H] last hidden states
    # [B, T, K] int64: places in the draft vocabulary of the likeliest tokens that follow
    likeliest: Tensor
    # [B, T, K] float32 probabilities of these; what is missing to 1 is that of all other tokens
    shares: Tensor


def read_states(target: Target, ids: Tensor, positions: Tensor | None = None) -> Tensor:
    """Last hidden states ``[B, T, H]`` of the model.

    They come from the passes that decode: heads see the same when they draft.
    """
    rows, length = ids.shape
    hidden = torch.empty(rows, length, target.hidden_size, dtype=target.dtype, device=target.device)
    kv = FullKV(target.kv_shape, length)
    empty = kv.mark()
    if positions is None:
        positions = torch.arange(length, device=target.device).expand(rows, -1)
    for row in range(rows):
        kv.rewind(empty)
        for start in range(0, length, _FORWARDED_TOGETHER):
            part = slice(start, start + _FORWARDED_TOGETHER)
            with torch.autocast(target.device.type, enabled=False):
                forwarded = target.forward(Nodes(ids[row, part], positions[row, part], kv))
            hidden[row, part] = forwarded.hidden
            kv.commit(range(len(ids[row, part])))
    return hidden


@torch.no_grad()
def teach(
    target: Target,
    ids: Tensor,
    draft_ids: Tensor | None = None,
    positions: Tensor | None = None,
    count: int = LIKELIEST,
) -> Taught:
    """Have a model read rows of text.

    Args:
        target: the model.
        ids: ``[B, T]`` tokens.
        draft_ids: the draft vocabulary, as heads have it.
        positions: ``[B, T]``; None for the first ones.
        count: of the likeliest tokens; with 0 no logits are computed.
    """
    hidden = read_states(target, ids, positions)
    if not count:
        return Taught(ids, hidden, ids[..., None][..., :0], hidden[..., :0].float())
    likeliest = []
    shares = []
    for states in hidden.flatten(0, 1).split(_FORWARDED_TOGETHER):
        logits = target.open_logits(states).to(torch.promote_types(target.dtype, torch.float32))
        whole = logits.logsumexp(-1, keepdim=True)
        drafted = logits if draft_ids is None else logits[:, draft_ids]
        best = drafted.topk(min(count, drafted.shape[1]))
        likeliest.append(best.indices)
        shares.append((best.values - whole).exp())
    shape = (*ids.shape, -1)
    return Taught(ids, hidden, torch.cat(likeliest).view(shape), torch.cat(shares).view(shape))


def draft_logits(target: Target, draft_ids: Tensor | None) -> Callable[[Tensor], Tensor]:
    """A function from states ``[..., H]`` to logits of the draft vocabulary,
    through which gradients flow back.
    """
    if draft_ids is None:
        return target.open_logits
    places = draft_ids.long()
    rows = lm_head_rows(target.model.get_output_embeddings(), places, target.dtype)
    if rows is None:
        return lambda states: target.open_logits(states)[..., places]
    return output_of(target.model, rows)


class Lessons:
    """Rows of a training, with what the model says of them:
    forwarded when they are first asked for, and kept.

    Rows are numbered through all epochs. The first epoch makes the file longer, until it is told to
    end or the file is full. Each later one has the same rows in an order of its own. What is in the
    file when a training goes on is not forwarded again.

    Args:
        path: the file.
        read: makes the row of a number.
        room: most rows that are kept; 0 if each is used once.
        shape: tokens of a row, hidden size, and likeliest tokens.
        seed: of the orders.
    """

    def __init__(
        self,
        path: Path,
        read: Callable[[int], Taught],
        room: int,
        shape: tuple[int, int, int],
        seed: int,
    ) -> None:
        self._path = path
        self._read = read
        self._room = room
        self._seed = seed
        length, hidden, count = shape
        self._record = np.dtype(
            [
                ("ids", "<i4", length),
                ("hidden", "<i2", (length, hidden)),
                ("likeliest", "<i4", (length, count)),
                ("shares", "<f2", (length, count)),
                ("whole", "?"),
            ]
        )
        if room:
            with open(open_own(path, os.O_RDWR | os.O_CREAT), "r+b") as file:
                file.truncate(self.bytes)
                self._rows: np.memmap = np.memmap(file, self._record, "r+")
            whole = self._rows["whole"]
            self.kept = room if whole.all() else int(whole.argmin())

    @property
    def bytes(self) -> int:
        """Size of the file when it is full."""
        return self._room * self._record.itemsize

    def take(self, first: int, count: int, grow: bool) -> Taught:
        """Rows from a number on; ``grow`` allows them to be new ones."""
        rows = [self._row(number, grow) for number in range(first, first + count)]
        return Taught(*map(torch.cat, zip(*rows, strict=True)))

    def _row(self, number: int, grow: bool) -> Taught:
        if not self._room:
            return self._read(number)
        if number == self.kept < self._room and (grow or not number):
            self._keep(self._read(number))
        epoch, place = divmod(number, self.kept)
        if epoch:
            place = int(np.random.default_rng([self._seed, epoch]).permutation(self.kept)[place])
        row = self._rows[place]
        ids, likeliest = (
            torch.from_numpy(row[name].astype(np.int64))[None] for name in ("ids", "likeliest")
        )
        hidden = torch.from_numpy(row["hidden"].copy()).view(torch.bfloat16)[None]
        return Taught(
            ids, hidden, likeliest, torch.from_numpy(row["shares"].astype(np.float32))[None]
        )

    def _keep(self, taught: Taught) -> None:
        row = self._rows[self.kept]
        offset = self.kept * self._record.itemsize
        try:
            with open(open_own(self._path, os.O_RDWR), "r+b") as file:
                # a full disk shows here, and not when memory is written
                os.posix_fallocate(file.fileno(), offset, self._record.itemsize)
        except OSError as error:
            raise DecodeError(f"{self._path} cannot be written ({error.strerror})") from None
        for name, value in zip(taught._fields, taught, strict=True):
            value = value[0].cpu()
            row[name] = (value.bfloat16().view(torch.int16) if name == "hidden" else value).numpy()
        self._rows.flush()  # a row that is not whole is made again
        row["whole"] = True
        self.kept += 1
