"""Where a model comes from (a folder, a hub id, a shape), checks of its files before they are read,
and its hashes.
"""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache, cached_property
from hashlib import sha256
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import (
    constants,
    get_session,
    hf_hub_download,
    list_repo_files,
    snapshot_download,
)
from huggingface_hub.utils import logging as hub_logging
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from tswift.errors import (
    MAX_RECORD,
    InputError,
    Notice,
    SlowWarning,
    close_name,
    did_you_mean,
    find_path,
    notice,
    parse_json,
    read_file,
)
from tswift.models.architecture import (
    class_of,
    freeze_longrope,
    refuse_unsupported,
    skeleton,
    with_yarn,
)
from tswift.models.config import DEMO, DEMO_DRAFT, PUBLISHED, SHAPE_PREFIX
from tswift.models.shapes import StandInTokenizer

if TYPE_CHECKING:
    from tswift.models.gguf import GGUFFile

SUFFIX = ".gguf"
_BUNDLED = {DEMO: ("demo",), DEMO_DRAFT: ("demo", "draft")}  # folders, relative to this one

# what is fetched of a model on the hub, and copies in layouts that nothing reads
_READ = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt"]
_UNREAD = ["*/*", "consolidated*"]
_GENERATION = "generation_config.json"
CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
# how their files begin
_TOKENIZERS = ("tokenizer", "vocab", "merges", "spiece", "sentencepiece", "tekken")
_HUB_TIMEOUT = 10.0  # seconds

_SAMPLE = 1024  # bytes of each tensor of a GGUF file that its hash covers
_PACKED = 8  # weights in an element of a quantised checkpoint, at most
# what configurations call numbers of layers, and of all that a weight has a row for each of
_LAYERS = r"(.*_)?(num|n)_(hidden_|nextn_predict_)?layers?|depth"
_SIZES = (
    r"(?!.*(batch|chunk|image|window))"
    r"(.*_)?(dim|embd|experts|ff|groups|heads?|inner|inputs|kv|layers|model|rank|size|state)"
)
# no more than these take no time to build; and most where no weights are here
_FEW, _UNSEEN = {_LAYERS: 128, _SIZES: 1 << 16}, {_LAYERS: 1 << 10, _SIZES: 1 << 24}
# tokens that end a text or a turn by their names alone, as llama.cpp of October 2026 has them
_ENDS = (
    "<|im_end|> <|eot_id|> <|eom_id|> <|end|> <|end_of_text|> <|endoftext|> <end_of_turn> <turn|> "
    "<eos> </s> <|return|> <|call|> <|calls|> <|flush|> <|tool_response> <EOT> _<EOT> [EOT] [EOS] "
    "<end_of_utterance> <\uff5cend▁of▁sentence\uff5c> [e~[ <|ifm|im_end|>"
)
_ENDS_OF_PARTS = {"<|return|>", "<|flush|>"}  # beside these "<|end|>" ends a part of an answer


# by name; every shape has 131,072 positions and bfloat16 weights
SHAPES: dict[str, PreTrainedConfig] = {
    name: AutoConfig.for_model(**values, max_position_embeddings=131_072, dtype="bfloat16")
    for name, values in PUBLISHED.items()
}


@contextmanager
def hub(wanted: bool = True) -> Iterator[None]:
    """Let files come from the hub, if any are ``wanted`` from there; if it is out of reach,
    from its local cache only.

    The hub's own client tries each file six times within half a minute, and logs every try.
    """
    offline = constants.HF_HUB_OFFLINE
    verbosity = hub_logging.get_verbosity()
    try:
        if wanted:
            hub_logging.set_verbosity(logging.CRITICAL)
            constants.HF_HUB_OFFLINE = offline or not _reachable()
        yield
    finally:
        constants.HF_HUB_OFFLINE = offline
        hub_logging.set_verbosity(verbosity)


def _reachable() -> bool:
    with suppress(Exception):  # the HTTP library differs by version, and its errors with it
        get_session().head(constants.ENDPOINT, timeout=_HUB_TIMEOUT)  # any answer will do
        return True
    return False


@contextmanager
def silence() -> Iterator[None]:
    """Keep others' warnings and transformers' progress bars off stderr;
    what matters of them is checked here.
    """
    verbosity = transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity(transformers_logging.CRITICAL)
    transformers_logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            # others' filters are for some texts or modules
            alike = [each for each in warnings.filters if not any(each[1::2])]
            warnings.simplefilter("ignore")
            for kind in (Notice, SlowWarning):
                asked = next((how for how, _, of, *_ in alike if issubclass(kind, of)), "")
                warnings.simplefilter("ignore" if asked == "ignore" else "always", kind)
            yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()


