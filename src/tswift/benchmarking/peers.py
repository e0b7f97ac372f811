"""transformers' own ``generate`` in the same run, interleaved with ours: plain, with prompt lookup,
and assisted.

The network is transformers' own copy, with its own attention; a peer draws with torch's random
numbers, so its sampled text is another than ours. Its first pass, which reads the prompt and draws
a token, counts as prefill.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.generation.streamers import BaseStreamer
from transformers.utils import logging as transformers_logging

from tswift.benchmarking.config import ASSISTED, LOOKUP, BenchOptions, assistant_of
from tswift.benchmarking.record import Options
from tswift.benchmarking.run import Run
from tswift.errors import InputError
from tswift.forward.integers import holds_codes
from tswift.loading import LoadedModel
from tswift.models.checkpoint import as_input_error, find_source, silence
from tswift.sampling.parameters import SamplingParams

_LOOKUP_TOKENS = 10  # prompt_lookup_num_tokens, transformers' example


@dataclass(frozen=True)
class Peers:
    """transformers' networks, loaded once."""

    names: Sequence[str]
    network: PreTrainedModel
    assistant: PreTrainedModel | None
    assistant_name: str | None

    def settings(self, name: str, params: SamplingParams) -> Options:
        """What ``generate`` is given, for records."""
        greedy = params.temperature == 0
        drawn = {
            **{each: getattr(params, each) for each in ("temperature", "top_k", "top_p")},
            "min_p": params.min_p or None,
            "eta_cutoff": params.eta,
        }
        return {
            "do_sample": not greedy,
            "repetition_penalty": params.penalty,
            "suppress_tokens": list(params.banned) or None,
            **({} if greedy else drawn),
            **({"prompt_lookup_num_tokens": _LOOKUP_TOKENS} if name == LOOKUP else {}),
            **({"assistant_model": self.assistant_name} if name == ASSISTED else {}),
        }

    def beside(
        self,
        runs: Sequence[Run],
        prompt: Sequence[int],
        length: int,
        params: SamplingParams,
        seed: int,
    ) -> list[Run]:
        """Runs of ours and then the peers', each in a thread of its own,
        with OpenMP workers and a heap of its own.
        """
        ids = torch.tensor([list(prompt)], device=self.network.device)
        # its penalty is over all of the text, ours over a window
        same = params.temperature == 0 and (
            not params.penalises or len(prompt) + length <= params.window
        )
        same = same and not params.counts
        peers = []
        for name in self.names:
            settings = self.settings(name, params)
            if name == ASSISTED:
                settings["assistant_model"] = self.assistant
            given = {"attention_mask": torch.ones_like(ids), "max_new_tokens": length, **settings}
            peers.append(
                PeerRun(name, same, partial(self.network.generate, ids, **given), seed, ids.device)
            )
        return [*map(_in_own_thread, runs), *peers]


def load_peers(options: BenchOptions, model: LoadedModel) -> Peers:
    """The peers that are asked for, on the model's device and in its dtype."""
    if holds_codes(model.target.model):
        raise InputError(
            f"transformers does not run {model.name} with weights of integers", "peers"
        )
    if model.yarn is not None:
        raise InputError(
            "transformers runs a checkpoint as it was made; --yarn changes it", "peers"
        )

    def loaded(name: str) -> PreTrainedModel:
        with silence(), as_input_error(name):
            network = AutoModelForCausalLM.from_pretrained(
                find_source(name)[0],
                dtype=model.target.dtype,
                attn_implementation="sdpa",
                use_safetensors=True,
            )
        return network.eval().to(model.target.device)

    # it advises against what it does itself when it is assisted
    transformers_logging.set_verbosity_error()
    assistant = assistant_of(options)
    return Peers(
        options.peers, loaded(options.model.model), assistant and loaded(assistant), assistant
    )


class _Closed(Exception):
    """Ends ``generate`` from inside."""


class PeerRun(Run):
    """``generate``, which moves only while the caller waits for it: it is no generator,
    and so is held in a thread.
    """

    def __init__(
        self,
        label: str,
        comparable: bool,
        generate: Callable[..., object],
        seed: int,
        device: torch.device,
    ) -> None:
        super().__init__(label, label, None, comparable=comparable, peer=True)
        self._generate = generate
        self._seed = seed
        self._device = device
        self._go = threading.Semaphore(0)
        self._back = threading.Semaphore(0)
        self._goal, self._started, self._closed = 1, 0.0, False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name=label, daemon=True)
        self._thread.start()

    def prefill(self) -> None:
        """Read the prompt, and draw the first token."""
        self._wait()
        self.prefill_seconds = self.stats.seconds
        self.stats.seconds = 0.0

    def advance(self, goal: int) -> None:
        """Decode at least ``goal`` tokens in all."""
        if self.stats.tokens < goal:
            self._goal = goal
            self._wait()
        self.slices.append((self.stats.tokens, self.stats.seconds))

    def close(self) -> None:
        """End its thread, and with it its cache."""
        self._closed = True
        self._go.release()
        self._thread.join()

    def _wait(self) -> None:
        self._go.release()
        try:
            self._back.acquire()
        except KeyboardInterrupt:  # nothing may move while the samples are taken
            self._back.acquire()
            raise
        if self._error:
            raise self._error

    def _work(self) -> None:
        self._go.acquire()
        try:
            torch.manual_seed(self._seed % (1 << 63))  # ours may be any integer
            self._started = time.perf_counter()
            self._generate(streamer=_Watch(self._step))
            raise RuntimeError(f"{self.label} ended after {self.stats.tokens:,} tokens")
        except _Closed:
            pass
        except BaseException as error:  # raised again in the thread that waits
            self._error = error
            self._back.release()

    def _step(self, tokens: list[int]) -> None:
        self.stats.seconds += time.perf_counter() - self._started
        self.tokens += tokens
        self.stats.passes += 1
        self.stats.tokens += len(tokens)
        self.stats.nodes += 1
        self.stats.accepted[len(tokens) - 1] += 1
        if self.stats.tokens >= self._goal:
            # the generators are the process's: without this, the other peers' draws would change
            # this one's text
            state = torch.get_rng_state()
            cuda = self._device.type == "cuda"
            on_device = torch.cuda.get_rng_state(self._device) if cuda else None
            self._back.release()
            self._go.acquire()
            if self._closed:
                raise _Closed
            torch.set_rng_state(state)
            if on_device is not None:
                torch.cuda.set_rng_state(on_device, self._device)
        self._started = time.perf_counter()


class _Watch(BaseStreamer):  # type: ignore[misc]
    """Told by ``generate`` of the prompt, and then of the new tokens of every pass.

    A stopping criterion would not do: transformers 5.17 also calls those on the assistant's
        candidates.
    """

    def __init__(self, step: Callable[[list[int]], None]) -> None:
        self._step, self._prompt = step, True

    def put(self, value: torch.Tensor) -> None:
        if not self._prompt:
            self._step(value.flatten().tolist())
        self._prompt = False

    def end(self) -> None:
        pass


def _in_own_thread(run: Run) -> Run:
    worker = ThreadPoolExecutor(1)

    def done(what: Callable[..., None], *arguments: object) -> None:
        future: Future[None] = worker.submit(what, *arguments)
        try:
            future.result()
        except KeyboardInterrupt:  # nothing may move while the samples are taken
            future.result()
            raise

    for name in ("prefill", "advance", "probe"):
        setattr(run, name, partial(done, getattr(run, name)))
    return run
