"""``generate`` of transformers, decoded by tswift:
the folder that ``tswift export-generate`` writes calls it.

The model that it is given stays as it is, also while it is decoded: that is a second tree of
modules over its weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from copy import deepcopy
from dataclasses import replace
from threading import Lock
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import (
    DynamicCache,
    GenerationConfig,
    MaxTimeCriteria,
    PreTrainedModel,
    StoppingCriteriaList,
)
from transformers.generation import GenerateDecoderOnlyOutput, StopStringCriteria

from tswift.engine import Generation, Request, begin
from tswift.errors import InputError, Object, renaming
from tswift.loading.model import LoadedModel, adopt
from tswift.sampling.generation_config import NAMES, sampling_params

if TYPE_CHECKING:
    from transformers import BaseStreamer, PreTrainedTokenizerBase

_SAMPLING = (
    "do_sample",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "eta_cutoff",
    "repetition_penalty",
)
_ENDING = (
    "max_length",
    "max_new_tokens",
    "min_new_tokens",
    "max_time",
    "stop_strings",
    "eos_token_id",
)
_NO_MATTER = ("bos_token_id", "pad_token_id", "decoder_start_token_id", "transformers_version")
_SERVED = {*_SAMPLING, *_ENDING, *_NO_MATTER, "suppress_tokens", "return_dict_in_generate"}
_OFF = {"cache_implementation": "dynamic", "guidance_scale": 1}  # as good as None
_CACHES = ("cache", "past_key_values")  # 5.24 renames what is given by the older name
_NAMES = {**NAMES, "prompt": "input_ids", "method": "tswift_method"}


def generate(
    inputs: Tensor | None = None,
    generation_config: GenerationConfig | None = None,
    *,
    model: PreTrainedModel,
    stopping_criteria: Iterable[object] | None = None,
    streamer: BaseStreamer | None = None,
    tokenizer: PreTrainedTokenizerBase = None,
    tswift_method: str = "auto",
    **others: object,
) -> object:
    """Continue a text as ``model.generate`` of transformers does, decoded by tswift.

    Sampling draws from the distribution that transformers draws from, with noise of its own, whose
    seed is taken from torch's generator on the CPU: the same tokens as :func:`tswift.generate` with
    that seed.

    Args:
        inputs: ``[1, n]`` token ids of the prompt; or ``input_ids``; or neither, for a
            beginning-of-text token.
        generation_config: as for ``model.generate``; its fields may be given by name, too.
        model: a causal language model of transformers. It is decoded as in ``eval()``.
        stopping_criteria: asked after every token.
        streamer: is given the prompt, then every token.
        tokenizer: for ``stop_strings``.
        tswift_method: one of ``tswift.drafting.options.METHODS``; never changes the tokens.
        others: what else ``model.generate`` takes.

    Returns:
        ``[1, n + new]`` int64, or a ``GenerateDecoderOnlyOutput`` with them if
        ``return_dict_in_generate`` is set.

    Raises:
        InputError: something that is not served exactly, by its name in transformers.
        DecodeError: something broke while decoding.
    """
    config, given = model._prepare_generation_config(generation_config, **others)
    _refuse_fields(config)
    ids = _prompt(
        inputs, {name: value for name, value in given.items() if value is not None}, config, model
    )
    prompt: list[int] = ids[0].tolist()
    said = [
        getattr(each, "max_length", None) for each in (generation_config, model.generation_config)
    ]
    length, limit = _length(
        config, model, len(prompt), [*said, others.get("max_length")] == [None] * 3
    )
    criteria = StoppingCriteriaList([*(stopping_criteria or ())])
    if config.max_time is not None:
        criteria.append(MaxTimeCriteria(config.max_time))
    if config.stop_strings is not None:
        if tokenizer is None:
            raise InputError("is missing, which stop_strings need", "tokenizer")
        criteria.append(StopStringCriteria(tokenizer, config.stop_strings))
    with renaming(**_NAMES | {"length": limit}):
        params = replace(sampling_params(config), min_tokens=config.min_new_tokens or 0)
        loaded, turn = _adopted(model)
        seed = int(torch.randint(1 << 62, (), device="cpu")) if config.do_sample else 0
        loaded = replace(loaded, eos_ids=_ends(config))
        run = begin(
            loaded,
            Request(
                prompt=prompt,
                length=length,
                method=tswift_method,
                params=params,
                seed=seed,
                stop_at_eos=True,
            ),
        )
    if streamer is not None:
        streamer.put(ids.cpu())
    text = torch.cat([ids.long(), ids.new_zeros(1, length, dtype=torch.int64)], 1)
    end = len(prompt)
    for token in _drawn(run, turn):
        text[0, end] = token
        end += 1
        if streamer is not None:
            streamer.put(torch.tensor([token]))
        if criteria and bool(criteria(text[:, :end], None).all()):
            break
    if streamer is not None:
        streamer.end()
    text = text[:, :end].clone()
    return GenerateDecoderOnlyOutput(sequences=text) if config.return_dict_in_generate else text


def _refuse(name: str, value: object) -> None:
    said = repr(value) if isinstance(value, bool | int | float | str) else type(value).__name__
    raise InputError(f"is not served by tswift, got {said:.80}", name)


def _refuse_fields(config: GenerationConfig) -> None:
    """Refuse fields that change what is drawn or given back, and that tswift does not serve."""
    usual = config._get_default_generation_params()
    for name in vars(GenerationConfig()):
        value = getattr(config, name, None)
        own = usual.get(name)
        if (
            name in _SERVED
            or name.startswith("_")
            or value is None
            or (value is False and own is None)
        ):
            continue
        if value not in (own, _OFF.get(name)):
            _refuse(name, value)


def _prompt(
    inputs: Tensor | None,
    given: Object,
    config: GenerationConfig,
    model: PreTrainedModel,
) -> Tensor:
    """``[1, n]`` token ids; ``given`` are the arguments that are no fields of a generation
    configuration.
    """
    if model.config.is_encoder_decoder:
        raise InputError("has an encoder, which tswift does not serve", "model")
    mask = given.pop("attention_mask", None)
    for name in _CACHES:
        cache = given.pop(name, None)
        if cache is not None and not (type(cache) is DynamicCache and cache.get_seq_length() == 0):
            raise InputError("must be an empty DynamicCache; tswift has a cache of its own", name)
    if "input_ids" in given and inputs is not None:
        raise InputError("cannot be given together with inputs", "input_ids")
    ids = given.pop("input_ids", inputs)
    for name, value in given.items():
        if value is not False and value != []:
            _refuse(name, value)
    if ids is None:
        if config.bos_token_id is None:
            raise InputError(
                "is missing, and the model has no bos_token_id to begin with", "input_ids"
            )
        ids = torch.full((1, 1), config.bos_token_id, device=model.device)
    if (
        not isinstance(ids, Tensor)
        or ids.dim() != 2
        or len(ids) != 1
        or ids.is_floating_point()
        or not ids.numel()
    ):
        got = f"a tensor of shape {[*ids.shape]}" if isinstance(ids, Tensor) else type(ids).__name__
        raise InputError(
            f"must be token ids of one sequence, as a tensor of shape [1, n], got {got}",
            "input_ids",
        )
    if mask is not None and (mask.shape != ids.shape or not bool((mask == 1).all())):
        raise InputError(
            "must be all ones: padded or masked prompts are not served by tswift", "attention_mask"
        )
    pad = config.pad_token_id  # taken for padding by transformers, unless it ends texts, too
    if mask is None and pad is not None and pad not in _ends(config) and bool((ids == pad).any()):
        raise InputError(
            f"is missing, and the prompt has the padding token {pad}", "attention_mask"
        )
    return ids


def _ends(config: GenerationConfig) -> tuple[int, ...]:
    return (
        ()
        if config.eos_token_id is None
        else tuple(torch.as_tensor(config.eos_token_id).flatten().tolist())
    )


def _length(
    config: GenerationConfig, model: PreTrainedModel, prompt: int, usual: bool
) -> tuple[int, str]:
    """New tokens at most, and the field that says it; ``usual`` if no length was given at all."""
    if config.max_new_tokens is not None:
        return config.max_new_tokens, "max_new_tokens"
    if usual:
        return min(
            config.max_length, model.config.get_text_config().max_position_embeddings - prompt
        ), "max_length"
    if config.max_length <= prompt:
        raise InputError(
            f"must be above the {prompt:,} tokens of the prompt, got {config.max_length:,}",
            "max_length",
        )
    return config.max_length - prompt, "max_length"


def _drawn(run: Generation, turn: Lock) -> Iterator[int]:
    """The tokens one by one; steps of several threads take turns,
    as passes of a model share memory.
    """
    steps = run.steps()
    while True:
        with turn:
            step = next(steps, None)
        if step is None:
            return
        yield from step.tokens


# by model, for as long as it lives: its state, what is decoded in its place, and whose turn it is
_ADOPTED: WeakKeyDictionary[PreTrainedModel, tuple[object, LoadedModel, Lock]] = WeakKeyDictionary()


def _adopted(model: PreTrainedModel) -> tuple[LoadedModel, Lock]:
    """What is decoded in a model's place; made anew if that was changed meanwhile."""
    _refuse_wrapped(model)
    state = _state(model)
    if model not in _ADOPTED or _ADOPTED[model][0] != state:
        _ADOPTED.pop(model, None)
        _ADOPTED[model] = state, adopt(_twin(model)), Lock()
    return _ADOPTED[model][1:]


