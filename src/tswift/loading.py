"""Load a causal language model with what drafts for it; or tell its sizes without loading it."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import snapshot_download
from transformers import (
    GenerationConfig,
    PreTrainedModel,
)
from transformers.distributed import DistributedConfig
from transformers.utils import CONFIG_NAME, cached_file

from tswift.attention.backends import BACKENDS, choose, why_not
from tswift.caches import KVShape
from tswift.distributed import ALONE, RANKS, Dist, guard
from tswift.errors import (
    InputError,
    NoFault,
    SlowWarning,
    cause_of,
    renaming,
    suggesting_names,
)
from tswift.forward.adapting import (
    Inexact,
    choose_fixed_rows,
    execution_note,
    fingerprint,
    measured_pass,
    select_backend,
    try_graphs,
    warn_of_fallbacks,
    wrap_model,
)
from tswift.forward.cpu.products import HALVES, library, pack
from tswift.forward.cpu.program import may_serve
from tswift.forward.cuda.draft_weights import (
    cheaper_copy,
    copy_bytes,
    refuse_draft_weights,
    refuse_nonsense,
)
from tswift.forward.packing import (
    gguf_bytes,
    load_floats,
    load_gguf,
    load_rounded,
    missing_names,
    random_rounded,
    rounded_bytes,
)
from tswift.forward.remembered import NO_CHECKS, Checks
from tswift.forward.target import Target
from tswift.machine import available_bytes, return_free_memory
from tswift.models.architecture import (
    attention_layers,
    by_layer,
    class_of,
    has_mtp_head,
    heads_of,
    is_moe,
    is_recurrent,
    max_positions,
    own_quantization,
    refuse_unsupported,
    skeleton,
    state_shape,
    with_yarn,
)
from tswift.models.checkpoint import (
    INDEX,
    StoredTensor,
    as_input_error,
    eos_ids,
    find_source,
    gguf_of,
    has_tokenizer,
    hub,
    read_config,
    read_tokenizer,
    refuse_misfit,
    silence,
    stored_tensors,
    tokenizer_hash,
    weights_hash,
)
from tswift.models.config import (
    DEMO,
    FP8,
    IF_QUICKER,
    SHAPE_PREFIX,
    UNQUANTISED,
    ModelConfig,
    refuse_shape,
)
from tswift.models.devices import device_for, dtype_for, dtype_name, dtype_note, kv_dtype_for
from tswift.models.shapes import StandInTokenizer, random_weights
from tswift.native_build import Unbuilt
from tswift.speculators.formats import NATIVE, SpeculatorFile, drafter_of, native_head
from tswift.speculators.heads import Heads
from tswift.speculators.heads_files import (
    ON_HUB,
    heads_and_weights,
    heads_of_source,
    heads_source,
    installed,
)
from tswift.speculators.networks import weights_of
from tswift.speculators.spec import SpeculatorSpec
from tswift.stages import tell

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase


@dataclass(frozen=True, repr=False)
class LoadedModel:
    """A model ready to decode."""

    name: str  # as the user named it
    # a stand-in where the weights are random, None for a draft model without one
    tokenizer: PreTrainedTokenizerBase
    target: Target  # the model, wrapped
    heads: Heads | None  # that draft for it, if it has any
    eos_ids: tuple[int, ...]  # token ids that end a text
    # the heads' file, where nobody named it: installed for the model
    heads_found: Path | None = None
    attention: str = "sdpa"  # the backend in use
    simulated: bool = False  # its weights are random: times mean something, texts do not
    # hash of the bits that passes of a fixed width have here; None without a fixed width
    exact: str | None = None
    # how its weights were quantised; plain decoding is this model's own
    quantization: str | None = None
    ranks: Dist = ALONE  # those that hold it together
    # hash of all weights, where that took all ranks; None where it can be had at any time
    weights: str | None = None
    # a smaller model that drafts for it; every rank holds the whole of it
    draft: Target | None = None
    draft_name: str | None = None  # as the user named that
    # a copy with weights of fewer bits, for drafting passes; None for ``target`` itself
    drafting: Target | None = None
    # the published drafter at ``target.speculator``, as the user named it
    drafter_name: str | None = None
    draft_weights: str | None = None  # its kind: ``fp8``
    yarn: float | None = None  # how many times the positions of the checkpoint it serves
    dtype_note: str = ""  # that the dtype is not the checkpoint's; empty if it is
    # 16 bits in which a CPU's program reads matrices; all else is float32
    held: torch.dtype | None = None
    # names of those that decode it with what is loaded; empty where nobody has asked the engine
    methods: tuple[str, ...] = ()

    def __repr__(self) -> str:
        device = self.target.device
        dtype = dtype_name(self.held or self.target.dtype)
        heads = "no heads" if self.heads is None else f"{self.heads.count} {self.heads.kind} heads"
        methods = f", decoded by {', '.join(self.methods)}" if self.methods else ""
        return (
            f"<{self.name}: {device}, {dtype}, {self.target.max_positions:,} positions, {heads}"
            f"{methods}>"
        )

    @property
    def layers(self) -> str:
        """``eager``, ``fused`` or ``one C program``, and why not what should be in use,
        by all passes so far.
        """
        return execution_note(self.target)

    def encode(self, text: str, bare: bool = False) -> list[int]:
        """The token ids of a prompt, with a beginning-of-text token if the model wants one."""
        with silence(), as_input_error(self.name, "its tokenizer: "):
            ids = list(
                self.tokenizer(text, **({"add_special_tokens": False} if bare else {}))["input_ids"]
            )
        size = self.target.vocab_size
        if ids and max(ids) >= size:
            reason = (
                f"has token id {max(ids):,} by the tokenizer of {self.name}, the model has {size:,}"
            )
            raise InputError(reason, "prompt")
        return ids

    @cached_property
    def tokenizer_hash(self) -> str:
        """Hash of the tokenizer, which many runs may ask for."""
        return tokenizer_hash(self.tokenizer)

    def about(self) -> dict[str, Any]:
        """What was loaded and how, for records."""
        inexact = self.target.fallbacks.get("exact")
        about: dict[str, Any] = {
            "name": self.name,
            "device": str(self.target.device) if self.ranks.count == 1 else self.target.device.type,
            "dtype": dtype_name(self.held or self.target.dtype),
            "attention": self.attention,
            "layers": self.layers,
            "exact": None
            if self.exact is None
            else {"width": self.target.width, "bits": self.exact},
            **({} if inexact is None else {"inexact": inexact}),
            "heads": None if self.heads is None else f"{self.heads.kind}, {self.heads.count}",
            **({} if self.heads_found is None else {"heads_found": str(self.heads_found)}),
            "eos_ids": list(self.eos_ids),
            "simulated": self.simulated,
            "quantization": self.quantization,
            "ranks": self.ranks.count,
        }
        if self.target.kv_shape.dtype != (self.held or self.target.dtype):
            about["kv_dtype"] = dtype_name(self.target.kv_shape.dtype)
        if self.draft is not None:
            about["draft"] = {"name": self.draft_name}
        if self.target.speculator is not None:
            about["drafter"] = {"name": self.drafter_name, "kind": self.target.speculator.spec.kind}
        if self.drafting is not None:
            about |= {
                "draft_weights": self.draft_weights,
                "draft_layers": execution_note(self.drafting),
            }
        return about

    def remarks(self) -> str:
        """What is out of the ordinary, to be printed after name, device and dtype."""
        kv_dtype = self.about().get("kv_dtype")
        inexact = self.target.fallbacks.get("exact")
        exact = "exact" if self.target.program else f"exact in passes of {self.target.width} rows"
        notes = [
            self.dtype_note,
            "" if self.yarn is None else f"{self.yarn:g} times its positions by YaRN",
            f"KV in {kv_dtype}" if kv_dtype else "",
            "" if self.exact is None else exact,
            f"not exact, as {inexact}" if inexact else "",
            f"weights quantised ({self.quantization})" if self.quantization else "",
            ""
            if self.heads_found is None
            else f"{self.about()['heads']} heads from {self.heads_found}",
            "" if self.drafting is None else f"drafting passes in {self.draft_weights}",
            f"split over {self.ranks.count} ranks" if self.ranks.count > 1 else "",
        ]
        return "".join(f", {note}" for note in notes if note)


@suggesting_names
def load(
    model: str = DEMO,
    *,
    device: str = "auto",
    dtype: str | torch.dtype = "auto",
    kv_dtype: str | torch.dtype = "auto",
    attention: str = "auto",
    heads: str | os.PathLike[str] | None = None,
    weights: str | None = None,
    draft_model: str | None = None,
    drafter: str | None = None,
    draft_weights: str | None = None,
    yarn: float | None = None,
    exact: bool | None = None,
    ranks: Dist = ALONE,
) -> LoadedModel:
    """Load a model for decoding. Arguments are called as the options of the command line.

    Args:
        model: ``demo`` (the bundled model), a folder, or a hub id. Only safetensors weights are
            read, and no code from the checkpoint is run. ``shape:NAME`` is a published model's
            shape with random weights, for timing. Or a GGUF file, a folder with one, or
            ``REPO:FILE.gguf`` of the hub, whose weights stay in 4 or 8 bits.
        device: ``cpu``, ``cuda``, ``cuda:1`` and so on; ``auto`` takes CUDA where there is one.
        dtype: ``float32``, ``float64``, ``bfloat16`` or ``float16``, as ``bf16`` or
            ``torch.bfloat16`` too; ``auto`` is float32 on the CPU, the checkpoint's own on CUDA,
            and bfloat16 for a shape.
        kv_dtype: of the KV cache, which all methods read: a narrower one than the model's, on a
            CPU. ``auto`` is the model's own, and int16 where a C program makes the passes of a
            model in float32; ``int8`` is coarser.
        attention: ``triton`` (CUDA; bfloat16, float16), ``flash`` (CUDA with flash-attn
            installed; bfloat16, float16), ``native`` (x86 CPUs where there is a C compiler;
            float32, bfloat16, float16), ``sdpa`` (everything), or ``auto``: triton or native where
            they can serve, sdpa elsewhere. With triton what is between the layers' products has
            kernels, too, and passes are replayed as CUDA graphs.
        heads: a heads file, of ours or one of Medusa's; a folder with one, or with a whole model
            that carries heads; or a kind (``chained``, ``conditioned``): that is
            ``heads-KIND.safetensors`` in the model's folder. None takes ``heads.safetensors``
            there, if it exists, or the heads that the model carries, or those that were installed
            for its weights; ``none`` takes none. A shape has random heads of either kind, chained
            if nothing is said.
        weights: ``int8`` or ``int4``: round the weights of linear layers and embeddings to
            integers, on a CPU. What is decoded is the rounded model. None leaves them as they are
            in the checkpoint.
        draft_model: a smaller model with the same vocabulary, to draft for it: ``demo-draft`` (the
            bundled one), a folder or a hub id. It comes to the model's device, in its dtype, with
            the same attention.
        drafter: a published drafter of the model, DSpark, DFlash or EAGLE-3: a folder or a hub id;
            for a shape a kind (``dspark``, ``dflash``, ``eagle3``) with random weights.
        draft_weights: ``fp8``, on CUDA in bfloat16: let drafting passes of the model run on a copy
            of it whose linear layers have weights of 8 bits, all but the LM head, and which shares
            all else. What is decoded is the model as it is. ``auto``: if there is room for it and
            its passes are quicker. ``none`` is what None is.
        yarn: how many times the positions that the model was made for it is to serve, by YaRN,
            which turns its rotary embeddings more slowly; above 1. None leaves them as they are.
            What is decoded is that model.
        exact: let a token's bits not depend on how it was forwarded, so that all methods give the
            same tokens in every dtype. None does so in 16 bits, on CUDA, and where whole passes are
            one C program, if the model bears it; ``fallbacks`` of ``LoadedModel.target`` says why
            it does not.
        ranks: from ``tswift.distributed.join``, to hold the model together with other
            processes. All of them have to call this; what rank 0 asks for counts.

    Raises:
        InputError: something named here does not exist, is broken, or cannot be served exactly.
        Gone: another rank has died.
    """
    config = ModelConfig(
        model=_plain(model),
        device=device,
        dtype=_plain(dtype),
        kv_dtype=_plain(kv_dtype),
        attention=attention,
        heads=_plain(heads),
        weights=weights,
        draft_model=_plain(draft_model),
        drafter=_plain(drafter),
        draft_weights=draft_weights,
        yarn=yarn,
        exact=exact,
    )
    return load_model(config, ranks)


def _plain(value: Any) -> Any:
    """An option as the command line has it, of what may be a path or a dtype."""
    if isinstance(value, torch.dtype):
        return dtype_name(value)
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def load_model(config: ModelConfig, ranks: Dist = ALONE) -> LoadedModel:
    """Load a model for decoding; errors and ``ranks`` are as for :func:`load`."""
    with guard():
        plan = _plan(ranks.share(config), ranks)
        asked = plan.asked
        simulated = plan.simulated
        slow = _slowness(plan)
        if slow is not None:  # loading takes longer without it, too
            warnings.warn(slow, SlowWarning, stacklevel=2)
        loaded, note, checks = _open(plan, ranks)
        target = loaded.target
        source = plan.heads
        drafter = plan.drafter
        if drafter is not None and drafter.layout == NATIVE and not (drafter.tensors or simulated):
            drafter = native_head(_snapshot(asked.model), plan.config)
        if drafter is not None:  # before anything is prepared: passes have to give its taps
            drafter.load(target, simulated)
        if source == ON_HUB:
            source = Path(_snapshot(asked.model))
        loaded = replace(
            loaded,
            heads=heads_of_source(source, target, simulated),
            heads_found=plan.heads_found,
            eos_ids=eos_ids(asked.model, target.model, loaded.tokenizer, target.vocab_size),
            drafter_name=asked.drafter or (None if drafter is None else asked.model),
            yarn=asked.yarn,
            weights=weights_hash(target.model) if ranks.count > 1 else None,
            exact=_prepare(target, loaded.attention, note, asked.exact, checks),
        )
        if asked.draft_weights is not None:
            loaded = _with_copy(loaded, asked.draft_weights, plan.if_quicker)
        if asked.draft_model is not None:
            draft = _load_draft(asked.draft_model, loaded, asked.attention)
            loaded = replace(loaded, draft=draft, draft_name=asked.draft_model)
        for each, name in (
            (target, "decoding"),
            (loaded.draft, "drafting by the draft model"),
            (loaded.drafting, f"drafting in {loaded.draft_weights}"),
        ):
            if each is not None:
                warn_of_fallbacks(each, name)
        if plan.coded or plan.packed:
            return_free_memory()  # what was needed to make codes is more than they take
        return loaded


# of the free memory, that a copy that nobody asked for and the longest text take at most
_MEMORY_SHARE = 0.9
_TIME_SHARE = 0.9  # of the time of the model's own passes, that those of such a copy may take


def _snapshot(model: str) -> str:
    """The folder where the files of a hub id were put."""
    with hub(), as_input_error(model):
        return str(Path(cached_file(model, CONFIG_NAME)).parent)


@dataclass(frozen=True)
class _LoadPlan:
    """What is to be loaded, as far as it is known before any weights are read;
    what cannot be had has been refused.
    """

    asked: ModelConfig
    device: torch.device
    config: PreTrainedConfig
    dtype: torch.dtype
    kv_dtype: torch.dtype
    drafter: SpeculatorFile | None = None
    heads: Path | str | None = None  # as heads_source() returns it
    held: torch.dtype | None = None  # as of LoadedModel; ``dtype`` is float32 then
    # whether matrices are held as a C program reads them, and not as PyTorch does
    packed: bool = False
    # whether the copy for drafting passes is to be made only where it has room and is quicker
    if_quicker: bool = False

    @property
    def coded(self) -> str:
        """What kind of codes the matrices will be; empty for floats."""
        if self.asked.weights is not None:
            return self.asked.weights
        file = gguf_of(self.asked.model)
        return "" if file is None else file.kinds

    @property
    def heads_found(self) -> Path | None:
        """The file of heads that nobody named."""
        source = self.heads
        if self.asked.heads is not None or not isinstance(source, Path):
            return None
        return source if installed(source) else None

    def refuse_unfit(self, ranks: Dist = ALONE) -> None:
        """Refuse what cannot be had with ranks, with codes, or with recurrent layers.

        Raises:
            InputError: it names the option.
        """
        asked = self.asked
        coded = self.coded
        split = ranks.count > 1
        recurrent = is_recurrent(self.config)
        reduced = asked.draft_weights is not None
        own = own_quantization(self.config)
        kind = own or ("GGUF" if gguf_of(asked.model) is not None else "")
        integers = "weights" if asked.weights is not None else "model"
        many = f"{asked.model} has recurrent layers, which cannot be"
        for wrong, option, reason in (
            (
                split and reduced,
                "draft_weights",
                "quantised weights cannot be split over ranks yet",
            ),
            (split and own, RANKS, "quantised weights cannot be split over ranks yet"),
            (split and coded, RANKS, "weights that are codes cannot be split over ranks"),
            (split and recurrent, RANKS, f"{many} split over ranks yet"),
            (
                split and asked.drafter,
                "drafter",
                "ranks that hold the model together cannot serve one yet",
            ),
            (
                split and self.simulated,
                "model",
                f"{asked.model} has random weights, which are not split",
            ),
            (reduced and recurrent, "draft_weights", f"{many} copied in fewer bits yet"),
            (
                asked.weights is not None and kind,
                "weights",
                f"is for checkpoints in safetensors with plain weights; {asked.model} is {kind}",
            ),
            (
                coded and self.device.type != "cpu",
                integers,
                f"integers are multiplied on a CPU only; the device is {self.device.type}",
            ),
            (
                coded and self.dtype != torch.float32,
                "dtype",
                f"is float32 with weights of integers ({coded}); got {dtype_name(self.dtype)}",
            ),
            (
                coded and reduced,
                "draft_weights",
                f"the model's weights are integers already ({coded})",
            ),
        ):
            if wrong:
                raise InputError(reason, option)

    @property
    def simulated(self) -> bool:
        """Whether the weights are random."""
        return self.asked.model.startswith(SHAPE_PREFIX)

    def cached(self, backend: str) -> torch.dtype | None:
        """Dtype of the KV cache; None for the model's own,
        as stock operators would convert another in every pass.
        """
        own = backend != "native" or self.kv_dtype == self.dtype
        return None if self.asked.kv_dtype == "auto" and own else self.kv_dtype


def _plan(asked: ModelConfig, ranks: Dist = ALONE) -> _LoadPlan:
    if asked.draft_weights == UNQUANTISED:
        asked = replace(asked, draft_weights=None)
    if asked.draft_weights == IF_QUICKER:
        try:
            return replace(_plan(replace(asked, draft_weights=FP8), ranks), if_quicker=True)
        except InputError as error:
            if error.field != "draft_weights":
                raise
            return _plan(replace(asked, draft_weights=None), ranks)
    device = device_for(asked.device, ranks)
    config = read_config(asked.model)
    simulated = asked.model.startswith(SHAPE_PREFIX)
    if asked.yarn is not None:
        config = with_yarn(config, asked.yarn)
    dtype = dtype_for(asked.dtype, device, config, simulated)
    if asked.weights is not None and asked.dtype == "auto":
        dtype = torch.float32
    on_cpu = device.type == "cpu"
    serves = on_cpu and may_serve(config)
    held = None
    packed = False
    if on_cpu and ranks.count == 1 and _packs(asked, config):
        held = dtype if serves and dtype in HALVES else None
        dtype = torch.float32 if held else dtype
        # what learns through a model, whose rows need not be exact, needs its weights as PyTorch
        # has them
        packed = held is not None or (dtype == torch.float32 and asked.exact is not False)
    kv_dtype = kv_dtype_for(asked.kv_dtype, dtype, device, serves)
    _LoadPlan(asked, device, config, dtype, kv_dtype).refuse_unfit(ranks)
    if asked.draft_weights is not None:  # what cannot be quantised is refused before it is loaded
        refuse_draft_weights(config, device, dtype)
    drafter = None
    if ranks.count == 1 and has_mtp_head(config):
        drafter = native_head(asked.model, config)
    if asked.drafter is not None:
        drafter = drafter_of(asked.drafter, config, simulated)
    source = heads_source(asked.model, config, asked.heads)
    return _LoadPlan(asked, device, config, dtype, kv_dtype, drafter, source, held, packed)


def _packs(asked: ModelConfig, config: PreTrainedConfig) -> bool:
    """Whether C products can hold a model's matrices here: they are plain numbers."""
    file = gguf_of(asked.model)
    coded = (
        asked.weights is not None
        or own_quantization(config) is not None
        or (file is not None and file.kinds)
    )
    if coded or asked.attention not in ("auto", "native"):
        return False
    if why_not("native", torch.float32, torch.device("cpu"), heads_of(config)[2]) is not None:
        return False
    with suppress(Unbuilt):
        library()
        return True
    return False


