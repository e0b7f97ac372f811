"""Heads in the layouts that others publish: loaded, compared with plain computations,
refused where they are broken.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.architectures import ARCHITECTURES, HIDDEN, checkpoint, stock
from tests.forward.test_passes import LengthOnDevice
from tests.helpers import medusa_heads, read_json, tiny_llama
from tests.models.refusals import refuse
from tests.published import (
    COUNT,
    EPS,
    NAME,
    add_shard,
    drawn,
    make_base,
    medusa_file,
    medusa_tensors,
    say,
    tokenswift_model,
    tokenswift_tensors,
)
from tswift.drafting.options import DraftOptions
from tswift.engine import Request, begin
from tswift.forward.target import Target
from tswift.loading.model import LoadedModel, load
from tswift.sampling.parameters import SamplingParams
from tswift.speculators.heads import MedusaHeads


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return make_base(tmp_path_factory.mktemp("base"))


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight


def states_of(model: LoadedModel, text: list[int]) -> tuple[Tensor, Tensor]:
    """``[n, H]`` states before and after the final norm, by transformers' own model."""
    network = stock(ARCHITECTURES[NAME].make(model.target.vocab_size))
    network.model.norm.variance_epsilon = EPS
    for layer in network.model.layers:
        layer.input_layernorm.variance_epsilon = layer.post_attention_layernorm.variance_epsilon = (
            EPS
        )
    before: list[Tensor] = []
    network.model.layers[-1].register_forward_hook(lambda module, given, out: before.append(out))
    with torch.inference_mode():
        after = network.model(torch.tensor([text]), use_cache=False).last_hidden_state
    return before[0][0], after[0]


def first_guesses(model: LoadedModel, method: str, text: list[int]) -> list[list[int]]:
    """Three candidates for every level, best first, of the first draft after a text."""
    options = DraftOptions(
        tree=(3,) * (COUNT + (method == "tokenswift")), nodes=128, ngrams=0, shared_noise=False
    )
    if method == "medusa":
        options = DraftOptions(tree=(3,) * COUNT, nodes=128, shared_noise=False)
    run = begin(
        model,
        Request(
            prompt=text,
            length=20,
            method=method,
            params=SamplingParams(min_p=0, penalty=1),
            options=options,
        ),
    )
    run.decoding.prefill()
    source = run.decoding._drafter.sources[0]
    source.start(run.decoding._context)
    return source._guessed[0].tolist()


def layers_of(published: dict[str, Tensor], start: Tensor, lm_head: Tensor) -> list[Tensor]:
    """TokenSwift's heads in plain torch: logits of each."""
    found = []
    state = start
    for head in range(COUNT):
        at = f"model.medusa_layers.{head}"
        state = state + published[f"{at}.linear.weight"].double() @ norm(
            state, published[f"{at}.input_layernorm.weight"]
        )
        found.append(lm_head @ norm(state, published[f"{at}.post_layernorm.weight"]))
    return found


TEXT = [5, 80, 9, 33, 7, 100, 61]


def test_heads_of_tokenswift_guess_from_the_state_before_the_final_norm(base, tmp_path):
    model = load(str(tokenswift_model(base, tmp_path / "m")), dtype="float64", device="cpu")
    assert model.heads is not None
    assert (model.heads.kind, model.heads.count, model.heads.pre_norm) == ("chained", COUNT, True)
    raw, after = states_of(model, TEXT)
    lm_head = model.target.model.lm_head.weight
    for method, at in (("medusa", -2), ("tokenswift", -1)):
        wanted = layers_of(tokenswift_tensors(), raw[at], lm_head)
        if method == "tokenswift":
            wanted.insert(0, lm_head @ after[at])
        assert first_guesses(model, method, TEXT) == [
            logits.topk(3).indices.tolist() for logits in wanted
        ]
        mistaken = layers_of(tokenswift_tensors(), after[at], lm_head)
        assert [logits.topk(3).indices.tolist() for logits in mistaken] != first_guesses(
            model, method, TEXT
        )[-COUNT:]