def _refuse_wrapped(model: PreTrainedModel) -> None:
    """Refuse a model whose passes are more than its modules."""
    devices = sorted({str(weight.device) for weight in model.parameters()})
    if len(devices) != 1 or devices == ["meta"]:
        raise InputError(f"is on {' and '.join(devices)}; tswift wants it on one device", "model")
    if torch.is_autocast_enabled(model.device.type):
        raise InputError("is under torch.autocast; load it in that dtype instead", "model")
    for name, module in model.named_modules():
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):
            if not str(getattr(hook, "__module__", "")).startswith("transformers."):
                # it has some that only watch
                raise InputError(
                    f"has a hook at {name or 'its root'}, which tswift would not call", "model"
                )


def _twin(model: PreTrainedModel) -> PreTrainedModel:
    """A second tree of modules over the same weights:
    what is changed in it changes nothing in the first.
    """
    shared: dict[int, object] = {id(buffer): buffer for buffer in model.buffers()}
    for name, weight in model.named_parameters():
        if type(weight) is nn.Parameter:
            shared[id(weight)] = nn.Parameter(weight.detach(), requires_grad=False)
        elif weight.requires_grad:
            raise InputError(
                f"trains {name}, a {type(weight).__name__}, which tswift does not serve", "model"
            )
        else:
            shared[id(weight)] = weight  # quantised
    return deepcopy(model, shared)


def _state(model: PreTrainedModel) -> object:
    """What shows that a model was changed: its configuration, and of its weights where they are and
    how often they were written to.
    """
    weights = [
        (
            name,
            weight.data_ptr() if type(weight) in (nn.Parameter, Tensor) else id(weight),
            0 if weight.is_inference() else weight._version,
            weight.dtype,
            weight.shape,
        )
        for name, weight in (*model.named_parameters(), *model.named_buffers())
    ]
    return model.config.to_json_string(), weights