def _draft_plan(name: str, target: Target | ModelSpec, attention: str) -> _LoadPlan:
    """Of a smaller model, which comes as its target does; its own heads, if it has any,
    are not read.
    """
    asked = ModelConfig(model=name, dtype=dtype_name(target.dtype), attention=attention)
    plan = _LoadPlan(asked, target.device, read_config(name), target.dtype, target.dtype)
    plan.refuse_unfit()
    if is_recurrent(plan.config):
        raise InputError(
            f"{name} has recurrent layers, and what they have seen cannot be taken back",
            "draft_model",
        )
    return plan


def _prepare(
    target: Target, attention: str, note: str, exact: bool | None, checks: Checks
) -> str | None:
    """Try a model's replayed and exact passes, or recall what came of it;
    returns the hash of their bits, None if they are not exact.
    """
    target.fallbacks.note("attention", note)
    target.fallbacks.note("exact", choose_fixed_rows(target, attention, exact))
    try_graphs(target)
    bits = None
    if target.width is not None:
        try:
            made = "PyTorch" if target.program is None else "a C program"
            what = f"bits of {target.width} rows by {made}, wide prompts {target.chunked_prompt}"
            bits = checks.found(what)
            if bits is None:
                tell("checking that its passes have the same bits")
                bits = fingerprint(target)
                checks.keep(what, bits)
        except Inexact as error:
            target.set_fixed_rows(None)
            target.fallbacks.note("exact", str(error))
    if exact and "exact" in target.fallbacks:
        raise InputError(f"cannot be had here: {target.fallbacks['exact']}", "exact")
    return bits


