"""What a benchmark runs: options checked once, the grid, its prompts, and the loaded model with its contenders."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from tswift.benchmarking.options import BenchOptions
from tswift.decoding.audit import Audit, audit
from tswift.decoding.params import SamplingParams
from tswift.drafting.methods import cut_note, resolve
from tswift.drafting.options import DraftOptions, find_method
from tswift.engine import ending, preflight
from tswift.errors import InputError, renamed
from tswift.jobs.config import loading
from tswift.jobs.prompt import read_prompt
from tswift.jobs.start import used_options
from tswift.models.checkpoint import hub
from tswift.models.load import LoadedModel, load

PG19 = "emozilla/pg19"  # on the hub, as parquet; the test split holds 100 books


@dataclass(frozen=True)
class Contender:
    """A method with resolved draft options, under a label of its own."""

    label: str
    method: str
    options: DraftOptions


@dataclass(frozen=True)
class BenchConfig:
    """A loaded model and the contenders that run on it; all write the same text.

    Attributes:
        params: sampling parameters; end-of-text tokens are banned, so lengths are exact.
        contenders: labels are unique; ``ar`` is among them.
        simulate_alpha: as in :class:`BenchOptions`.
        note: what of the options had to be changed; None for nothing.
    """

    model: LoadedModel
    params: SamplingParams
    contenders: Sequence[Contender]
    simulate_alpha: float | None = None
    note: str | None = None

    @property
    def simulated(self) -> dict[str, Any] | None:
        """For records: whether weights are random, and the acceptance that is set; None if neither."""
        if self.simulate_alpha is None and not self.model.simulated:
            return None
        return {"weights": self.model.simulated, "alpha": self.simulate_alpha}

    @property
    def labels(self) -> list[str]:
        """Labels of all contenders."""
        return [contender.label for contender in self.contenders]

    def drafting(self) -> dict[str, dict[str, Any]]:
        """For records: by label, the options that its method uses."""
        return {each.label: used_options(each.method, each.options) for each in self.contenders}

    def audit(
        self,
        prompt: Sequence[int],
        tokens: Sequence[int],
        seed: int,
        method: str,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> Audit:
        """Whether a text by a method is what the sampling rule draws; see :func:`tswift.decoding.audit.audit`."""
        target = self.model.target
        if find_method(method).reference:  # whose passes are not exact
            target = target.reference()
        return audit(target, prompt, tokens, self.params, seed, on_progress)


@dataclass(frozen=True)
class Prompt:
    """A prompt by name: a file's, ``pg19:0`` and so on, or ``bundled``."""

    name: str
    tokens: list[int]


def configure(options: BenchOptions, prompt: int = 1, length: int = 1, option: str = "model") -> BenchConfig:
    """Check the options, and load the model.

    Args:
        prompt: least prompt tokens: what does not fit is refused before anything is loaded.
        length: least generated tokens.
        option: what the user gave that length with, for the error.

    Raises:
        InputError: something asked cannot be done.
    """
    params, drafting, how = SamplingParams(**options.sampling), options.check(), loading(options, options.methods)
    try:
        # how much memory a model takes that is quantised while it is loaded is seen then
        for method, asked in drafting.items() if options.quantize is None else ():
            preflight(options.model, prompt, length, method, asked, **how, option=option)
        model = load(options.model, exact=options.exact, quantize=options.quantize, **how)
        contenders = [
            Contender(method, method, resolve(method, model.target, model.heads, asked))
            for method, asked in drafting.items()
        ]
    except InputError as error:
        raise renamed(error, {"method": "methods"}) from None
    params, _ = ending(params, model.eos_ids, stop_at_eos=False)
    cuts = [note for asked in drafting.values() if (note := cut_note(asked, model.target.width)) is not None]
    return BenchConfig(model, params, contenders, options.simulate_alpha, next(iter(cuts), None))


def read_texts(words: Sequence[str]) -> dict[str, str]:
    """Texts that ``--prompts`` names, by name; the bundled novel if nothing is named.

    Args:
        words: files, folders (their ``*.txt``), or ``pg19:N`` for the first N books of PG-19's test split.

    Raises:
        InputError: nothing is there, or no text.
    """
    if not words:
        return {"bundled": read_prompt(None)}
    texts: dict[str, str] = {}
    for word in words:
        if word.startswith("pg19:"):
            texts |= _books(word)
            continue
        path = Path(word).expanduser()
        files = sorted(path.glob("*.txt")) if path.is_dir() else [path]
        if not files:
            raise InputError(f"there is no .txt file in {word}", "prompts")
        for file in files:
            if file.name in texts:
                raise InputError(f"two prompts are called {file.name}", "prompts")
            try:
                texts[file.name] = read_prompt(str(file))
            except InputError as error:
                raise renamed(error, {"prompt": "prompts"}) from None
    return texts


def encode(texts: Mapping[str, str], model: LoadedModel, longest: int) -> list[Prompt]:
    """Token ids of the texts.

    Raises:
        InputError: one has fewer than ``longest`` tokens.
    """
    prompts = [Prompt(name, model.encode(text)) for name, text in texts.items()]
    for prompt in prompts:
        if len(prompt.tokens) < longest:
            raise InputError(f"asks for {longest:,} tokens, {prompt.name} has {len(prompt.tokens):,}", "prefill")
    return prompts


def _books(word: str) -> dict[str, str]:
    count = word.removeprefix("pg19:")
    if not count.isdecimal() or int(count) < 1:
        raise InputError(f"wants pg19:N with N books, got {word}", "prompts")
    try:
        import datasets
    except ImportError:
        raise InputError("pg19 needs the package datasets (pip install datasets)", "prompts") from None
    try:
        with hub():
            books = datasets.load_dataset(PG19, split="test", streaming=True)
            texts = [book["text"] for book in islice(books, int(count))]
    except Exception as error:  # no network, no such data set, a broken cache: datasets raises all kinds
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(f"{PG19} cannot be loaded from the hub ({reason[:120]})", "prompts") from None
    if len(texts) < int(count):
        raise InputError(f"asks for {count} books, the test split of {PG19} has {len(texts)}", "prompts")
    return {f"pg19:{index}": text for index, text in enumerate(texts)}