@contextmanager
def as_input_error(model: str, what: str = "") -> Iterator[None]:
    """Turn every error of a library that reads a model into an ``InputError`` of one line."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        # transformers, the hub client and safetensors have many ways to fail
        here = model in _BUNDLED or Path(model).expanduser().exists()
        suggestion = "" if here else close_name(Path(model), f"*/{CONFIG}", _BUNDLED)
        if suggestion:
            raise InputError(f"there is no folder {model!r}{suggestion}", "model") from None
        # the hub's client adds advice
        message = str(error) if here else str(error).strip().partition("\n")[0]
        reason = " ".join(message.split())
        if not isinstance(error, OSError) and reason.count(" ") <= 2:  # it does not explain itself
            reason = f"{type(error).__name__} {reason}".strip()
        if "trust_remote_code" in str(error):
            reason = "it needs code of its own, which tswift never runs"
        if not here and "couldn't connect" in reason:
            raise InputError(f"no folder {model!r}, and the hub is unreachable", "model") from None
        where = "" if here else " from the hub, and is no folder here"
        raise InputError(
            f"{model} cannot be loaded{where} ({what}{reason[:200]})", "model"
        ) from None


def find_source(model: str) -> tuple[str, Path | None]:
    """The path or hub id for transformers, and the folder if it is one; of a GGUF file its path,
    and its folder.
    """
    if model in _BUNDLED:
        folder = Path(__file__).parent.joinpath(*_BUNDLED[model])
        if not (folder / WEIGHTS).is_file():
            raise InputError(
                f"the bundled model is not in this installation (looked in {folder})", "model"
            )
        return str(folder), folder
    if not model.strip():
        raise InputError(f"there is no folder {model!r}", "model")
    path = find_path(model, "model")
    if path.is_dir():
        single = _only_gguf(path)
        return (str(path), path) if single is None else (str(single), path)
    if path.exists():
        if path.suffix != SUFFIX and not begins_as_gguf(path):
            raise InputError(
                f"{model} is a file; give the folder it is in, or a GGUF file", "model"
            )
        return str(path), path.parent
    place, _, wanted = model.rpartition(":")
    folder = Path(place).expanduser()
    if place and folder.is_dir():
        return str(folder / _fitting(place, wanted, _ggufs(folder))), folder
    if _is_hub_id(place):
        fetched = _fetched(place, wanted)
        return str(fetched), fetched.parent
    if not _is_hub_id(model):
        if path.suffix == SUFFIX:
            raise InputError(
                f"there is no file {model!r}{close_name(path, f'*{SUFFIX}', ())}", "model"
            )
        raise InputError(
            f"there is no folder {model!r}{close_name(path, f'*/{CONFIG}', _BUNDLED)}", "model"
        )
    return model, None


def begins_as_gguf(path: Path) -> bool:
    """Whether a file begins as those of llama.cpp do, whatever it is called."""
    with suppress(OSError), path.open("rb") as file:
        return file.read(4) == b"GGUF"
    return False


def _is_hub_id(name: str) -> bool:
    """Whether a name could be a repository's, and is no path."""
    path = name.startswith(("/", ".", "~")) or name.count("/") > 1
    return bool(name) and not path and not name.endswith(SUFFIX)


def _ggufs(folder: Path) -> list[str]:
    """The names of a folder's GGUF files."""
    return sorted(file.name for file in folder.glob(f"*{SUFFIX}"))


def _only_gguf(folder: Path) -> Path | None:
    """The GGUF file of a folder that has no other weights; None for no such folder."""
    if (folder / WEIGHTS).exists() or (folder / INDEX).exists():
        return None
    files = _ggufs(folder)
    return folder / _fitting(str(folder), "", files) if files else None


def _fitting(place: str, wanted: str, files: Sequence[str]) -> str:
    """The one of a place's GGUF files that is called so, or whose name ends so:
    ``Q4_K_M`` for ``tiny.Q4_K_M.gguf``, in letters of either case.
    """
    end = re.compile(rf"(.*[^a-z0-9])?{re.escape(wanted)}({SUFFIX})?", re.IGNORECASE)
    found = [file for file in files if not wanted or end.fullmatch(file)]
    found = [file for file in found if len(found) == 1 or "mmproj" not in file]
    if len(found) != 1:
        names = ", ".join((found or files)[:4])
        kind = f" {wanted}" * bool(wanted)
        raise InputError(
            f"{place} holds {len(found)} GGUF files{kind} ({names}); name one of them, as "
            f"{place}:FILE{SUFFIX}",
            "model",
        )
    return found[0]