def _slowness(plan: _LoadPlan) -> str | None:
    """Why there is no C program here, where that would make the model's passes."""
    serves = plan.asked.attention in ("auto", "native") and plan.dtype.itemsize <= 4
    if plan.device.type != "cpu" or not (plan.coded or (serves and may_serve(plan.config))):
        return None
    try:
        library()
    except Unbuilt as error:
        cost = "hundreds of times" if plan.coded else "several times"
        return (
            f"the C program that computes {plan.asked.model} {error}; without it every token takes "
            f"{cost} as long"
        )
    return None


def _with_copy(loaded: LoadedModel, kind: str, if_quicker: bool) -> LoadedModel:
    """A loaded model with a copy of fewer bits for its drafting passes."""
    target = loaded.target
    if if_quicker:
        longest = target.max_positions * target.kv_shape.bytes_per_token
        if copy_bytes(target.model) + longest > _MEMORY_SHARE * (
            available_bytes(target.device) or 0
        ):
            return loaded
    try:
        with silence():
            drafting = Target(cheaper_copy(target.model), BACKENDS[loaded.attention](), target)
        if loaded.heads is not None and loaded.heads.pre_norm:
            drafting.tap()
        try_graphs(drafting)
        seconds, hidden = measured_pass(drafting)
        usual, expected = measured_pass(target)
        refuse_nonsense(hidden, expected)
    except Exception as error:  # compilers, drivers and libraries have many ways to fail
        if not if_quicker:
            raise
        target.fallbacks.note("draft weights", NoFault(cause_of(error)))
        return loaded
    if if_quicker and seconds > _TIME_SHARE * usual:
        return loaded
    return replace(loaded, drafting=drafting, draft_weights=kind)


