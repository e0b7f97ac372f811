"""What a benchmark writes down: ``bench.json`` and ``suite.json`` as dataclasses,
read and written here alone.

A file is checked when it is read, field by field. A field that has a default is absent where there
is nothing to say, as in files of versions before it. Times are in seconds, prefill apart unless
named so.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import (
    Annotated,
    Any,
    Literal,
)

from tswift.errors import MAX_RECORD, InputError, Object, parse_json, read_file
from tswift.options import Option, Values, checked

SCHEMA: Literal[1] = 1
_LARGEST = 1e300  # of a number in a file; whatever is computed from it is still finite


def _is_setting(value: Any) -> bool:
    """Whether it is a sampling parameter's value: a text, a number, or several numbers."""
    if isinstance(value, dict):
        value = [*value.values()]
    return all(
        isinstance(one, str) or (type(one) in (int, float) and abs(one) < _LARGEST)
        for one in (value if isinstance(value, list) else [value])
    )


def _matching(pattern: str) -> Option:
    return Option("", rule=(f"be of the form {pattern}", partial(re.search, pattern)))


Options = Object  # as typed, or as JSON has them, by name
_float = partial(Option, "", below=_LARGEST)
_int = partial(Option, "", most=_LARGEST)
Number = Annotated[float, _float(above=-_LARGEST)]  # an int stays one
Positive = Annotated[float, _float(above=0)]
Amount = Annotated[float, _float(least=0)]
Share = Annotated[float, Option("", least=0, most=1)]
Integer = Annotated[int, _int(least=-_LARGEST)]
Count = Annotated[int, _int(least=0)]
Size = Annotated[int, _int(least=1)]
Setting = Annotated[object, Option("", rule=("be a text or numbers", _is_setting))]
Hash = Annotated[str, _matching("^[0-9a-f]{64}$")]
Time = Annotated[str, _matching("^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}")]
# running: to come, or it was killed
State = Annotated[str, Option("", choices=("running", "finished", "interrupted"))]
_SOME = Option("", rule=("name something", bool))
Command = Annotated[list[str], _SOME]
Sizes = Annotated[list[Size], _SOME]


@dataclass(frozen=True)
class Machine:
    """Rates of a machine: bytes read from memory, and operations in matrix products, per second."""

    bandwidth: Positive
    flops: Positive
    # how many times the least of its repeats a rate usually took, where that tells of other work
    spread: Positive | None = None


@dataclass(frozen=True, kw_only=True)
class Environment:
    """Versions, platform and processors."""

    python: str
    torch: str
    transformers: str
    tswift: str
    git_commit: str | None
    platform: str
    cpu: str
    threads: Size
    gpu: str | None
    driver: str | None

    @property
    def machine(self) -> str:
        """The GPU, or the CPU and its threads in use."""
        return self.gpu or f"{self.cpu}, {self.threads} thread{'' if self.threads == 1 else 's'}"


@dataclass(order=True, unsafe_hash=True, kw_only=True)
class Cell:
    """A cell of the grid: all methods side by side on one case."""

    repeat: Count
    prompt: str
    prefill: Size
    seed: Integer

    def __str__(self) -> str:
        return f"{self.prompt}, prefill {self.prefill:,}, seed {self.seed}"

    @property
    def cell(self) -> Cell:
        """The cell that a sample is of."""
        return Cell(repeat=self.repeat, prompt=self.prompt, prefill=self.prefill, seed=self.seed)


@dataclass(kw_only=True)
class Point:
    """Figures when a method first reached one of the lengths."""

    len: Size
    tokens: Size  # fewer than ``len`` if the text ended before
    nodes: Count
    depth: Count
    accepted: list[Count]  # steps that accepted 0, 1, ... drafted tokens
    reused: Count
    alpha: Share
    beta: Share
    tokens_per_step: Amount
    passes: Size
    tokens_per_second: Amount
    seconds: Amount
    ar_seconds: Amount | None
    speedup: Amount | None
    # figures by name that not every file has
    others: dict[str, Number | None] = field(default_factory=dict)
    quality: dict[str, Number | None] | None = None  # of the text up to here, in suites

    def figure(self, name: str) -> float | None:
        """A metric's value, by its name in ``METRICS``; None where it has none."""
        return {**vars(self), **self.others, **(self.quality or {})}.get(name)

    @classmethod
    def gather(cls, point: Values) -> Object:
        """A point's values by name, with those that have no field of their own among the
        ``others``.
        """
        own = {each.name for each in fields(cls)} - {"others"}
        others = {name: value for name, value in point.items() if name not in own}
        return {**{name: value for name, value in point.items() if name in own}, "others": others}


