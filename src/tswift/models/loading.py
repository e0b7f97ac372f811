"""Load a causal language model with what drafts for it: the bundled one, a folder, a hub id or a random one."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import CONFIG_NAME, cached_file

from tswift.attention.backends import BACKENDS, choose, fails
from tswift.errors import InputError, renamed
from tswift.kv.full import FullKV
from tswift.models.attached import attach, heads_path
from tswift.models.base_heads import Heads
from tswift.models.checkpoint import has_tokenizer, refuse_misfit, stored_tensors
from tswift.models.draft import DRAFT_OPTION, refuse_other_vocabulary
from tswift.models.dtypes import find_dtype, own_dtype
from tswift.models.dummy import StandInTokenizer, random_heads, random_network
from tswift.models.fingerprint import weights_hash
from tswift.models.hub import hub
from tswift.models.kinds import KINDS
from tswift.models.layers import Unserved
from tswift.models.linear import quicken
from tswift.models.published import carries_heads
from tswift.models.quantizing import own_quantization, quantizer
from tswift.models.ranks import ALONE, OPTION, Ranks
from tswift.models.shapes import PREFIX, refuse_shape, routed
from tswift.models.source import DEMO, find_source, in_one_line, read_config, silence
from tswift.models.splitting import plan
from tswift.models.target import Target

EAGER = "eager"
_TRIED = 24  # tokens that a model is tried with


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to decode.

    Attributes:
        name: as the user named it.
        tokenizer: the transformers tokenizer; a stand-in where the weights are random.
        target: the model, adapted.
        heads: heads that draft for it, if it has any.
        eos_ids: token ids that end a text.
        attention: the backend in use.
        layers: ``eager`` or ``compiled``, and why what should be in use is not.
        simulated: its weights are random, so that times mean something and texts do not.
        quantization: what its weights were quantised by; None if they were not. Plain decoding is this model's own.
        ranks: those that hold it together.
        weights: hash of all weights, where that took all of the ranks; None where it can be had at any time.
        draft: a smaller model that drafts for it, if one was asked for. Every rank holds the whole of it.
        draft_name: as the user named that.
    """

    name: str
    tokenizer: Any
    target: Target
    heads: Heads | None
    eos_ids: tuple[int, ...]
    attention: str = "sdpa"
    layers: str = EAGER
    simulated: bool = False
    quantization: str | None = None
    ranks: Ranks = ALONE
    weights: str | None = None
    draft: Target | None = None
    draft_name: str | None = None

    def encode(self, text: str, bare: bool = False) -> list[int]:
        """The token ids of a prompt, with the first token the model wants before any text, if it wants one.

        Args:
            text: the prompt.
            bare: add no token; the text has all that the model wants.

        Raises:
            InputError: the tokenizer cannot do it, or is not the model's: it knows tokens that the model does not.
        """
        with silence(), in_one_line(self.name, "its tokenizer: "):
            ids = list(self.tokenizer(text, **({"add_special_tokens": False} if bare else {}))["input_ids"])
        if ids and max(ids) >= self.target.vocab_size:
            message = (
                f"has token id {max(ids):,} by the tokenizer of {self.name}, the model has {self.target.vocab_size:,}"
            )
            raise InputError(message, "--prompt")
        return ids

    def about(self) -> dict[str, Any]:
        """What was loaded and how, for records."""
        return {
            "name": self.name,
            "device": str(self.target.device) if self.ranks.count == 1 else self.target.device.type,
            "dtype": _plain(self.target.dtype),
            "attention": self.attention,
            "layers": self.layers,
            "heads": None if self.heads is None else f"{self.heads.kind}, {self.heads.count}",
            "eos_ids": list(self.eos_ids),
            "simulated": self.simulated,
            "quantization": self.quantization,
            "ranks": self.ranks.count,
            **({} if self.draft is None else {"draft": {"name": self.draft_name}}),
        }

    def besides(self) -> str:
        """What is out of the ordinary, to be said after the rest."""
        quantized = f", weights quantised ({self.quantization})" if self.quantization else ""
        return quantized + (f", split over {self.ranks.count} ranks" if self.ranks.count > 1 else "")