@renaming(model="draft_model")
def _load_draft(name: str, loaded: LoadedModel, attention: str) -> Target:
    """The smaller model that drafts for a loaded one."""
    target = loaded.target
    if not loaded.simulated:
        refuse_shape(name)
    draft, note, _ = _open(_draft_plan(name, target, attention), tokenizer_optional=True)
    draft.target.fallbacks.note("attention", note)
    try_graphs(draft.target)
    _refuse_other_size(name, draft.target.vocab_size, loaded.name, target.vocab_size)
    if not (draft.tokenizer is None or draft.simulated or loaded.simulated):
        _refuse_other_tokens(
            name, draft.tokenizer.get_vocab(), loaded.name, loaded.tokenizer.get_vocab()
        )
    return draft.target


def _refuse_other_size(name: str, size: int, model: str, model_size: int) -> None:
    """Refuse a draft model with another number of tokens than its target."""
    if size != model_size:
        raise InputError(
            f"{name} has a vocabulary of {size:,}, {model} has {model_size:,}", "draft_model"
        )


def _refuse_other_tokens(
    name: str, ours: dict[str, int], model: str, theirs: dict[str, int]
) -> None:
    """Refuse a draft model with a token id that means something else than in its target."""
    if ours != theirs:
        token = min({*ours.items()} ^ {*theirs.items()}, key=lambda pair: (pair[1], pair[0]))[0]
        there, here = (f"id {ids[token]:,}" if token in ids else "no id" for ids in (ours, theirs))
        reason = (
            f"has another vocabulary than {model}: {token!r:.40} has {there} there, {here} here"
        )
        raise InputError(f"{name} {reason}", "draft_model")