@dataclass(kw_only=True)
class Sample(Cell):
    """One run of a method in a cell."""

    method: str  # the contender's label
    estimated: bool  # whether its time, plain decoding's, is integrated from sampled steps
    prefill_seconds: Amount | None  # None where plain decoding was not run but sampled
    same_as_ar: bool | None  # None for plain decoding itself, and where the acceptance is simulated
    # whether the audit finds no violation: of texts that differ from plain decoding's, and of all
    # if it was sampled
    explained: bool | None
    first_difference: Count | None
    compared_tokens: Count  # with plain decoding's: all of them, or those of the probes
    slices: list[tuple[Count, Amount]]  # tokens and seconds so far
    # positions, and steps' seconds
    probes: list[tuple[Count, Annotated[list[Amount], _SOME]]] | None
    points: list[Point]
    simulated: Literal[True] | None = None
    ended: Literal[True] | None = None  # by an end-of-text token


@dataclass(kw_only=True)
class Session:
    """A process that measured cells."""

    host: str
    started: Time
    ended: Time
    command: Command
    environment: Environment
    machine: Machine
    cells: list[Cell]  # those measured to their ends


@dataclass(frozen=True, kw_only=True)
class PromptEntry:
    """A prompt, by its tokens' hash."""

    name: str
    sha256: Hash
    kind: str | None = None  # of a workload's
    tokens: Size | None = None  # used of a workload's, which may have fewer than the prefill


@dataclass(frozen=True)
class DraftModel:
    """The smaller model that drafts."""

    name: str
    weights: Hash


@dataclass(frozen=True)
class Simulation:
    """What is simulated: random weights in a published model's shape,
    the share of drafted tokens accepted.
    """

    weights: bool
    alpha: Annotated[float, Option("", above=0, most=1)] | None


@dataclass(kw_only=True)
class Workload:
    """What is measured; measurements of one workload can be compared.

    Its hash is of all the rest.
    """

    hash: Hash
    model: str
    weights: Hash  # over a sample of the weights
    dtype: str
    attention: str
    heads: str | None
    heads_weights: Hash | None
    sampling: dict[str, Setting]
    drafting: dict[str, Options]  # by label
    prompts: Annotated[list[PromptEntry], _SOME]
    prefills: Sizes
    lens: Sizes
    seeds: Annotated[list[Integer], _SOME]
    methods: Annotated[list[str], _SOME]  # contenders' labels
    ar: Annotated[str, Option("", choices=("full", "sampled"))]
    draft_model: DraftModel | None = None
    draft_weights: str | None = None  # of drafting passes, until 0.1
    kv_dtype: str | None = None  # where it is not the model's
    exact: Size | None = None  # rows of every pass
    variants: dict[str, str] | None = None  # methods of contenders with labels of their own
    peers: dict[str, Options] | None = None  # transformers' generate beside ours, until 0.1
    simulated: Simulation | None = None
    stop_at_eos: Literal[True] | None = None  # texts end by themselves

    def grid(self, repeats: int) -> list[Cell]:
        """The cells of its grid, in the order in which they are measured."""
        axes = range(repeats), self.prompts, self.prefills, self.seeds
        return [
            Cell(repeat=repeat, prompt=prompt.name, prefill=prefill, seed=seed)
            for repeat, prompt, prefill, seed in product(*axes)
        ]

    def differing(self, other: Workload) -> list[str]:
        """What of two workloads differs, by name."""
        ours = to_json(self)
        theirs = to_json(other)
        names = [name for name in sorted({*ours, *theirs}) if ours.get(name) != theirs.get(name)]
        return [name for name in names if name != "hash"] or names


@dataclass(kw_only=True)
class Measurement:
    """A grid of runs: ``bench.json``, or a group of ``suite.json``."""

    schema: Literal[1] = SCHEMA
    kind: Literal["bench"] = "bench"
    simulated: bool  # times mean something, texts do not
    state: State
    started: Time
    ended: Time
    command: Command
    environment: Environment
    machine: Machine | None = None
    layers: str | None = None  # how they ran: fused, one C program, or eager and why
    workload: Workload
    sessions: list[Session] = field(default_factory=list)
    samples: list[Sample]
    options: Options | None = None  # those that were given, which a resumed benchmark keeps

    def __post_init__(self) -> None:
        if self.simulated != (self.workload.simulated is not None):
            raise ValueError("simulated, and its workload says otherwise")

    @property
    def parts(self) -> dict[str, Measurement]:
        """By label, the measurements of a record: itself."""
        return {"": self}

    @property
    def environments(self) -> list[Environment]:
        """Of all processes that measured."""
        return [session.environment for session in self.sessions] or [self.environment]

    @property
    def methods(self) -> list[str]:
        """Labels of all that was measured, in the workload's order."""
        measured = (sample.method for sample in self.samples)
        return list(dict.fromkeys([*self.workload.methods, *measured]))

    @property
    def done(self) -> set[Cell]:
        """The cells that were measured to their ends, in whichever session."""
        return {cell for session in self.sessions for cell in session.cells}