@cache
def _fetched(repository: str, wanted: str) -> Path:
    """A GGUF file of the hub, where it was put here; asked for once in a process."""
    with silence(), hub(), as_input_error(f"{repository}:{wanted}"):
        if not wanted.endswith(SUFFIX):
            files = [file for file in list_repo_files(repository) if file.endswith(SUFFIX)]
            wanted = _fitting(repository, wanted, files)
        return Path(hf_hub_download(repository, wanted))


@dataclass(frozen=True)
class Checkpoint:
    """A model that was named and where its files are: each thing is found or read once.

    Attributes:
        name: as the user named it: a bundled model, a folder, a GGUF file, a hub id, or a shape.
        source: the path or hub id that transformers takes; of a GGUF file its path.
        folder: the files'; None on the hub, and of a shape.
        yarn: how many times the checkpoint's own positions it is to serve; None for its own.
    """

    name: str
    source: str
    folder: Path | None
    yarn: float | None = None

    @classmethod
    def find(cls, name: str, yarn: float | None = None) -> Checkpoint:
        """The checkpoint of a name; InputError if there is none."""
        if name.startswith(SHAPE_PREFIX):
            return cls(name, name, None, yarn)
        return cls(name, *find_source(name), yarn)

    @property
    def simulated(self) -> bool:
        """Whether it is a shape, whose weights are random."""
        return self.name.startswith(SHAPE_PREFIX)

    @property
    def on_hub(self) -> bool:
        """Whether its files come from the hub."""
        return self.folder is None and not self.simulated

    @cached_property
    def gguf(self) -> GGUFFile | None:
        """What the header of its GGUF file says; None for a model that is no such file."""
        if self.folder is None or not Path(self.source).is_file():
            return None
        from tswift.models.gguf import (
            read_gguf,  # the package for its numbers is asked for by files
        )

        return read_gguf(Path(self.source))

    @cached_property
    def config(self) -> PreTrainedConfig:
        """The transformers configuration; no weights are read."""
        config = shape_config(self.name) if self.simulated else self._own_config()
        return config if self.yarn is None else with_yarn(config, self.yarn)

    def _own_config(self) -> PreTrainedConfig:
        model = self.name
        stored = dict[str, StoredTensor]()
        if self.folder is not None and self.gguf is None:
            refuse_broken(self.folder)
        with silence(), hub(self.on_hub), as_input_error(model):
            if self.gguf is not None:
                from tswift.models.gguf_keys import configuration

                values = configuration(self.gguf)
                refuse_code(values, model)
                refuse_excess(values, self.gguf.tensors, model)
                config = AutoConfig.for_model(**values)
            else:
                values, _ = PreTrainedConfig.get_config_dict(self.source)
                refuse_code(values, model)
                with suppress(InputError):  # what is wrong with weights is told by who needs them
                    stored = {} if self.on_hub else self.tensors
                refuse_excess(values, stored, model)
                config = AutoConfig.from_pretrained(self.source, trust_remote_code=False)
                # a file's own choice could be a kernel of the hub, which is code
                config._attn_implementation = None
                try:
                    config.get_text_config()
                except ValueError:  # transformers cannot tell which
                    raise InputError(
                        f"{model} has several models of text, as {config.model_type} has", "model"
                    ) from None
                freeze_longrope(config.get_text_config())
            refuse_unsupported(config.get_text_config(), model)
            if head := _own_head(config, stored):
                notice(f"{model} says tie_word_embeddings, and has another {head}, which is used")
                for each in (config, config.get_text_config()):
                    each.tie_word_embeddings = False
        return config

    def fetched(self) -> Checkpoint:
        """The same, with its files here: of a hub id what transformers reads is fetched."""
        if not self.on_hub:
            return self
        with hub(), as_input_error(self.name):
            folder = snapshot_download(
                self.source,
                allow_patterns=_READ,
                ignore_patterns=_UNREAD,
                local_files_only=constants.HF_HUB_OFFLINE,
            )
        return replace(self, source=folder, folder=Path(folder))

    @cached_property
    def skeleton(self) -> PreTrainedModel:
        """The network on the meta device, without weights; InputError if a GGUF file lacks some."""
        config = self.config
        with silence(), as_input_error(self.name):
            network = skeleton(config)
            if self.gguf is not None:
                self.gguf.names(dict(network.named_parameters()))
        return network

    @cached_property
    def tensors(self) -> dict[str, StoredTensor]:
        """The tensors that the weight files of its folder declare, by name; no values are read."""
        assert self.folder is not None
        return stored_tensors(self.folder)

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Read its tokenizer, without weights; InputError if there is none that can be read."""
        if self.simulated:
            return StandInTokenizer()
        with silence(), hub(self.on_hub), as_input_error(self.name, "its tokenizer: "):
            if self.gguf is not None:
                from tswift.models.gguf_tokenizer import tokenizer_of

                tokenizer = tokenizer_of(self.gguf)
            else:
                tokenizer = AutoTokenizer.from_pretrained(self.source, trust_remote_code=False)
        if getattr(tokenizer, "backend_tokenizer", None) is None:
            raise InputError(
                f"{self.name} has no tokenizer.json that the tokenizers library reads", "model"
            )
        return tokenizer

    @cached_property
    def weights_hash(self) -> str | None:
        """SHA-256 over the names, types and shapes of its weights, and a row of each.

        It is known before the weights are loaded, and the same however they are. None where they
        are not on this machine.
        """
        digest = sha256()
        if self.simulated:
            return None
        if self.gguf is not None:
            for name, stored in sorted(self.gguf.tensors.items()):
                digest.update(f"{name}{stored.kind.name}{stored.shape}".encode())
                digest.update(self.gguf.beginning(stored, _SAMPLE))
            return digest.hexdigest()
        with suppress(OSError, InputError):
            if self.on_hub:
                found = hf_hub_download(self.source, CONFIG, local_files_only=True)
                tensors = stored_tensors(Path(found).parent)
            else:
                tensors = self.tensors
            for name, tensor in sorted(tensors.items()):
                digest.update(f"{name}{tensor.dtype}{tensor.shape}".encode())
                digest.update(tensor.beginning().view(torch.uint8).numpy().tobytes())
            return digest.hexdigest()
        return None


def _own_head(config: PreTrainedConfig, stored: Mapping[str, StoredTensor]) -> str:
    """The LM head that weights have beside embeddings of other values; empty if there is none.

    transformers 5 uses it, whatever a configuration says of its being tied.
    """
    if not getattr(config, "tie_word_embeddings", False):
        return ""
    with suppress(InputError):  # of a class that is not served, which who builds it is told
        for pair in dict(class_of(config)._tied_weights_keys or {}).items():
            ends = [".".join(name.split(".")[-2:]) for name in pair]
            found = [[name for name in stored if f".{name}".endswith(f".{end}")] for end in ends]
            if all(len(names) == 1 for names in found):
                head, embeddings = (stored[name] for (name,) in found)
                if head.shape != embeddings.shape or not torch.equal(
                    head.read(), embeddings.read()
                ):
                    return head.name
    return ""


def shape_config(model: str) -> PreTrainedConfig:
    """The configuration of ``shape:NAME``, a copy that may be changed."""
    name = model.removeprefix(SHAPE_PREFIX)
    if name not in SHAPES:
        raise InputError(
            f"no shape {name!r}; there are {', '.join(SHAPES)}{did_you_mean(name, SHAPES)}", "model"
        )
    return deepcopy(SHAPES[name])


def refuse_broken(folder: Path) -> None:
    """Refuse a folder that holds no model, or only an adapter of one."""
    if (folder / "adapter_config.json").exists():
        raise InputError(f"{folder} holds an adapter; merge it into its model first", "model")
    if not (folder / CONFIG).exists():
        raise InputError(f"{folder} holds no model: there is no {CONFIG} in it", "model")
    if (folder / _GENERATION).exists():  # transformers would ignore a broken one
        read_object(folder / _GENERATION, "model")


def read_object(path: Path, option: str) -> dict[str, object]:
    """The object in a JSON file."""
    value = parse_json(read_file(path, MAX_RECORD, option), path, option)
    if not isinstance(value, dict):
        raise InputError(f"{path} holds no JSON object", option)
    return value


def has_tokenizer(folder: Path) -> bool:
    """Whether a model's folder holds any file of a tokenizer."""
    return any(path.name.startswith(_TOKENIZERS) for path in folder.iterdir())


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256 over all that makes token ids of a text, and text of token ids."""
    # what stands before these is how texts are truncated and padded, which every call sets anew
    parts = tokenizer.backend_tokenizer.to_str().partition('"added_tokens"')[2]
    return sha256(parts.encode()).hexdigest()


def eos_ids(
    model: str, network: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, vocab_size: int
) -> tuple[int, ...]:
    """The token ids that end a text or a turn, by all that a checkpoint says of them, and by their
    names where they are control tokens or stand in the chat template.
    """
    tokens: list[int] = []  # as far as they are what they should be
    for holder in (network.generation_config, network.config, tokenizer):
        ids = getattr(holder, "eos_token_id", None)
        tokens += ids if isinstance(ids, list | tuple) else () if ids is None else (ids,)
    for token in tokens:
        if not isinstance(token, int) or not 0 <= token < vocab_size:
            reason = (
                f"has eos_token_id {token!r:.40}, which is no id of its vocabulary of "
                f"{vocab_size:,}"
            )
            raise InputError(f"{model} {reason}", "model")
    known: dict[str, int] = getattr(tokenizer, "get_vocab", dict)()  # random weights have none
    if known.keys() & _ENDS_OF_PARTS:
        known.pop("<|end|>", None)
    for name in _ENDS.split():
        if known.get(name, vocab_size) < vocab_size and (
            name in str(tokenizer.chat_template)
            or not tokenizer.decode(known[name], skip_special_tokens=True)
        ):
            tokens.append(known[name])
    return tuple(sorted({*tokens}))


def refuse_code(values: Mapping[str, object], model: str) -> None:
    """Refuse a configuration that needs code of its own, or weights from elsewhere."""
    kind = values.get("model_type")
    reason = ""
    if "auto_map" in values and not (isinstance(kind, str) and kind in CONFIG_MAPPING):
        reason = "needs code of its own (auto_map), which tswift never runs"
    elif not isinstance(kind, str):
        reason = f"has no model_type in its {CONFIG}"
    elif kind.endswith("_assistant"):
        reason = "is a drafter, which --drafter takes"
    elif values.get("transformers_weights") is not None:
        reason = "names its weights itself (transformers_weights), which tswift does not read"
    if reason:
        raise InputError(f"{model} {reason}", "model")


def refuse_excess(values: Mapping[str, Any], tensors: Mapping[str, Any], model: str) -> None:
    """Refuse a configuration of more layers, or larger sizes, than weights have, before anything is
    built by it.

    Layers are told by the numbers in names, sizes by the longest side of a ``shape``.

    Args:
        values: of the configuration, and of those within it.
        tensors: by name; none where they are not here.
        model: its name.
    """
    numbers = [next(filter(str.isdecimal, name.split(".")), "0") for name in tensors]
    sides = [_PACKED * side for tensor in tensors.values() for side in tensor.shape]
    known = {_LAYERS: [int(number) + 1 for number in numbers], _SIZES: sides}
    for kind, counts in known.items():
        most = max([*counts, _FEW[kind]]) if tensors else _UNSEEN[kind]
        for name, value in values.items():
            if re.fullmatch(kind, name) and isinstance(value, int) and value > most:
                reason = f"says {name} {value!r:.30}, and its weights can have {most:,} at most"
                raise InputError(f"{model} {reason}", "model")
    for inner in values.values():
        if isinstance(inner, dict):
            refuse_excess(inner, tensors, model)


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a safetensors file: the file, its name, its type such as ``BF16``,
    and its shape.
    """

    path: Path
    name: str
    dtype: str
    shape: tuple[int, ...]

    def read(self) -> torch.Tensor:
        """The values."""
        with safe_open(self.path, framework="pt") as file:
            return file.get_tensor(self.name)

    def beginning(self) -> torch.Tensor:
        """The values of the first row."""
        with safe_open(self.path, framework="pt") as file:
            return file.get_slice(self.name)[:1] if self.shape else file.get_tensor(self.name)[None]


