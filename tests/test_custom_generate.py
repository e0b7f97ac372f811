"""``model.generate(custom_generate=FOLDER)`` of transformers: its texts, its refusals,
and the model left as it was.
"""

from __future__ import annotations

import gc
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers.dynamic_module_utils as modules
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BatchEncoding,
    DynamicCache,
    GenerationConfig,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation import GenerateDecoderOnlyOutput, MinPLogitsWarper
from transformers.generation.streamers import BaseStreamer

import tswift
from benchmarks.architectures import ARCHITECTURES, checkpoint
from tests.helpers import CACHE, refused, seeded, tokens_of
from tswift import custom_generate
from tswift.cli import main
from tswift.decoding.drafter import Step
from tswift.errors import InputError
from tswift.sampling.generation_config import sampling_params
from tswift.sampling.parameters import SamplingParams, warp

KINDS = ("Llama, GQA", "Qwen2.5", "Gemma 3 (windows)")
PROMPT = "The ship had lain three days becalmed,"
SOME = [KINDS[2], *(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS[:2])]
Generate = Callable[..., Any]


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> Iterator[Generate]:
    """``model.generate`` by the folder that was exported."""
    folder = tmp_path_factory.mktemp("exported")
    assert main(["export-generate", str(folder)]) == 0

    def generate(model: PreTrainedModel, *given, **settings):
        return model.generate(
            *given, **settings, custom_generate=str(folder), trust_remote_code=True
        )

    with pytest.MonkeyPatch.context() as patch:  # transformers copies the file there
        patch.setattr(modules, "HF_MODULES_CACHE", str(tmp_path_factory.mktemp("modules")))
        yield generate


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """Checkpoints with tokenizers and heads."""
    made = {name: tmp_path_factory.mktemp("model") for name in KINDS}
    for name, folder in made.items():
        checkpoint(ARCHITECTURES[name], folder)
    return made


def loaded(folder: Path) -> tuple[PreTrainedModel, BatchEncoding]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    model.generation_config.eos_token_id = None  # random weights would soon draw it
    return model, AutoTokenizer.from_pretrained(folder)(
        PROMPT, return_tensors="pt", return_token_type_ids=False
    )


@pytest.fixture
def model(folders: dict[str, Path]) -> PreTrainedModel:
    return loaded(folders[KINDS[0]])[0]


@pytest.fixture
def prompt(folders: dict[str, Path]) -> BatchEncoding:
    return loaded(folders[KINDS[0]])[1]


@pytest.mark.slow
@pytest.mark.parametrize("kind", SOME)
def test_greedy_is_that_of_transformers(kind, folders, exported):
    model, prompt = loaded(folders[kind])
    for settings in (
        {},
        {"repetition_penalty": 1.2, "suppress_tokens": [20, 21]},
        {"repetition_penalty": 3.0},
        {
            "repetition_penalty": 1.2,
            "min_new_tokens": 30,
            "eos_token_id": [*range(0, 300, 2), *range(1, 300, 3)],
        },
    ):
        settings["max_new_tokens"] = 60  # beyond the windows
        expected = model.generate(**prompt, **settings)
        before = torch.random.get_rng_state()
        for method in ("auto", "reuse"):
            found = exported(model, **prompt, **settings, tswift_method=method)
            assert found.dtype == torch.int64
            assert torch.equal(found, expected), (settings, method)
        assert torch.equal(torch.random.get_rng_state(), before)  # nothing was drawn
        made = expected[0, prompt["input_ids"].shape[1] :].tolist()
        if "eos_token_id" in settings:
            ends = {*settings["eos_token_id"]}
            assert len(made) >= 30
            assert not ends & {*made[30:-1]}
            assert (made[-1] in ends) == (len(made) < 60)
            assert len(made) < 60 or kind != KINDS[0]  # that one ends
    settings = {"repetition_penalty": 3.0, "max_new_tokens": 60}
    # with a penalty it does not go in circles
    assert len(set(model.generate(**prompt, **settings)[0].tolist())) > 30