def load(
    model: str = DEMO,
    *,
    device: str = "auto",
    dtype: str = "auto",
    attention: str = "auto",
    heads: str | os.PathLike[str] | None = None,
    quantize: str | None = None,
    draft: str | None = None,
    ranks: Ranks = ALONE,
) -> LoadedModel:
    """Load a model for decoding.

    Args:
        model: ``demo`` (the bundled model), a folder, or a hub id. Only safetensors weights are read, and no code from
            the checkpoint is run. ``shape:NAME`` is a published model's shape with random weights, for timing.
        device: ``cpu``, ``cuda``, ``cuda:1`` and so on; ``auto`` takes CUDA where there is one.
        dtype: ``float32``, ``float64``, ``bfloat16`` or ``float16``; ``auto`` is float32 on the CPU, the checkpoint's
            own on CUDA, and bfloat16 for a shape.
        attention: ``triton`` (CUDA; float32, bfloat16, float16), ``flash`` (CUDA with flash-attn installed; bfloat16,
            float16), ``native`` (x86 CPUs where there is a C compiler; float32), ``sdpa`` (everything), or ``auto``:
            triton or native where they can serve, sdpa elsewhere. With triton the layers are compiled, and passes are
            replayed as CUDA graphs.
        heads: a heads file, of ours or one of Medusa's; a folder with one, or with a whole model that carries heads; or
            a kind (``chained``, ``conditioned``): that is ``heads-KIND.safetensors`` in the model's folder. None takes
            ``heads.safetensors`` there, if it exists, or the heads that the model carries. A shape has random heads of
            either kind, chained if nothing is said.
        quantize: ``int8``, ``fp8`` or ``int4``: have torchao quantise the weights of linear layers. What is decoded is
            the quantised model. None leaves them as they are in the checkpoint.
        draft: a smaller model with the same vocabulary, to draft for it: ``demo-draft`` (the bundled one), a folder or
            a hub id. It comes to the model's device, in its dtype, with the same attention.
        ranks: from :func:`tswift.models.ranks.join`, to hold the model together with other processes. All of them have
            to call this; what the first asks for counts.

    Raises:
        InputError: something named here does not exist, is broken, or cannot be served exactly.
        Gone: another rank is not there any more.
    """
    named = {"--model": model, "--device": device, "--dtype": dtype, "--attention": attention}
    for option, name in (named if draft is None else {**named, DRAFT_OPTION: draft}).items():
        if not isinstance(name, str):
            raise InputError(f"wants a name, got {name!r:.40}", option)
    with ranks.together():
        asked = ranks.share((model, device, dtype, attention, heads, quantize, draft))
        model, device, dtype, attention, heads, quantize, draft = asked
        loaded = _load(model, device, dtype, attention, heads, quantize, ranks)
        return loaded if draft is None else replace(loaded, draft=_draft(draft, loaded, attention), draft_name=draft)


def _load(
    model: str,
    device: str,
    dtype: str,
    attention: str,
    heads: str | os.PathLike[str] | None,
    quantize: str | None,
    ranks: Ranks,
) -> LoadedModel:
    place = _place(device, ranks)
    if model.startswith(PREFIX):
        if quantize is not None or ranks.count > 1:
            raise InputError(f"{model} has random weights, which are neither quantised nor split", "--model")
        return _simulated(model, place, "bfloat16" if dtype == "auto" else dtype, attention, heads)
    kind, place_of_heads = _dtype(dtype, place), heads_path(heads, find_source(model)[1])
    opened = _open(model, place, kind, attention, quantize, ranks)
    target, config = opened.target, opened.target.model.config
    if heads is None and place_of_heads is None and carries_heads(config):
        with hub(opened.folder is None), in_one_line(model):  # where the hub's files were put
            place_of_heads = opened.folder or Path(cached_file(opened.source, CONFIG_NAME)).parent
    return LoadedModel(
        model,
        opened.tokenizer,
        target,
        None if place_of_heads is None else attach(place_of_heads, target),
        _eos_ids(model, target.model, opened.tokenizer, target.vocab_size),
        opened.attention,
        _compiled(target, opened.note),
        quantization=opened.quantization,
        ranks=ranks,
        weights=weights_hash(target.model) if ranks.count > 1 else None,
    )


def _draft(draft: str, loaded: LoadedModel, attention: str) -> Target:
    """The smaller model that drafts for a loaded one; its own heads, if it has any, are not looked at."""
    target = loaded.target
    try:
        if draft.startswith(PREFIX):
            if not loaded.simulated:
                refuse_shape(draft)
            found = _simulated(draft, target.device, _plain(target.dtype), attention, None)
            ours, tokenizer = found.target, None
        else:
            opened = _open(draft, target.device, target.dtype, attention, bare=True)
            ours, tokenizer = opened.target, opened.tokenizer
            _compiled(ours, opened.note)
        known = None if loaded.simulated else loaded.tokenizer
        refuse_other_vocabulary(draft, ours, tokenizer, loaded.name, target, known)
    except InputError as error:
        raise renamed(error, {"--model": DRAFT_OPTION}) from None
    return ours


@dataclass(frozen=True)
class _Opened:
    """A checkpoint's model, adapted, and what came with it.

    Attributes:
        tokenizer: None if there is none.
        source: what transformers was given.
        folder: the same, if it is one.
        attention: the backend in use.
        note: why it is not the one that should be.
        quantization: as :class:`LoadedModel` has it.
    """

    target: Target
    tokenizer: Any
    source: str
    folder: Path | None
    attention: str
    note: str
    quantization: str | None