def _open(
    plan: _LoadPlan, ranks: Dist = ALONE, tokenizer_optional: bool = False
) -> tuple[LoadedModel, str, Checks]:
    """Read a checkpoint's weights and tokenizer, or make a shape's random ones.

    The note says why the attention in use is another one than one that should be.
    """
    asked = plan.asked
    model = asked.model
    config = plan.config
    source, folder = (model, None) if plan.simulated else find_source(model)
    on_hub = folder is None and not plan.simulated
    quantization = plan.coded or (None if plan.simulated else own_quantization(config))
    options = dict[str, object]()
    tokenizer = None
    other_dtype = ""
    with silence(), hub(on_hub), as_input_error(model):
        if folder is not None and gguf_of(model) is None:
            refuse_misfit(config, stored_tensors(folder), model)
        if ranks.count > 1:
            options["distributed_config"] = _split(config, model, ranks)
        if quantization and plan.device.type == "cuda":
            # quantised on the way: the whole weights need not fit
            options["device_map"] = plan.device
        # may compile a kernel: after all refusals
        backend, note = select_backend(asked.attention, plan.dtype, plan.device, config)
        if plan.simulated:
            tokenizer = StandInTokenizer()
            network = _random_network(plan)
        else:
            if folder is None or not tokenizer_optional or gguf_of(model) or has_tokenizer(folder):
                tokenizer = read_tokenizer(source, model)
            # from_pretrained may overwrite the configuration's
            other_dtype = dtype_note(config, plan.held or plan.dtype)
            tell(f"reading {model}")
            network = _stored_network(plan, source, folder, options)
        network = network if options else network.to(plan.device)
        kv_dtype, usual = plan.cached(backend), asked.kv_dtype == "auto"
        kept = plan.device.type == "cpu" and ranks.count == 1 and not plan.simulated
        checks = Checks(network if kept else None, backend, plan.dtype, kv_dtype, usual)
        target = wrap_model(network, model, backend, kv_dtype=kv_dtype, usual=usual, checks=checks)
    loaded = LoadedModel(
        model,
        tokenizer,
        target,
        None,
        (),
        attention=backend,
        simulated=plan.simulated,
        quantization=quantization or None,
        ranks=ranks,
        dtype_note=other_dtype,
        held=plan.held,
    )
    return loaded, note, checks