def test_heads_of_medusa_guess_side_by_side(base, tmp_path):
    model = load(
        str(base), dtype="float64", device="cpu", heads=medusa_file(base, tmp_path, layers=2)
    )
    assert model.heads is not None
    assert (model.heads.kind, model.heads.count, model.heads.pre_norm) == ("medusa", COUNT, False)
    published, (_, after) = medusa_tensors(model.target.vocab_size, 2), states_of(model, TEXT)
    wanted = []
    for head in range(COUNT):
        state = after[-2]
        for block in range(2):
            at = f"{head}.{block}.linear"
            inner = published[f"{at}.weight"].double() @ state + published[f"{at}.bias"].double()
            state = state + inner * torch.sigmoid(inner)
        wanted.append((published[f"{head}.2.weight"].double() @ state).topk(3).indices.tolist())
    assert first_guesses(model, "medusa", TEXT) == wanted


def test_the_states_before_the_norm_survive_passes_that_are_replayed():
    target = Target(tiny_llama("gqa", torch.float64), LengthOnDevice)
    text = list(range(9))
    heads = medusa_heads()
    heads.pre_norm = True
    target.tap()
    model = LoadedModel("tiny", None, target, heads, ())
    run = begin(
        model,
        Request(
            prompt=text, length=30, method="medusa", options=DraftOptions(tree=(2, 2), nodes=9)
        ),
    )
    steps = run.steps()
    for _ in range(6):
        next(steps)
        last, node = run.decoding._context.last, run.decoding._context.node
        assert last.pre_norm.shape == last.hidden.shape
        torch.testing.assert_close(target.model.model.norm(last.pre_norm[node]), last.hidden[node])
    heads.pre_norm = False


@pytest.mark.parametrize(
    ("where", "kind", "count"),
    [
        ("one file", "chained", 3),
        ("no prefix", "chained", 3),
        ("medusa among the weights", "medusa", 3),
        ("heads of ours beside them", "medusa", 1),
    ],
)
def test_where_heads_may_be(base, tmp_path, where, kind, count):
    folder = shutil.copytree(base, tmp_path / "m")
    vocab = read_json(base / "config.json")["vocab_size"]
    if where == "medusa among the weights":
        add_shard(folder, medusa_tensors(vocab, prefix="medusa_head."))
        say(folder, medusa_num_heads=COUNT, medusa_num_layers=1)
    else:
        add_shard(folder, tokenswift_tensors(prefix="" if where == "no prefix" else "model."))
        say(folder, medusa_heads=COUNT)
    if where == "one file":
        everything = {
            n: value
            for path in folder.glob("model-*.safetensors")
            for n, value in load_file(path).items()
        }
        for path in folder.glob("model*"):
            path.unlink()
        save_file(everything, folder / "model.safetensors", metadata={"format": "pt"})
    if where == "heads of ours beside them":
        MedusaHeads(HIDDEN, 1, vocab).save(folder / "heads.safetensors")
    heads = load(str(folder), device="cpu").heads
    assert heads is not None
    assert (heads.kind, heads.count) == (kind, count)


def test_heads_of_a_model_of_the_hub(base, tmp_path, monkeypatch):
    """As the hub's client keeps what it has fetched."""
    cache = tmp_path / "models--tswift--heads"
    (cache / "refs").mkdir(parents=True)
    (cache / "refs" / "main").write_text("1234")
    (cache / "snapshots").mkdir()
    tokenswift_model(base, cache / "snapshots" / "1234")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    heads = load("tswift/heads", device="cpu").heads
    assert heads is not None
    assert (heads.kind, heads.count, heads.pre_norm) == ("chained", COUNT, True)


def changed(change: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], None]:
    """Other tensors of heads."""

    def apply(folder: Path):
        path = next(iter(folder.glob("m*extra.safetensors")), folder / "medusa_lm_head.safetensors")
        tensors = load_file(path)
        change(tensors)
        path.unlink()
        if path.name.startswith("model"):
            add_shard(folder, tensors)
        else:
            save_file(tensors, path)

    return apply