@pytest.mark.slow
@pytest.mark.parametrize("kind", SOME)
def test_sampling_is_that_of_tswift(kind, folders, exported):
    model, prompt = loaded(folders[kind])
    ours = replace(tswift.load(str(folders[kind]), dtype="float64", device="cpu"), eos_ids=())
    own = {"min_p": 0.02, "temperature": 0.8}
    for asked, params in (
        ({}, {"top_k": 50, "min_p": 0.0, "penalty": 1.0}),
        (
            {"top_k": None, "repetition_penalty": 1.2, **own},
            {"penalty": 1.2, "window": 1 << 30, **own},
        ),
    ):
        torch.manual_seed(5)
        given = {"params": SamplingParams(**params), "seed": int(torch.randint(1 << 62, ()))}
        start = prompt["input_ids"][0].tolist()
        expected = tokens_of([*tswift.generate(ours, start, 40, method="ar", **given)])
        torch.manual_seed(5)
        found, again = (
            exported(model, **prompt, do_sample=True, max_new_tokens=40, **asked) for _ in range(2)
        )
        assert found[0, len(start) :].tolist() == expected
        assert not torch.equal(again, found)  # the generator has moved on


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"top_k": 0, "temperature": 0.6},
        {"top_p": 0.8},
        {"top_k": 0, "top_p": 0.8, "min_p": 0.15},
        {"top_k": 12, "eta_cutoff": 0.05},
        {
            "top_k": 30,
            "top_p": 0.9,
            "min_p": 0.02,
            "eta_cutoff": 0.02,
            "temperature": 1.7,
            "repetition_penalty": 1.4,
        },
    ],
    ids=str,
)
def test_the_distribution_is_that_of_transformers(asked, model):
    """Which tokens are left, and how likely each is,
    by transformers' own processors and by our parameters.
    """
    config, _ = model._prepare_generation_config(None, do_sample=True, **asked)
    config._eos_token_tensor = None
    random = seeded(3)
    for sharp in (0.5, 2.0, 5.0):
        logits = torch.randn(40, 97, generator=random, dtype=torch.float64) * sharp
        text = torch.randint(97, (40, 25), generator=random)
        theirs = model._get_logits_processor(config, text.shape[1], device="cpu")(
            text, logits.clone()
        )
        seen = torch.zeros(40, 97, dtype=torch.bool).scatter_(1, text, True)
        params = sampling_params(config).folded()
        ours = warp(logits.clone(), seen if params.penalises else None, params)
        assert torch.equal(ours.isfinite(), theirs.isfinite())
        torch.testing.assert_close(ours.softmax(-1), theirs.softmax(-1), rtol=1e-5, atol=1e-9)


def test_no_filter_is_left_out_of_an_order():
    assert SamplingParams(order="top_p,top_k", top_k=3, top_p=0.9, min_p=0.1).filters == (
        "top_p",
        "top_k",
        "min_p",
    )
    for order in ("top_k,top_k", "top_k,nope", "top_k,"):
        with refused(r"^order: "):
            SamplingParams(order=order)


class Recorder(BaseStreamer):
    """Notes what it is given, and calls back."""

    def __init__(self, seen: Callable[[int], None] = lambda count: None):
        self.puts = list[list[Any]]()
        self.ended = False
        self.seen = seen

    def put(self, value: Tensor):
        assert not torch.is_inference_mode_enabled()
        self.puts.append(value.tolist())
        self.seen(len(self.puts))

    def end(self):
        self.ended = True


class StopsAt(StoppingCriteria):
    def __init__(self, length: int):
        self.length = length
        self.texts = list[list[int]]()

    def __call__(self, input_ids: Tensor, scores, **kwargs) -> Tensor:
        assert scores is None
        self.texts.append(input_ids[0].tolist())
        return torch.tensor([input_ids.shape[1] >= self.length])


@pytest.mark.slow
def test_streamers_and_criteria_see_every_token(model, prompt, exported):
    (start,) = prompt["input_ids"].tolist()
    streamer = Recorder()
    criterion = StopsAt(len(start) + 33)
    criteria = StoppingCriteriaList([criterion])
    out = exported(
        model, **prompt, max_new_tokens=200, streamer=streamer, stopping_criteria=criteria
    )
    whole = out[0].tolist()
    assert len(whole) == len(start) + 33
    assert streamer.puts == [[start], *([token] for token in whole[len(start) :])]
    assert streamer.ended
    assert criterion.texts == [whole[:end] for end in range(len(start) + 1, len(whole) + 1)]
    assert not out.is_inference()


@pytest.mark.slow
def test_where_texts_end(model, prompt, folders, exported):
    """Lengths, ends of text, stop strings and the first token, as without ``custom_generate``."""
    tokenizer = AutoTokenizer.from_pretrained(folders[KINDS[0]])
    start = prompt["input_ids"].shape[1]
    whole = model.generate(**prompt, max_new_tokens=60)[0].tolist()
    pad = {"pad_token_id": whole[3]}
    for settings in (
        {},  # 20 new tokens
        {"max_length": len(whole) - 7},
        {"max_length": 9999, "max_new_tokens": 31},
        {"generation_config": GenerationConfig(max_new_tokens=12)},
        {"max_new_tokens": 60, "eos_token_id": whole[-5]},
        {"max_new_tokens": 60, "eos_token_id": [96, whole[-20], whole[-5]]},
        {
            "max_new_tokens": 60,
            "stop_strings": tokenizer.decode(whole[-9:-7]),
            "tokenizer": tokenizer,
        },
        {"max_new_tokens": 40, CACHE: DynamicCache(config=model.config)},
        {
            "max_new_tokens": 40,
            "cache_implementation": "dynamic",
            "typical_p": 1.0,
            "num_beams": 1,
            "min_length": 0,
        },
        {"attention_mask": None, **pad, "eos_token_id": whole[3]},
        {"attention_mask": prompt["input_ids"] * 0 + 1, **pad},
    ):
        found = exported(model, **{**prompt, **settings})
        cache = settings.get(CACHE)
        assert cache is None or cache.get_seq_length() == 0
        assert torch.equal(found, model.generate(**{**prompt, **settings})), settings
    first = {"bos_token_id": 7, "max_new_tokens": 9}
    assert torch.equal(exported(model, **first), model.generate(**first))
    out = exported(model, **prompt, max_new_tokens=5, return_dict_in_generate=True)
    assert isinstance(out, GenerateDecoderOnlyOutput)
    assert out.sequences[0].tolist() == whole[:-55]
    assert exported(model, **prompt, max_new_tokens=400, max_time=0.0).shape[1] == start + 1