def read_header(path: Path, option: str) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """The tensors that a safetensors file declares, by name, and its metadata;
    no values are read.
    """
    try:
        with safe_open(path, framework="pt") as file:
            views = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            tensors = {
                n: StoredTensor(path, n, v.get_dtype(), tuple(v.get_shape()))
                for n, v in views.items()
            }
            return tensors, file.metadata() or {}
    except FileNotFoundError:
        raise InputError(f"{path} does not exist", option) from None
    except (SafetensorError, OSError, ValueError, RuntimeError, MemoryError) as error:
        reason = " ".join(str(error).split())[:200]
        raise InputError(f"{path} is broken or no safetensors file ({reason})", option) from None


def check_tensors(
    path: Path,
    stored: Mapping[str, StoredTensor],
    shapes: Mapping[str, tuple[int, ...]],
    optional: Container[str],
    owner: str,
    option: str,
) -> None:
    """Refuse tensors that are not those of a network: the first that is missing,
    left over or of another shape.

    Args:
        path: where they are, for the error.
        stored, shapes: what there is, and what belongs there, by the same names.
        optional: what may be missing.
        owner: what they are of.
        option: that named the file.
    """
    for name, shape in shapes.items():
        tensor = stored.get(name)
        reason = ""
        if tensor is None and name not in optional:
            reason = f"lacks {name}"
        elif tensor is not None and tensor.shape != shape:
            reason = f"has {tensor.name} of shape {list(tensor.shape)}, where {list(shape)} belongs"
        if reason:
            raise InputError(f"{path} {reason}", option)
    for name in sorted(stored.keys() - shapes.keys()):
        raise InputError(f"{path} has {stored[name].name}, which no {owner} has", option)


