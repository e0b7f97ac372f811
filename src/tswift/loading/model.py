"""Load a causal language model with what drafts for it."""

from __future__ import annotations

import os
import re
import warnings
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel

from tswift.errors import (
    InputError,
    NoFault,
    SlowWarning,
    check_text,
    notice,
    renaming,
    suggesting_names,
)
from tswift.forward.adapting import select_backend, try_graphs, wrap_model
from tswift.forward.cpu.products import library, multiplies_integers
from tswift.forward.cuda import coded
from tswift.forward.exact_passes import Inexact, choose_fixed_rows, fingerprint
from tswift.forward.notes import execution_note, warn_of_fallbacks
from tswift.forward.target import Target
from tswift.loading.network import read_network
from tswift.loading.plan import ModelPlan, plan_model
from tswift.machine import return_free_memory
from tswift.models.architecture import own_quantization, refuse_unsupported
from tswift.models.checkpoint import (
    Checkpoint,
    as_input_error,
    eos_ids,
    has_tokenizer,
    refuse_misfit,
    silence,
    tokenizer_hash,
)
from tswift.models.codes import holds_codes
from tswift.models.config import DEMO, ModelConfig
from tswift.models.devices import dtype_name, dtype_note
from tswift.models.hashes import config_hash, weights_hash
from tswift.native_build import Unbuilt
from tswift.remembered import NO_CHECKS, Checks
from tswift.speculators.heads import Heads
from tswift.speculators.heads_files import heads_of_source, heads_source
from tswift.stages import tell

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


# what multiplies a model's codes, by ``about``
INTEGERS, FLOATS, KERNELS = "integers", "floats", "kernels"
PRODUCTS = {
    INTEGERS: "a C program's products of integers",
    FLOATS: "PyTorch's products of floats",
    KERNELS: "kernels' products of integers",
}