REFUSED: dict[str, dict[str, Any]] = {  # all fields of a configuration are in a test of their own
    "num_return_sequences": {"num_return_sequences": 3, "do_sample": True},
    "output_scores": {"output_scores": True, "return_dict_in_generate": True},
    "logits_processor": {"logits_processor": [MinPLogitsWarper(0.1)]},
    "prefix_allowed_tokens_fn": {"prefix_allowed_tokens_fn": lambda batch, ids: [1]},
    "synced_gpus": {"synced_gpus": True},
    "position_ids": {"position_ids": torch.arange(2)[None]},
    "something": {"something": 1},
    "attention_mask": {
        "input_ids": torch.tensor([[5, 6, 7]]),
        "attention_mask": torch.tensor([[0, 1, 1]]),
    },
    "input_ids": {"input_ids": torch.tensor([[5, 6], [7, 8]]), "attention_mask": None},
    CACHE: {CACHE: "held"},
    "use_cache": {"use_cache": False},
    "cache_implementation": {"cache_implementation": "static"},
    "watermarking_config": {"watermarking_config": {"bias": 2.0, "seeding_scheme": "selfhash"}},
    "temperature": {"do_sample": True, "temperature": 0.0},
    "repetition_penalty": {"repetition_penalty": 0.0},
    "max_length": {"max_length": 3},
    "max_new_tokens": {"max_new_tokens": 5000},
    "tokenizer": {"stop_strings": "the"},
    "suppress_tokens": {"suppress_tokens": [9999]},
    "tswift_method": {"tswift_method": "none"},
    "draft_model": {"tswift_method": "standalone"},
}


def test_refuses_by_name(model, prompt, exported):
    REFUSED[CACHE][CACHE] = model(**prompt, use_cache=True)[CACHE]
    for name, settings in REFUSED.items():
        with pytest.raises((InputError, ValueError), match=rf"^{name}: [^\n]*$|{name}") as caught:
            exported(model, **{**prompt, **settings})
        assert type(caught.value) is InputError, caught.value
        assert caught.value.field == name
    with refused(r"^attention_mask: is missing, and the prompt has the padding token \d+$"):
        exported(model, prompt["input_ids"], pad_token_id=int(prompt["input_ids"][0, 3]))
    with torch.autocast("cpu", torch.bfloat16), refused(r"^model: is under torch\.autocast"):
        exported(model, **prompt)
    hook = model.model.layers[0].register_forward_hook(lambda module, inputs, out: out * 2)
    with refused(r"^model: has a hook at model\.layers\.0, "):
        exported(model, **prompt)
    hook.remove()
    model(**prompt, output_hidden_states=True)  # transformers leaves hooks that watch
    assert exported(model, **prompt).shape[1] == prompt["input_ids"].shape[1] + 20


def test_no_field_of_the_configuration_is_ignored(model):
    """Every field is served, named here as of no matter,
    or refused with any value that is not its default.
    """
    known = custom_generate._SERVED
    fields = {*vars(GenerationConfig())}
    assert known < fields
    for name in sorted(fields - known):
        config, _ = model._prepare_generation_config(GenerationConfig(max_new_tokens=3))
        custom_generate._refuse_fields(config)
        setattr(config, name, 0.123)
        if not name.startswith("_"):
            with refused(f"^{name}: is not served by tswift, got 0.123$"):
                custom_generate._refuse_fields(config)


def snapshot(model: PreTrainedModel):
    return (
        model.config.to_json_string(use_diff=False),
        model.config._attn_implementation,
        [
            (name, module.training, type(module), len(module._forward_hooks))
            for name, module in model.named_modules()
        ],
        [
            (name, weight.requires_grad, weight.data_ptr(), weight._version)
            for name, weight in model.named_parameters()
        ],
        sorted(vars(model)),
        model.generation_config.to_json_string(),
        torch.is_grad_enabled(),
        torch.get_num_threads(),
    )