def _open(
    model: str,
    place: torch.device,
    kind: Any,
    attention: str,
    quantize: str | None = None,
    ranks: Ranks = ALONE,
    bare: bool = False,
) -> _Opened:
    """Read a checkpoint's weights and tokenizer. A bare one is a folder that may be without a tokenizer."""
    source, folder = find_source(model)
    config = read_config(model)
    backend, note = _backend(attention, own_dtype(config) if kind == "auto" else kind, place)
    quantization, how, tokenizer = own_quantization(config), dict[str, Any](), None
    with silence(), hub(folder is None), in_one_line(model):
        if folder is not None:
            refuse_misfit(config, stored_tensors(folder), model)
        if ranks.count > 1:
            if quantize or quantization:
                raise InputError("quantised weights cannot be split over ranks yet", OPTION)
            how.update(plan(config, model, ranks))
        if quantize is not None:
            wanted = own_dtype(config) if kind == "auto" else kind
            how["quantization_config"] = quantizer(quantize, config, place, wanted)
            quantization = f"{quantize}, torchao"
        if quantization and place.type == "cuda":
            how["device_map"] = place  # quantised on the way: the whole weights need not fit
        if not bare or folder is None or has_tokenizer(folder):
            tokenizer = _tokenizer(source, model)
        network, info = AutoModelForCausalLM.from_pretrained(
            source,
            config=config,
            dtype=kind,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
            **how,
        )
        if getattr(config, "quantization_config", None) and not getattr(network, "hf_quantizer", None):
            raise InputError(f"{model} is quantised in a way that transformers does not know here", "--model")
        # transformers would fill what the file lacks with random numbers and only warn
        lacking = sorted({*info["missing_keys"], *(str(key) for key in info["mismatched_keys"])})
        if lacking:
            raise InputError(f"{model} lacks weights for {len(lacking)} tensors, such as {lacking[0]}", "--model")
        if network.dtype == torch.float64 and routed(config):
            network.set_experts_implementation("eager")  # the others multiply no float64
        target = _adapted(network if how else network.to(place), model, backend)
    return _Opened(target, tokenizer, source, folder, backend, note, quantization)


def _tokenizer(source: str, model: str) -> Any:
    with in_one_line(model, "its tokenizer: "):
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise InputError(f"{model} has no tokenizer.json that the tokenizers library reads", "--model")
    return tokenizer


def _simulated(
    model: str, place: torch.device, dtype: str, attention: str, heads: str | os.PathLike[str] | None
) -> LoadedModel:
    """A published shape with random weights and random heads; or with the heads of a file, if one is named."""
    config, kind = read_config(model), _dtype(dtype, place)
    backend, note = _backend(attention, kind, place)
    wanted = "chained" if heads is None else str(heads)
    path = None if wanted in KINDS else heads_path(wanted, None)
    with silence(), in_one_line(model):
        network = random_network(config, kind, place, model)
        target = _adapted(network, model, backend)
    if path is None:
        drafting = random_heads(wanted, config, target.dtype, target.device)
        quicken(drafting)
    else:
        drafting = attach(path, target, foreign=True)
    tokenizer = StandInTokenizer()
    eos_ids = _eos_ids(model, network, tokenizer, target.vocab_size)
    return LoadedModel(model, tokenizer, target, drafting, eos_ids, backend, _compiled(target, note), simulated=True)


def _place(device: str, ranks: Ranks) -> torch.device:
    """Where the weights go; a rank has its place already."""
    if ranks.device is None:
        return find_device(device)
    if device.partition(":")[0] not in ("auto", ranks.device.type):
        raise InputError(f"the ranks are on {ranks.device.type}, got {device}", "--device")
    return ranks.device