def _random_network(plan: _LoadPlan) -> PreTrainedModel:
    """A model of a shape with random weights."""
    asked = plan.asked
    if asked.weights is not None:
        return random_rounded(plan.config, asked.weights, asked.model)
    network = random_weights(plan.config, plan.held or plan.dtype, plan.device, asked.model)
    if plan.packed:
        pack(network)
    return network


def _stored_network(
    plan: _LoadPlan, source: str, folder: Path | None, options: dict[str, object]
) -> PreTrainedModel:
    """The model of a checkpoint; ``options`` are more of transformers' own."""
    file = gguf_of(plan.asked.model)
    if file is not None:
        network = load_gguf(file, plan.config, plan.held or plan.dtype)
        network.generation_config.update(**file.sampling())
    elif plan.asked.weights is not None or plan.packed:
        files = folder or Path(snapshot_download(source, allow_patterns=["*.safetensors", INDEX]))
        network = _packed_network(plan, stored_tensors(files), source)
    else:
        network = _from_safetensors(plan, source, options)
    if network.dtype == torch.float64 and is_moe(plan.config):
        network.set_experts_implementation("eager")  # the others multiply no float64
    return network


def _packed_network(
    plan: _LoadPlan, stored: Mapping[str, StoredTensor], source: str
) -> PreTrainedModel:
    """The model of a checkpoint whose matrices are packed, as codes or as floats."""
    asked = plan.asked
    config = plan.config
    if asked.weights is not None:
        network = load_rounded(
            *(config, stored, asked.weights, asked.model),
            lambda: _from_safetensors(plan, source, {}),
        )
    elif missing_names(config, stored):  # transformers knows other names for some
        network = _from_safetensors(plan, source, {})
        pack(network)
    else:
        network = load_floats(config, stored, plan.held or torch.float32, asked.model)
    with suppress(OSError):  # a checkpoint need not have one
        network.generation_config = GenerationConfig.from_pretrained(source)
    return network