def read_into(
    network: nn.Module,
    tensors: Mapping[str, StoredTensor],
    dtype: torch.dtype,
    device: torch.device,
    option: str,
) -> None:
    """Give a network on the meta device its weights by the names of its parameters,
    and freeze them.

    Raises:
        InputError: some are not finite numbers.
    """
    state = {}
    for name, weight in network.state_dict().items():
        stored = tensors[name]
        values = stored.read()
        if weight.is_floating_point():
            if not (values.is_floating_point() and values.isfinite().all()):
                reason = f"is broken: {stored.name} holds something else than finite numbers"
                raise InputError(f"{stored.path} {reason}", option)
            values = values.to(dtype)
        state[name] = values.to(device)
    network.load_state_dict(state, assign=True)
    network.eval().requires_grad_(False)


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """The tensors that a model's weight files declare, by name; no values are read."""
    return {
        name: tensor
        for path in _weight_files(folder)
        for name, tensor in read_header(path, "model")[0].items()
    }


def _weight_files(folder: Path) -> list[Path]:
    """The files that transformers would read, all of them there."""
    if (folder / WEIGHTS).exists():
        return [folder / WEIGHTS]
    if not (folder / INDEX).exists():
        pickled = next(
            (
                path.name
                for path in sorted(folder.iterdir())
                if path.suffix in (".bin", ".pt", ".pth")
            ),
            None,
        )
        reason = f"only {pickled}, a pickle, which could run code" if pickled else f"no {WEIGHTS}"
        raise InputError(f"{folder} has no weights that tswift reads ({reason})", "model")
    shards = read_object(folder / INDEX, "model").get("weight_map")
    if not isinstance(shards, dict) or not shards:
        raise InputError(f"{folder / INDEX} is broken: it lacks weight_map", "model")
    names = {str(shard) for shard in shards.values()}
    for name in sorted(names):
        # a file of another folder is none of the model's
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise InputError(
                f"{folder / INDEX} names {name!r:.60}, no safetensors file in the folder", "model"
            )
        if not (folder / name).is_file():
            raise InputError(f"{folder} lacks {name}, which its index names", "model")
    return [folder / name for name in sorted(names)]


def refuse_misfit(
    network: PreTrainedModel, tensors: Mapping[str, StoredTensor], model: str
) -> None:
    """Refuse weights that are not those of a network on the meta device,
    before memory is taken for either.
    """
    quantized = getattr(network.config, "quantization_config", None) is not None
    parameters = dict(network.named_parameters())
    for name in () if quantized else [name for name in parameters if name in tensors]:
        tensor = tensors[name]
        shape = tuple(parameters[name].shape)
        if tensor.shape != shape:
            wrong = f"of shape {list(tensor.shape)}, {CONFIG} makes it {list(shape)}"
            raise InputError(f"{model} has {name} {wrong}", "model")
        if not tensor.dtype.startswith(("F", "BF")):
            raise InputError(
                f"{model} has {name} of type {tensor.dtype}, and says nothing of quantisation",
                "model",
            )
    needed = sum(parameter.numel() for parameter in parameters.values())
    stored = sum(prod(tensor.shape) for tensor in tensors.values())
    if needed > 2 * stored * (_PACKED if quantized else 1):
        raise InputError(f"{model} has {stored:,} weights, {CONFIG} asks for {needed:,}", "model")