def find_device(device: str) -> torch.device:
    """The device of a name; ``auto`` is CUDA where there is one.

    Raises:
        InputError: there is none.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
    except (RuntimeError, ValueError):
        place = None
    if place is None or place.type not in ("cpu", "cuda") or (place.type == "cpu" and place.index):
        raise InputError(f"no device {device!r}; there are auto, cpu, cuda, cuda:0, ...", "--device")
    if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
        raise InputError(f"PyTorch finds {torch.cuda.device_count()} CUDA devices here, wanted {device}", "--device")
    return place


def _dtype(dtype: str, place: torch.device) -> Any:
    """A torch dtype; ``auto`` where the checkpoint says which."""
    if dtype == "auto":
        return "auto" if place.type == "cuda" else torch.float32
    return find_dtype(dtype)


def _backend(attention: str, dtype: torch.dtype, place: torch.device) -> tuple[str, str]:
    """The attention backend, and what is to be said if it is not the one that should serve here."""
    backend = choose(attention, dtype, place)
    tried = backend == "native" or (place.type == "cuda" and backend != "sdpa")
    reason = fails(backend, dtype, place) if tried else None
    if reason is None:
        return backend, ""
    if attention != "auto":
        raise InputError(reason, "--attention")
    return "sdpa", reason


def _compiled(target: Target, note: str) -> str:
    """Compile the layers where that helps, and say what came of it.

    Fusing pays where passes are replayed, on CUDA. On the CPU compiled layers were slower than eager ones: 5.0 ms
    instead of 4.4 for a pass of the bundled model over 8 nodes.
    """
    if target.split:
        return f"{EAGER}, as ranks hold them together"
    if not (target.replays and target.device.type == "cuda"):
        note = note or (f"they have {target.special}" if target.special and target.device.type == "cuda" else "")
        return f"{EAGER}, as {note}" if note else EAGER
    reason = target.compile()
    target.prepare(FullKV(target.kv_shape, 1), 1)  # shows whether graphs can be captured
    words = "compiled" if reason is None else f"{EAGER}, as they could not be compiled: {reason}"
    return words if target.graphs is None else f"{words}; no CUDA graphs: {target.graphs}"


def _adapted(network: Any, model: str, backend: str) -> Target:
    """The model with our attention, once both have been seen to give the same logits.

    Whatever an architecture does that ours does not know of shows here.
    """
    config = network.config.get_text_config()
    count = min(_TRIED, config.max_position_embeddings)
    ids = (torch.arange(count, device=network.device) * 7919 + 13) % config.vocab_size
    network.set_attn_implementation("eager")  # the one that does all a model asks for; sdpa passes over soft caps
    with torch.inference_mode():
        wanted = network(ids.unsqueeze(0), use_cache=False).logits[0].double()
    quicken(network)
    try:
        target = Target(network, BACKENDS[backend]())
        if not (wanted.amax(-1) < torch.inf).all():
            raise _not_finite(target, model, ids.tolist())
        ours = _tried(target, ids)
    except Unserved as error:
        reason = f"{model} ({network.config.model_type}) has {error}, which tswift cannot serve exactly yet"
        raise InputError(reason, "--model") from None
    apart = (target.logits(ours).double() - wanted).abs().max().item()
    # random weights in 16 bits round worse than trained ones: 0.15 was seen, with the same architecture on both sides
    allowed = 1e-3 if target.dtype.itemsize >= 4 else 0.5 if model.startswith(PREFIX) else 0.25
    if not apart <= allowed * max(wanted.std().item(), 1e-6):
        raise InputError(f"{model} ({network.config.model_type}) is not served exactly: logits differ", "--model")
    return target


def _not_finite(target: Target, model: str, ids: list[int]) -> InputError:
    found = target.first_broken(ids, FullKV(target.kv_shape, len(ids)))
    where = f"; the first output that is not finite is that of {found[0]}" if found else ""
    reason = f"its weights are broken, or {str(target.dtype).removeprefix('torch.')} is too narrow for it"
    return InputError(f"{model} gives logits that are NaN or infinite{where}: {reason}", "--model")


def _tried(target: Target, ids: torch.Tensor) -> torch.Tensor:
    """``[n, H]`` hidden states of a text: of a chunk first, then of a tree in which wrong tokens stand beside it."""
    kv, half = FullKV(target.kv_shape, 2 * len(ids)), len(ids) // 2
    before = [chunk.hidden for chunk in target.chunks(ids[:half].tolist(), kv)]
    nodes = torch.arange(2 * (len(ids) - half), device=ids.device)
    right = nodes % 2 == 0  # the text; an odd node stands beside the next one
    tokens = torch.where(right, ids[half + nodes // 2], ids[nodes // 4])
    ancestors = (nodes <= nodes[:, None]) & right | (nodes == nodes[:, None])
    hidden = target.forward(tokens, half + (nodes + 1) // 2, kv, ancestors).hidden
    return torch.cat([*before, hidden[right]])


def _eos_ids(model: str, network: Any, tokenizer: Any, vocab_size: int) -> tuple[int, ...]:
    found: list[Any] = []
    for holder in (network.generation_config, network.config, tokenizer):
        ids = getattr(holder, "eos_token_id", None)
        found += ids if isinstance(ids, list | tuple) else () if ids is None else (ids,)
    for token in found:
        if not isinstance(token, int) or not 0 <= token < vocab_size:
            message = f"{model} has eos_token_id {token!r:.40}, which is no id of its vocabulary of {vocab_size:,}"
            raise InputError(message, "--model")
    return tuple(sorted(set(found)))


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