def _from_safetensors(plan: _LoadPlan, source: str, options: dict[str, object]) -> PreTrainedModel:
    """The model that transformers reads; ``options`` are more of its own."""
    asked = plan.asked
    config = plan.config
    model = plan.asked.model
    network, info = class_of(config).from_pretrained(
        source,
        config=config,
        # a configuration need not state the dtype: the weights do
        dtype="auto"
        if asked.dtype == "auto" and plan.device.type == "cuda"
        else plan.held or plan.dtype,
        use_safetensors=True,
        output_loading_info=True,
        **options,
    )
    if getattr(config, "quantization_config", None) and not getattr(network, "hf_quantizer", None):
        raise InputError(
            f"{model} is quantised in a way that transformers does not know here", "model"
        )
    # transformers would fill what the file lacks with random numbers and only warn
    missing = sorted({*info["missing_keys"], *(str(key) for key in info["mismatched_keys"])})
    if missing:
        raise InputError(
            f"{model} lacks weights for {len(missing)} tensors, such as {missing[0]}", "model"
        )
    return network


def _split(config: PreTrainedConfig, model: str, ranks: Dist) -> DistributedConfig:
    """How every rank reads its part, by transformers' own plan."""
    if find_spec("accelerate") is None:
        raise InputError(
            "to split a model, transformers needs accelerate: pip install 'tswift[ranks]'", RANKS
        )
    if ranks.device is not None and ranks.device.type == "cpu" and torch.cuda.device_count():
        raise InputError(
            "transformers splits over the GPUs that it sees; CUDA_VISIBLE_DEVICES= hides them",
            "device",
        )
    rules = skeleton(config).tp_plan or {}
    if not any("*" in name for name in rules):  # it may have one for the LM head alone
        raise InputError(
            f"transformers has no plan to split {model} ({config.model_type}) over ranks", "model"
        )
    text = config.get_text_config()
    # some plans leave attention whole: every rank has all heads then
    if any(
        name.endswith(("k_proj", "qkv_proj", "query_key_value")) and rules[name] == "colwise"
        for name in rules
    ):
        queries = text.num_attention_heads
        for name, heads in (
            ("KV", getattr(text, "num_key_value_heads", None) or queries),
            ("query", queries),
        ):
            if heads % ranks.count:
                counted = f"{heads} {name} head{'s' if heads > 1 else ''}"
                raise InputError(
                    f"{model} has {counted}, which {ranks.count} ranks cannot share evenly", RANKS
                )
    return DistributedConfig(tp_size=ranks.count)