_MARK = re.compile(r"<\|[^\s<>]+\|>|<\w+_of_turn>")  # in a chat template


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
    weights: str | None = None  # hash of all weights, where it is known already
    draft: Target | None = None  # a smaller model that drafts for it
    draft_name: str | None = None  # as the user named that
    # the published drafter at ``target.speculator``, as the user named it
    drafter_name: str | None = None
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

    @property
    def ends(self) -> str:
        """The tokens that end a text, for people."""
        return " ".join(map(self.tokenizer.decode, self.eos_ids)) or "none"

    def encode(self, text: str, bare: bool = False) -> list[int]:
        """The token ids of a prompt, with a beginning-of-text token if the model wants one and it
        is not ``bare``, as a chat template is that has been filled in.

        A :class:`Notice` tells of a second token of that kind, and of what a template tears apart.
        """
        check_text(text, "prompt")
        with silence(), as_input_error(self.name, "its tokenizer: "):
            ids = list(
                self.tokenizer(text, **({"add_special_tokens": False} if bare else {}))["input_ids"]
            )
        own = self.tokenizer
        if bare:
            known = {None, own.unk_token_id, *ids}
            torn = {
                each for each in _MARK.findall(text) if own.convert_tokens_to_ids(each) not in known
            }
            if torn:
                notice(
                    f"{self.name} has {', '.join(sorted(torn))} as words, and no tokens of a text"
                )
        elif ids[:2] == [getattr(own, "bos_token_id", None)] * 2:
            notice(
                f"the prompt begins with {own.bos_token}, and {self.name} adds another before it"
            )
        size = self.target.vocab_size
        if ids and max(ids) >= size:
            reason = (
                f"has token id {max(ids):,} by the tokenizer of {self.name}, the model has {size:,}"
            )
            raise InputError(reason, "prompt")
        return ids

    @cached_property
    def weights_hash(self) -> str:
        """Hash of all weights, as they are when it is first asked for."""
        return self.weights or weights_hash(self.target.model)

    @cached_property
    def tokenizer_hash(self) -> str:
        """Hash of the tokenizer, which many runs may ask for."""
        return tokenizer_hash(self.tokenizer)

    def about(self) -> dict[str, Any]:
        """What was loaded and how, for records."""
        inexact = self.target.fallbacks.get("exact")
        about: dict[str, Any] = {
            "name": self.name,
            "device": str(self.target.device),
            "dtype": dtype_name(self.held or self.target.dtype),
            "attention": self.attention,
            "layers": self.layers,
            "exact": None
            if self.exact is None
            else {"width": self.target.fixed_rows, "bits": self.exact},
            **({} if inexact is None else {"inexact": inexact}),
            "heads": None if self.heads is None else f"{self.heads.kind}, {self.heads.count}",
            **({} if self.heads_found is None else {"heads_found": str(self.heads_found)}),
            "eos_ids": list(self.eos_ids),
            "simulated": self.simulated,
            "quantization": self.quantization,
        }
        if holds_codes(self.target.model):
            integers = multiplies_integers(self.target.model)
            by_kernels = coded.by_kernels(self.target.device)
            about["products"] = KERNELS if by_kernels else INTEGERS if integers else FLOATS
        if self.target.kv_shape.dtype != (self.held or self.target.dtype):
            about["kv_dtype"] = dtype_name(self.target.kv_shape.dtype)
        if self.draft is not None:
            about["draft"] = {"name": self.draft_name}
        if self.target.speculator is not None:
            about["drafter"] = {"name": self.drafter_name, "kind": self.target.speculator.spec.kind}
        return about

    def remarks(self) -> str:
        """What is out of the ordinary, to be printed after name, device and dtype."""
        kv_dtype = self.about().get("kv_dtype")
        inexact = self.target.fallbacks.get("exact")
        layers = self.target.fallbacks.get("layers")  # a fault has its warning
        exact = (
            "exact"
            if self.target.runner.program
            else f"exact in passes of {self.target.fixed_rows} rows"
        )
        notes = [
            self.dtype_note,
            "" if self.yarn is None else f"{self.yarn:g} times its positions by YaRN",
            f"KV in {kv_dtype}" if kv_dtype else "",
            "" if self.exact is None else exact,
            f"not exact, as {inexact}" if inexact else "",
            f"layers by PyTorch, as {layers}" if isinstance(layers, NoFault) else "",
            f"weights quantised ({self.quantization})" if self.quantization else "",
            ""
            if self.heads_found is None
            else f"{self.about()['heads']} heads from {self.heads_found}",
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
    yarn: float | None = None,
    exact: bool | None = None,
) -> LoadedModel:
    """Load a model for decoding. Arguments are called as the options of the command line.

    Args:
        model: ``demo`` (the bundled model), a folder, or a hub id. Only safetensors weights are
            read, and no code from the checkpoint is run. ``shape:NAME`` is a published model's
            shape with random weights, for timing. Or a GGUF file, a folder with one, or
            ``REPO:FILE.gguf`` or ``REPO:Q4_K_M`` of the hub, whose weights stay in 4 or 8 bits.
        device: ``cpu``, ``cuda``, ``cuda:1`` and so on; ``auto`` takes CUDA where there is one.
        dtype: ``float32``, ``float64``, ``bfloat16`` or ``float16``, as ``bf16`` or
            ``torch.bfloat16`` too; ``auto`` is float32 on the CPU, the checkpoint's own on CUDA,
            and bfloat16 for a shape.
        kv_dtype: of the KV cache, which all methods read: a narrower one than the model's, on a
            CPU; on CUDA ``int8``, with triton. ``auto`` is the model's own, and int16 where a C
            program makes the passes of a model in float32; ``int8`` is coarser.
        attention: ``triton`` (CUDA; bfloat16, float16), ``flash`` (CUDA with flash-attn
            installed; bfloat16, float16), ``native`` (CPUs where there is a C compiler;
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
            integers. What is decoded is the rounded model. None leaves them as they are
            in the checkpoint.
        draft_model: a smaller model with the same vocabulary, to draft for it: ``demo-draft`` (the
            bundled one), a folder or a hub id. It comes to the model's device, in its dtype, with
            the same attention.
        drafter: a published drafter of the model, DSpark, DFlash or EAGLE-3: a folder or a hub id;
            for a shape a kind (``dspark``, ``dflash``, ``eagle3``) with random weights.
        yarn: how many times the positions that the model was made for it is to serve, by YaRN,
            which turns its rotary embeddings more slowly; above 1. None leaves them as they are.
            What is decoded is that model.
        exact: let a token's bits not depend on how it was forwarded, so that all methods give the
            same tokens in every dtype. None does so in 16 bits, on CUDA, and where whole passes are
            one C program, if the model bears it; ``fallbacks`` of ``LoadedModel.target`` says why
            it does not.

    Raises:
        InputError: something named here does not exist, is broken, or cannot be served exactly.
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
        yarn=yarn,
        exact=exact,
    )
    return load_model(config)


def _plain(value: Any) -> Any:
    """An option as the command line has it, of what may be a path or a dtype."""
    if isinstance(value, torch.dtype):
        return dtype_name(value)
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def load_model(wanted: ModelConfig | ModelPlan) -> LoadedModel:
    """Load a model for decoding, as planned or to be planned; errors are as for :func:`load`."""
    plan = (wanted if isinstance(wanted, ModelPlan) else plan_model(wanted)).fetched()
    asked = plan.asked
    simulated = plan.simulated
    slow = _slowness(plan)
    if slow is not None:  # loading takes longer without it, too
        warnings.warn(slow, SlowWarning, stacklevel=2)
    loaded, note, checks = _load_network(plan)
    target = loaded.target
    drafter = plan.drafter
    if drafter is not None:  # before anything is prepared: passes have to give its taps
        drafter.load(target, simulated)
    loaded = replace(
        loaded,
        heads=heads_of_source(plan.heads_source, target, simulated),
        heads_found=plan.heads_found,
        eos_ids=eos_ids(asked.model, target.model, loaded.tokenizer, target.vocab_size),
        drafter_name=asked.drafter or (None if drafter is None else asked.model),
        yarn=asked.yarn,
        exact=_prepare(target, loaded.attention, note, asked.exact, checks),
    )
    if plan.draft is not None:
        # a checkpoint's configuration may state another dtype than its weights have
        kv_dtype = target.dtype if asked.kv_dtype == "auto" else plan.kv_dtype
        same = replace(plan.draft, dtype=target.dtype, kv_dtype=kv_dtype)
        loaded = replace(loaded, draft=_load_draft(same, loaded), draft_name=plan.draft.name)
    warn_of_fallbacks(target)
    if loaded.draft is not None:
        warn_of_fallbacks(loaded.draft, "drafting by the draft model")
    if plan.coded or plan.packed:
        return_free_memory()  # what was needed to make codes is more than they take
    return loaded


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
    if target.fixed_rows is not None:
        try:
            made = "PyTorch" if target.runner.program is None else "a C program"
            what = (
                f"bits of {target.fixed_rows} rows by {made}, wide prompts {target.chunked_prompt}"
            )
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


def _slowness(plan: ModelPlan) -> str | None:
    """Why there is no C program here, where that would make the model's passes."""
    serves = plan.asked.attention in ("auto", "native") and plan.dtype.itemsize <= 4
    if not plan.on_cpu or not (plan.coded or (serves and plan.program_expected)):
        return None
    try:
        library()
    except Unbuilt as error:
        cost = "many" if plan.coded else "several"
        return (
            f"the C program that computes {plan.asked.model} {error}; without it every token takes "
            f"{cost} times as long"
        )
    return None


