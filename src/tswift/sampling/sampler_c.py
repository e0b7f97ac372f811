"""The sampling rule on the CPU as one C function, which draws what the rule by PyTorch draws.

Why it does: up to the noise, all that decides is exact in both, in float64: sums, products,
quotients and comparisons of the same numbers in the same order. Only logarithms and exponentials
differ, by a few units in the last place (ulp).

- Noise ``-log(-log(u))``: with logarithms right to 4 ulp, ``-log(u)`` is right to a factor of 1 +-
  5e-16, which moves its logarithm by 5e-16; that one is at most 37 and off by another 1.7e-14. So
  both are within 2e-14 of the truth, and the scores of a token differ by at most 4e-14 and a
  rounding, 1.2e-16 of the score. If the best score leads the next by more than 1e-12 + 1e-15 of it,
  both take the same token; a tie at temperature 0 is exact, and goes to the first.
- A token whose noise is not computed could not be among the best two: the noise is at most ``-log(1
  - u)``, and rounding is monotonic.
- Chances, for eta and top-p: sums of up to 10^6 terms are right to 1e-10. What is nearer to an edge
  than 1e-8 could fall on its other side.

Where one of these bounds is not met, the row is unsure, and PyTorch draws it. Logits in float64 are
not served.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tswift.native_build import Unbuilt, build, parallel_region, structures, widest_vectors
from tswift.sampling.parameters import SamplingParams, constants

_SOURCE = Path(__file__).with_name("sampler.c")
_C = structures(_SOURCE)
Verification = _C.Verification
MOST = 16  # candidates of a row
_FILTERS = ("min_p", "eta", "top_k", "top_p")  # that it knows, in its order

# tokens; of each the runner-up and the lead over it
Drawn = tuple[list[int], list[tuple[int, float]]]


class _Rows:
    """A call that is made again and again, with room for what it finds in so many rows."""

    def __init__(self, rows: int, count: int, fixed: dict[str, float]) -> None:
        self.rows = rows
        self.count = count
        self.best, self.positions, self.parents = (
            (ctypes.c_int64 * (rows * each))() for each in (count, 1, 1)
        )
        self.scores = (ctypes.c_double * (rows * count))()
        self.unsure = (ctypes.c_uint8 * rows)()
        self.call = _C.Call(
            best=ctypes.addressof(self.best),
            scores=ctypes.addressof(self.scores),
            unsure=ctypes.addressof(self.unsure),
            count=count,
            **fixed,
        )
        self.address = ctypes.addressof(self.call)
        self.parents_address = ctypes.addressof(self.parents)


def library() -> ctypes.CDLL:
    """The compiled rule; raises :class:`Unbuilt` where there is none."""
    parallel_region()
    return build(_SOURCE, options=widest_vectors())


class CSampler:
    """The sampling rule for parameters and a seed; logits are float32 or bfloat16, on the CPU.

    ``stream`` is of the seed, as :func:`~tswift.sampling.rule.seed_stream` gives it; ``vocab_size``
    is ``V``, ``prompt`` how many tokens of the text were not generated. Raises :class:`Unbuilt`
    where there is no program.
    """

    DTYPES: ClassVar = (torch.float32, torch.bfloat16)

    def __init__(
        self, params: SamplingParams, stream: int, vocab_size: int, prompt: int = 0
    ) -> None:
        program = library()
        self._run = program.tswift_rank
        self._follow = program.tswift_follow
        self._verify = program.tswift_verify
        for function, given in ((self._follow, 2), (self._verify, 3)):
            function.argtypes = (ctypes.c_void_p,) * given
            function.restype = ctypes.c_int64
        threads = torch.get_num_threads()
        biased, bias, ids = constants(params, "cpu")
        banned = torch.zeros(vocab_size, dtype=torch.uint8).index_fill_(0, ids, 1)
        self._held = {  # the memory that calls point to
            **({"banned": banned} if params.banned else {}),
            "biased": biased,
            "bias": bias,
            "late": torch.tensor(params.late, dtype=torch.int64),
            "space": torch.empty(threads * 2 * vocab_size, dtype=torch.float64),
            "kept": torch.empty(threads * vocab_size, dtype=torch.int32),
            "mask": torch.empty(threads * vocab_size, dtype=torch.uint8),
        }
        kept = params.unfiltered() if params.greedy else params
        self._fixed: dict[str, float] = {
            name: held.data_ptr() for name, held in self._held.items()
        } | {
            "biases": len(bias),
            "lates": len(params.late),
            "first": prompt + params.min_tokens,
            "parallel": parallel_region(),
            "threads": threads,
            "vocabulary": vocab_size,
            "window": params.window,
            "top_k": kept.top_k,
            "seed": stream,
            "temperature": params.temperature,
            "penalty": params.penalty,
            "repetition": params.repetition_penalty,
            "log_min_p": math.log(kept.min_p) if kept.min_p > 0 else -math.inf,
            "eta": kept.eta,
            "top_p": kept.top_p,
            "presence": params.presence_penalty,
            "frequency": params.frequency_penalty,
        }
        # rows that are ranked have been lowered by repetition, and biases come before that
        self._of_lowered = {**self._fixed, **({"biases": 0} if params.repeats else {})}
        # made once: what is new is far from the processor after every pass
        self._rows = _Rows(0, 2, self._fixed)
        self._levels = _Rows(0, 1, self._fixed)

    def rank(
        self,
        logits: Tensor,
        count: int,
        positions: Sequence[int] | None,
        seen: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, list[int]]:
        """The best ``count`` tokens of every row, up to :data:`MOST`; arguments as for
        :meth:`Sampler.candidates`.

        Returns:
            ``[n, count]`` tokens, best first, and their scores (float64), ``-inf`` where there is
            none and in rows with NaN or infinity; and the rows for which PyTorch might have another
            best token.
        """
        rows, vocab_size = logits.shape
        if logits.stride(1) != 1:
            logits = logits.contiguous()
        best = torch.empty(rows, count, dtype=torch.int64)
        scores = torch.empty(rows, count, dtype=torch.float64)
        unsure = bytearray(rows)
        places = None if positions is None else (ctypes.c_int64 * rows)(*positions)
        call = _C.Call(
            logits=logits.data_ptr(),
            positions=ctypes.cast(places, ctypes.c_void_p) if places else None,
            best=best.data_ptr(),
            scores=scores.data_ptr(),
            unsure=ctypes.addressof(ctypes.c_char.from_buffer(unsure)),
            by_row=logits.stride(0),
            rows=rows,
            half=int(logits.dtype == torch.bfloat16),
            count=count,
            **self._of_lowered,
        )
        if seen is not None:
            seen = seen.contiguous()
            call.seen = seen.data_ptr()
            call.by_seen = vocab_size if len(seen) > 1 else 0
        self._run(ctypes.byref(call))
        return best, scores, [row for row in range(rows) if unsure[row]]

    def follow(
        self,
        logits: Tensor,
        nodes: tuple[Tensor, Tensor, Tensor],
        parents: list[int],
        newest: Tensor | None,
        counts: Tensor | None,
        verification: int | None = None,
        with_runner_up: bool = False,
    ) -> Drawn | None:
        """The tokens drawn along the path that they take through a tree; -1 elsewhere,
        and where there is none.

        Args:
            logits: ``[n, V]``.
            nodes: tokens, positions and ancestors, as for
                :meth:`~tswift.sampling.rule.Sampler.seen`; what is drawn comes after them.
            parents: of the nodes.
            newest: the sampler's, if it matters where tokens are in the text.
            counts: the sampler's, if it matters how often tokens were generated.
            verification: address of what the pass and the logits are computed from first; None if
                they are there.
            with_runner_up: whether to give each token's runner-up on the path, and the lead over it
                in score.

        Returns:
            None if PyTorch might draw otherwise.
        """
        count = len(parents)
        if count > self._rows.rows:
            self._rows = _Rows(count, 2, {**self._fixed, "ahead": 1})
        rows = self._rows
        (tokens, positions, ancestors) = [each.contiguous() for each in nodes]
        if logits.stride(1) != 1:
            logits = logits.contiguous()
        call = rows.call
        call.logits = logits.data_ptr()
        call.by_row = logits.stride(0)
        call.half = logits.dtype == torch.bfloat16
        call.positions = call.places = positions.data_ptr()
        call.tokens = tokens.data_ptr()
        call.ancestors = ancestors.data_ptr()
        call.rows = count
        call.newest = None if newest is None else newest.data_ptr()
        call.counts = None if counts is None else counts.data_ptr()
        rows.parents[:count] = [*parents]
        given = rows.address, rows.parents_address
        unsure = (
            self._follow(*given) if verification is None else self._verify(verification, *given)
        )
        if unsure:
            return None
        best = rows.best[: 2 * count]
        scores = rows.scores[: 2 * count] if with_runner_up else []
        others = zip(best[1::2], scores[::2], scores[1::2], strict=True) if with_runner_up else ()
        return best[::2], [(token, first - second) for token, first, second in others]

    def row_ranker(
        self,
        ids: NDArray[np.int32],
        logits: NDArray[np.float32],
        seen: NDArray[np.uint8] | None,
        positions: NDArray[np.int64] | None,
        counts: NDArray[np.float64] | None,
        newest: NDArray[np.int64] | None,
    ) -> Callable[[int, int], tuple[list[list[int]], list[list[float]]]]:
        """A function that ranks tokens of which each row names its own,
        as they are in these arrays when it is called.

        It is asked for the first rows, so many, and for how many tokens of each, and gives lists of
        tokens and scores. ``ids`` are ``[n, m]``, of the size in place of the vocabulary's;
        ``logits`` are minus infinity where there is no token; ``seen`` is nonzero for what is
        penalised; without ``positions`` ``[n]`` there is no noise; ``counts`` and ``newest`` are
        the sampler's, if they matter.
        """
        rows, width = ids.shape
        best = np.empty(rows * MOST, np.int64)
        scores = np.empty(rows * MOST)
        given: dict[str, NDArray[np.generic] | None] = {
            "ids": ids,
            "logits": logits,
            "seen": seen,
            "positions": positions,
            "counts": counts,
            "newest": newest,
            "best": best,
            "scores": scores,
            "unsure": np.empty(rows, np.uint8),
        }
        pointers = {
            name: None if each is None else each.ctypes.data for name, each in given.items()
        }
        call = _C.Call(by_row=width, by_seen=width, by_ids=width, **pointers, **self._fixed)
        self._given = given  # what the call points to

        def rank(count: int, most: int) -> tuple[list[list[int]], list[list[float]]]:
            call.rows = count
            call.count = min(most, MOST)
            self._run(ctypes.byref(call))
            shape = (count, call.count)
            size = count * call.count
            return best[:size].reshape(shape).tolist(), scores[:size].reshape(shape).tolist()

        return rank

    def rank_levels(
        self,
        run: Callable[[ctypes.Structure, int], None],
        positions: Sequence[int] | None,
        levels: int,
        count: int,
        root: tuple[int, int],
        newest: Tensor | None,
        counts: Tensor | None,
        ids: Tensor | None = None,
    ) -> tuple[list[int], list[float]]:
        """Candidates of levels whose logits come one after the other,
        from a C function that ranks each when it has it.

        ``run`` is given what to call for the first level, and the address of the function to call.
        ``root`` is the text's last token and its position; ``ids`` (int32, ascending) are the
        tokens that there are logits of, None for all. All else is as for :meth:`rank` and
        :meth:`follow`.

        Returns:
            ``levels * count`` tokens and their scores, level after level.
        """
        if (levels, count) != (self._levels.rows, self._levels.count):
            self._levels = _Rows(levels, count, self._fixed)
            # the root is its own ancestor
            self._node = (ctypes.c_int64 * 2)()
            self._itself = ctypes.c_uint8(1)
        rows = self._levels
        node = self._node
        call = self._levels.call
        node[0], node[1] = root
        # moved on by the last one
        call.best = ctypes.addressof(rows.best)
        call.scores = ctypes.addressof(rows.scores)
        call.positions = None
        call.rows = 1
        if positions is not None:
            rows.positions[:] = list(positions)
            call.positions = ctypes.addressof(rows.positions)
        if newest is not None:
            call.newest = newest.data_ptr()
            call.tokens = ctypes.addressof(node)
            call.places = ctypes.addressof(node) + 8
            call.ancestors = ctypes.addressof(self._itself)
        call.counts = None if counts is None else counts.data_ptr()
        call.ids = None if ids is None else ids.data_ptr()
        call.vocabulary = self._fixed["vocabulary"] if ids is None else len(ids)
        run(call, ctypes.cast(self._run, ctypes.c_void_p).value or 0)
        return rows.best[:], rows.scores[:]


def c_sampler(
    params: SamplingParams, stream: int, vocab_size: int, prompt: int = 0
) -> CSampler | None:
    """The program; None where there is no C compiler, or for a filter that it does not know."""
    if params.filters != tuple(name for name in _FILTERS if name in params.filters):
        return None
    try:
        return CSampler(params, stream, vocab_size, prompt)
    except Unbuilt:
        return None