def adopt(network: PreTrainedModel) -> LoadedModel:
    """A model that transformers has loaded, ready to decode, with the heads in its folder;
    its modules are changed.

    Raises:
        InputError: it cannot be served exactly.
    """
    name = str(network.config._name_or_path or type(network).__name__)
    heads = None
    refuse_unsupported(network.config.get_text_config(), name)
    backend, note = select_backend("auto", network.dtype, network.device, network.config)
    with silence(), as_input_error(name):
        target = wrap_model(network, name, backend)
    with suppress(InputError):  # heads of what the model once was
        source = heads_source(name, network.config, None) if Path(name).is_dir() else None
        heads = heads_of_source(source, target)
    return LoadedModel(
        name,
        None,
        target,
        heads,
        (),
        attention=backend,
        exact=_prepare(target, backend, note, None, NO_CHECKS),
    )


@dataclass(frozen=True)
class ModelSpec:
    """The sizes of a model that is not loaded, by the names that ``Target`` has for them."""

    name: str  # as the user named it
    device: torch.device  # where it will be
    dtype: torch.dtype  # of its weights
    max_positions: int  # most tokens, prompt included
    vocab_size: int  # number of logits
    # of its keys and values, at least: one KV head where the configuration does not say
    kv_shape: KVShape
    groups: int  # query heads per KV head; 1 where the configuration does not say
    # maximum nodes of a draft tree; None where there is no limit, or it is not known yet
    most_nodes: int | None
    heads: int | None  # tokens that its heads draft in a row; None where it is not known yet
    loaded: Mapping[str, int]  # bytes by what is to be loaded; 0 where it is not known
    speculator_spec: SpeculatorSpec | None  # of its published drafter; None for none


def inspect_model(config: ModelConfig) -> ModelSpec:
    """The sizes of what :func:`load_model` would load: from its configuration, and the headers of
    heads and drafter.
    """
    return _sizes(_plan(config))


@renaming(model="draft_model")
def inspect_draft_model(draft: str, target: ModelSpec, attention: str = "auto") -> ModelSpec:
    """The sizes of the draft model that :func:`load` would load for a target."""
    spec = _sizes(_draft_plan(draft, target, attention))
    _refuse_other_size(draft, spec.vocab_size, target.name, target.vocab_size)
    return spec


def _sizes(plan: _LoadPlan) -> ModelSpec:
    asked = plan.asked
    config = plan.config
    dtype = plan.dtype
    text = config.get_text_config()
    kv_heads, groups, size = heads_of(config)
    states = state_shape(config, dtype, plan.device)
    most_nodes = None
    if asked.attention != "auto":  # what that chooses may give way to another
        backend = BACKENDS[choose(asked.attention, dtype, plan.device, size)]()
        most_nodes = backend.MAX_NODES
    heads, head_weights = heads_and_weights(plan.heads, config)
    drafter = None if plan.drafter is None else plan.drafter.spec
    with silence(), as_input_error(asked.model):
        loaded = {
            "weights": _weight_bytes(plan),
            "heads": head_weights * dtype.itemsize,
            "draft weights": 0
            if asked.draft_weights is None or plan.if_quicker
            else copy_bytes(skeleton(config)),
        }
    if drafter is not None:
        loaded["drafter"] = sum(weights_of(drafter).values()) * dtype.itemsize
    return ModelSpec(
        asked.model,
        plan.device,
        dtype,
        max_positions(config),
        text.vocab_size,
        KVShape(
            len(attention_layers(config)),
            kv_heads,
            size,
            plan.kv_dtype,
            plan.device,
            states=states,
            by_layer=by_layer(config),
        ),
        groups,
        most_nodes=most_nodes,
        heads=heads,
        loaded=loaded,
        speculator_spec=drafter,
    )


def _weight_bytes(plan: _LoadPlan) -> int:
    """Bytes of a model's weights in memory; 0 for those of a quantised checkpoint."""
    file = gguf_of(plan.asked.model)
    if plan.asked.weights is not None:
        return rounded_bytes(plan.config, plan.asked.weights)
    if file is not None and plan.coded:
        return gguf_bytes(file)
    if own_quantization(plan.config) is not None:
        return 0
    weights = sum(weight.numel() for weight in skeleton(plan.config).parameters())
    return weights * (plan.held or plan.dtype).itemsize