@renaming(model="draft_model")
def _load_draft(plan: ModelPlan, loaded: LoadedModel) -> Target:
    """The smaller model that drafts for a loaded one."""
    draft, note, _ = _load_network(plan.fetched(), tokenizer_optional=True)
    draft.target.fallbacks.note("attention", note)
    try_graphs(draft.target)
    if not (draft.tokenizer is None or draft.simulated or loaded.simulated):
        _refuse_other_tokens(
            plan.name, draft.tokenizer.get_vocab(), loaded.name, loaded.tokenizer.get_vocab()
        )
    return draft.target


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


def _load_network(
    plan: ModelPlan, tokenizer_optional: bool = False
) -> tuple[LoadedModel, str, Checks]:
    """Read a checkpoint's weights and tokenizer, or make a shape's random ones.

    The note says why the attention in use is another one than one that should be.
    """
    asked = plan.asked
    checkpoint = plan.checkpoint
    model = plan.name
    folder, file = checkpoint.folder, checkpoint.gguf
    tokenizer = None
    other_dtype = ""
    own = own_quantization(plan.config)
    with silence(), as_input_error(model):
        if folder is not None and file is None:
            refuse_misfit(checkpoint.skeleton, checkpoint.tensors, model)
        # may compile a kernel: after all refusals
        backend, note = select_backend(asked.attention, plan.dtype, plan.device, plan.config)
        kv_dtype, usual = plan.kv_dtype_with(backend), asked.kv_dtype == "auto"
        if not tokenizer_optional or folder is None or file or has_tokenizer(folder):
            tokenizer = checkpoint.tokenizer()
        if not plan.simulated:
            if not (file and plan.coded):  # whose codes are in none
                # from_pretrained may overwrite the configuration's
                other_dtype = dtype_note(plan.config, plan.held or plan.dtype)
            tell(f"reading {model}")
        network = read_network(plan)
        kept = plan.on_cpu and not plan.simulated
        products = multiplies_integers(network)
        checks, weights = NO_CHECKS, None
        if kept:
            weights = weights_hash(network)
            about = weights, config_hash(network), backend, plan.dtype, kv_dtype
            checks = Checks(*about, usual, products)
        target = wrap_model(network, model, backend, kv_dtype=kv_dtype, usual=usual, checks=checks)
    for line in file.told.values() if file else ():
        notice(line)
    loaded = LoadedModel(
        model,
        tokenizer,
        target,
        None,
        (),
        attention=backend,
        simulated=plan.simulated,
        quantization=plan.coded or plan.quantization or (own and f"{own}, dequantised"),
        weights=weights,
        dtype_note=other_dtype,
        held=plan.held,
    )
    return loaded, note, checks


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
        source = heads_source(Checkpoint.find(name), None) if Path(name).is_dir() else None
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