@pytest.mark.parametrize("error", [KeyboardInterrupt, None])
def test_the_model_is_left_as_it_was(error, model, prompt, exported):
    model.train()
    model.model.layers[0].eval()
    model.lm_head.weight.requires_grad_(False)
    before = snapshot(model)
    within = []
    logits = model(**prompt).logits

    def seen(count):
        within.append(snapshot(model)[:-2])
        if error is not None and count > 9:
            raise error("stop")

    for _ in range(2):
        try:
            exported(model, **prompt, max_new_tokens=15, streamer=Recorder(seen))
            assert error is None
        except KeyboardInterrupt:
            assert error is not None
        assert snapshot(model) == before
    assert all(each == before[:-2] for each in within)  # not even meanwhile
    out = model(**prompt).logits
    assert torch.equal(out, logits)
    out.sum().backward()
    assert model.model.embed_tokens.weight.grad is not None
    assert model.lm_head.weight.grad is None
    found = exported(model, **prompt, max_new_tokens=15)
    assert torch.equal(found, model.eval().generate(**prompt, max_new_tokens=15))


@pytest.mark.slow
def test_changes_of_the_model_are_seen(model, prompt, exported):
    def multiply():
        with torch.no_grad():
            model.model.layers[0].mlp.down_proj.weight.mul_(-2)

    def shorten():
        model.model.layers = model.model.layers[:1]
        model.config.num_hidden_layers = 1

    texts = []
    kept = None
    for change in (lambda: None, multiply, model.float, shorten):
        change()
        found = exported(model, **prompt, max_new_tokens=30)
        assert torch.equal(found, model.generate(**prompt, max_new_tokens=30))
        texts.append(str(found.tolist()))
        kept = custom_generate._ADOPTED[model][1].target
    assert len({*texts}) >= 3  # float32 may give the same text
    exported(model, **prompt, max_new_tokens=3)
    assert custom_generate._ADOPTED[model][1].target is kept  # nothing is made twice
    held = len(custom_generate._ADOPTED)
    other, _ = loaded(Path(model.name_or_path))
    exported(other, **prompt, max_new_tokens=3)
    assert len(custom_generate._ADOPTED) == held + 1
    del other
    gc.collect()
    # a model that is gone takes its second tree with it
    assert len(custom_generate._ADOPTED) <= held


def test_only_one_thread_is_in_a_step():
    inside = [0]
    most = list[int]()

    def steps():
        for token in range(20):
            inside[0] += 1
            most.append(inside[0])
            time.sleep(0.001)
            inside[0] -= 1
            yield Step((token,), 0, "", 1, 0.0)

    run = SimpleNamespace(steps=steps)
    turn = threading.Lock()
    with ThreadPoolExecutor(3) as pool:
        drawn = [*pool.map(lambda _: [*custom_generate._drawn(run, turn)], range(3))]
    assert drawn == [[*range(20)]] * 3
    assert most == [1] * 60


def test_a_models_own_folder_has_it_used_by_default(checkpoint, tmp_path, exported):
    """Exported there, ``from_pretrained`` makes ``model.generate`` ours."""
    for file in checkpoint.iterdir():
        (tmp_path / file.name).symlink_to(file)
    assert main(["export-generate", str(tmp_path)]) == 0
    plain = AutoModelForCausalLM.from_pretrained(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=True)
    found, wanted = (
        each.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=20, eos_token_id=None)
        for each in (model, plain)
    )
    assert torch.equal(found, wanted)
    assert custom_generate._ADOPTED[model][1].heads is not None  # those in its folder draft


def test_export_refuses_what_it_cannot_write(tmp_path, capfd):
    again, file = tmp_path / "new" / "folder", tmp_path / "file"
    file.touch()
    for _ in range(2):  # what tswift has written, it may write anew
        assert main(["export-generate", str(again)]) == 0
        assert "custom_generate='" in capfd.readouterr().out
        # as an older one wrote it
        (again / "custom_generate" / "requirements.txt").write_text("tswift>=0.0.1\n")
    edited = [again / "custom_generate" / name for name in ("generate.py", "requirements.txt")]
    kept = [each.read_text() for each in edited]
    for mine, text in (None, ""), *zip(edited, kept, strict=True):
        if mine:
            mine.write_text(f"{text}# mine\n")
        assert main(["export-generate", str(again if mine else file)]) == 2
        err = capfd.readouterr().err
        words = (
            f"{mine} is there already, and not as tswift writes it" if mine else "cannot be made"
        )
        assert re.fullmatch(rf"tswift: error: [^\n]*{re.escape(words)}[^\n]*\n", err), err
        if mine:
            assert mine.read_text() == f"{text}# mine\n"
            mine.write_text(text)