@dataclass
class Group:
    """What of a suite runs side by side: one setting, with its own plain decode."""

    label: str
    measurement: Measurement


@dataclass
class LeftOut:
    """A method that cannot run on the model."""

    label: str
    why: str


@dataclass(kw_only=True)
class SuiteText:
    """A text that a suite shows, token by token."""

    label: str
    prompt: str
    prefill: Size
    seed: Integer
    tokens: list[Count]
    pieces: list[str]  # the text that each token completes

    @property
    def cell(self) -> Cell:
        """The cell that it is of."""
        return Cell(repeat=0, prompt=self.prompt, prefill=self.prefill, seed=self.seed)


@dataclass(kw_only=True)
class SuiteRecord:
    """``suite.json``; its rows and the published ones follow from it, and are not read."""

    schema: Literal[1] = SCHEMA
    kind: Literal["suite"] = "suite"
    suite: str
    title: str
    state: State
    started: Time
    ended: Time
    command: Command
    missing: list[LeftOut]
    groups: Annotated[list[Group], _SOME]
    texts: list[SuiteText]
    options: Options | None = None

    @property
    def parts(self) -> dict[str, Measurement]:
        """By label, its measurements."""
        return {group.label: group.measurement for group in self.groups}

    @classmethod
    def gather(cls, content: Values) -> Object:
        """The fields; a file's rows follow from them."""
        return {each.name: content[each.name] for each in fields(cls) if each.name in content}


Record = Measurement | SuiteRecord
_KINDS: dict[str, type[Measurement | SuiteRecord]] = {"bench": Measurement, "suite": SuiteRecord}


def to_json(value: object) -> Any:
    """A record, or a part of one, as JSON has it."""
    if is_dataclass(value):
        content = {each.name: to_json(getattr(value, each.name)) for each in fields(value)}
        for each in fields(value):
            optional = each.default is not MISSING or each.default_factory is not MISSING
            if optional and content[each.name] in (None, []):
                del content[each.name]
        return content | content.pop("others", {})
    if isinstance(value, Mapping):
        return {str(name): to_json(one) for name, one in value.items()}
    return [to_json(one) for one in value] if isinstance(value, (list, tuple)) else value


def encode(content: Values, indent: str = "") -> str:
    """Indented JSON with one list item per line, so that a diff is short."""
    inner = f"{indent}  "
    lines = []
    for name, value in content.items():
        text = json.dumps(value)
        if isinstance(value, dict) and value:
            text = encode(value, inner)
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            items = [
                encode(item, inner) if name == "groups" else json.dumps(item) for item in value
            ]
            text = "[\n" + ",\n".join(f"{inner}  {item}" for item in items) + f"\n{inner}]"
        lines.append(f"{inner}{json.dumps(str(name))}: {text}")
    return "{\n" + ",\n".join(lines) + f"\n{indent}}}" + "\n" * (not indent)


def workload_hash(workload: Values) -> str:
    """SHA-256, in hex, of a workload as canonical JSON, its own ``hash`` left out."""
    content = {name: value for name, value in workload.items() if name != "hash"}
    return hashlib.sha256(
        json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
    ).hexdigest()


def read(path: Path, option: str, *kinds: str) -> Record:
    """The record in a file that ``option`` named, of one of some kinds;
    of either if none is said.
    """
    return parse(
        parse_json(read_file(path, MAX_RECORD, option), path, option), path, option, *kinds
    )


def parse(content: object, path: Path, option: str, *kinds: str) -> Record:
    """A record from what its file holds."""
    known = content if isinstance(content, dict) else {}
    kinds = kinds or tuple(_KINDS)
    kind = known.get("kind")
    if kind not in kinds:
        names = " or ".join(f"{each}.json" for each in kinds)
        raise InputError(f"{path} is not a {names} of tswift bench", option)
    if known.get("schema") != SCHEMA:
        found = f"{known.get('schema')!s:.40}"
        raise InputError(f"{path} has schema version {found}, this tswift reads {SCHEMA}", option)
    try:
        record: Record = checked(_KINDS[kind], content, "$")
    except InputError as error:
        raise InputError(f"{path} is damaged ({str(error)[:300]})", option) from None
    if (record.options or {}).get("shard"):  # it ended before the whole grid was measured
        raise InputError(f"{path} is a shard, as tswift 0.1 measured them", option)
    return record


def load_measurement(path: Path) -> Measurement:
    """Read a complete ``bench.json`` to hold another one against."""
    option = "against"
    measurement = read(path, option, "bench")
    assert isinstance(measurement, Measurement)
    if measurement.state != "finished":  # what it has not reached would never be missed
        raise InputError(f"{path} did not run to its end, it is {measurement.state}", option)
    if not any(sample.points for sample in measurement.samples):
        raise InputError(f"{path} holds no samples", option)
    return measurement
