"""A conversation: each answer is a decode of all that was said, and what the cache of the one
before holds of that is not forwarded again.
"""

from __future__ import annotations

from collections.abc import Iterator

from tswift.decoding.kept import KeptCaches
from tswift.decoding.stats import DecodeStats
from tswift.jobs.config import RunConfig, Text, render_chat
from tswift.jobs.job import begin_run, with_sampling
from tswift.loading.model import LoadedModel
from tswift.memory import fit_length
from tswift.options import changed


class Chat:
    """What was said, and the model that answers.

    InputError if it has no chat template, or one that does not take ``system``.

    Attributes:
        config: how it answers; its length is the most tokens of an answer.
        params: how tokens are drawn.
        stats: figures of the last answer.
        kept: tokens of the conversation that were in the cache when the last answer was begun.
    """

    def __init__(self, model: LoadedModel, config: RunConfig, system: str | None = None) -> None:
        self.config, self.params = with_sampling(config, model)
        self._model = model
        self._said: list[dict[str, str]] = []
        if system is not None:
            self._said.append({"role": "system", "content": system})
        # a template that there is not, or that takes no system prompt, is told of before a turn
        render_chat(model.tokenizer, model.name, (*self._said, {"role": "user", "content": "."}))
        self._caches = KeptCaches(inexact=True)
        self.stats = DecodeStats(0)
        self.kept = 0

    def answer(self, said: str) -> Iterator[str]:
        """The answer to what the user says, piece by piece; it can be left at any time, and what
        was given of it was said.

        InputError if the model does not take it, or has no positions left: then nothing was said.
        """
        messages = [*self._said, {"role": "user", "content": said}]
        model = self._model
        prompt = Text("chat", said, messages=tuple(messages)).encode(model, chat=True)
        length = fit_length(self.config.text.length, len(prompt), model.target.max_positions)
        config = changed(self.config, {"length": length})
        run = begin_run(model, prompt, config, self.params, kept=self._caches)
        run.decoding.prefill()
        self.kept = run.decoding.copied
        self.stats = DecodeStats(run.depth)
        given: list[str] = []
        try:
            for step in run.steps():
                given.append(step.text)
                self.stats.add(step)
                yield step.text
        finally:
            self._caches = KeptCaches(inexact=True)  # of the last turn alone
            self._caches.keep(run.decoding)
            self._said = [*messages, {"role": "assistant", "content": "".join(given)}]