def cut(part: str, *sizes: int) -> Callable[[Path], None]:
    """Tensors with a part in their name are cut to sizes."""

    def change(tensors: dict[str, Tensor]):
        for name, value in tensors.items():
            if part in name:
                tensors[name] = value[tuple(map(slice, sizes[: value.dim()]))].clone()

    return changed(change)


def pickled(folder: Path):
    (folder / "medusa_lm_head.safetensors").unlink()
    (folder / "medusa_lm_head.pt").write_bytes(b"whatever")


T = "model.medusa_layers"
FIRST, SECOND = f"{T}.0.linear.weight", f"{T}.1.linear.weight"
BROKEN: list[tuple[str, Callable[[Path], object], str]] = [
    (
        "tokenswift",
        lambda folder: say(folder, medusa_heads=4),
        "has 3 heads, its configuration says 4",
    ),
    ("tokenswift", changed(lambda x: x.pop(SECOND)), r"lacks heads\.1\.linear\.weight"),
    ("tokenswift", changed(lambda x: x.update({SECOND: drawn(HIDDEN, 7)})), r"of shape \[32, 7\]"),
    ("tokenswift", cut("", 16, 16), "was made for hidden size 16, the model has 32"),
    (
        "tokenswift",
        changed(lambda x: x[FIRST].fill_(torch.nan)),
        "something else than finite numbers",
    ),
    (
        "medusa",
        lambda folder: say(folder, medusa_num_heads=5),
        "has 3 heads with 1 blocks, .* says 5 with 1",
    ),
    ("medusa", cut(".1.weight", 11), "was made for a vocabulary of 11, the model has"),
    ("medusa", changed(lambda x: x.pop("1.0.linear.bias")), r"lacks heads\.1\.blocks\.0\.bias"),
    (
        "medusa",
        changed(lambda x: x.update({"0.1.bias": drawn(4)})),
        r"has 0\.1\.bias, which no head",
    ),
    ("medusa", pickled, "a pickle, which could run code"),
    ("medusa", lambda folder: (folder / "config.json").write_text("[1]"), "no JSON object"),
]


@pytest.mark.parametrize(("layout", "spoil", "match"), BROKEN)
def test_heads_that_are_broken(base, tmp_path, layout, spoil, match):
    folder = (
        tokenswift_model(base, tmp_path / "m")
        if layout == "tokenswift"
        else medusa_file(base, tmp_path)
    )
    spoil(folder)
    model, heads = (folder, None) if layout == "tokenswift" else (base, folder)
    refuse(str(model), match, "heads", heads=heads)


def test_other_things_that_are_no_heads(base, tmp_path):
    def refused(match, heads):
        refuse(str(base), match, "heads", heads=heads)

    (tmp_path / "heads.pt").write_bytes(b"whatever")
    refused("is a pickle, which could run code when it is read; convert it", tmp_path / "heads.pt")
    (tmp_path / "empty").mkdir()
    refused("there are no heads in", tmp_path / "empty")
    refused("there are no heads in", base)
    folder = tokenswift_model(base, tmp_path / "m")
    lone = tmp_path / "lone"
    lone.mkdir()
    shutil.copy(folder / "model-extra.safetensors", lone)
    refused("has no rms_norm_eps in the configuration beside it", lone / "model-extra.safetensors")
    path = folder / "model.safetensors.index.json"
    (lone / path.name).write_text(json.dumps({**read_json(path), "weight_map": 3}))
    refused("is broken: it lacks weight_map", lone)
    # a shard of another folder is not read
    shutil.move(folder / "model-extra.safetensors", tmp_path)
    path.write_text(path.read_text().replace("model-extra", "../model-extra"))
    refused("no safetensors file in the folder", folder)


def test_a_model_without_a_final_norm_that_is_known(base, tmp_path):
    opt = ARCHITECTURES["OPT"]
    heads = tokenswift_model(base, tmp_path / "t")
    checkpoint(
        replace(opt, settings={**opt.settings, "do_layer_norm_before": False}), tmp_path / "m"
    )
    refuse(
        str(tmp_path / "m"),
        "does not go with this model, which has no final norm",
        "heads",
        heads=heads,
    )
