"""Heads in the layouts that others publish: loaded, compared with plain computations, refused where they are broken."""

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

from benchmarks.architectures import ARCHITECTURES, HIDDEN, checkpoint, stock, texts
from tests.helpers import medusa_heads, tiny_llama
from tests.models.test_passes import LengthOnDevice
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
from tswift.decoding.params import SamplingParams
from tswift.drafting.options import DraftOptions
from tswift.engine import begin
from tswift.errors import InputError
from tswift.models.heads import MedusaHeads, find_heads
from tswift.models.load import LoadedModel, load
from tswift.models.target import Target


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("base"))


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight


def states_of(model: LoadedModel, text: list[int]) -> tuple[Tensor, Tensor]:
    """``[n, H]`` states before and after the final norm, by transformers' own model."""
    network = stock(ARCHITECTURES[NAME].make(model.target.vocab_size))
    network.model.norm.variance_epsilon = EPS
    for layer in network.model.layers:
        layer.input_layernorm.variance_epsilon = layer.post_attention_layernorm.variance_epsilon = EPS
    before: list[Tensor] = []
    network.model.layers[-1].register_forward_hook(lambda module, given, out: before.append(out))
    with torch.inference_mode():
        after = network.model(torch.tensor([text]), use_cache=False).last_hidden_state
    return before[0][0], after[0]


def first_guesses(model: LoadedModel, method: str, text: list[int]) -> list[list[int]]:
    """Three candidates for every level, best first, of the first draft after a text."""
    options = DraftOptions(tree=(3,) * (COUNT + (method == "tokenswift")), nodes=128, ngrams=0, shared_noise=False)
    if method == "medusa":
        options = DraftOptions(tree=(3,) * COUNT, nodes=128, shared_noise=False)
    run = begin(model, text, 20, method=method, params=SamplingParams(min_p=0, penalty=1), options=options)
    run.decoding.prefill()
    source = run.decoding._drafter.sources[0]
    source.start(run.decoding._context)
    return source._guessed[0].tolist()


def layers_of(published: dict[str, Tensor], start: Tensor, lm_head: Tensor) -> list[Tensor]:
    """TokenSwift's heads in plain torch: logits of each."""
    found, state = [], start
    for head in range(COUNT):
        at = f"model.medusa_layers.{head}"
        state = state + published[f"{at}.linear.weight"].double() @ norm(
            state, published[f"{at}.input_layernorm.weight"]
        )
        found.append(lm_head @ norm(state, published[f"{at}.post_layernorm.weight"]))
    return found


TEXT = [5, 80, 9, 33, 7, 100, 61]


def test_heads_of_tokenswift_guess_from_the_state_before_the_final_norm(base: Path, tmp_path: Path) -> None:
    model = load(str(tokenswift_model(base, tmp_path / "m")), dtype="float64", device="cpu")
    assert model.heads is not None
    assert (model.heads.kind, model.heads.count, model.heads.pre_norm) == ("chained", COUNT, True)
    raw, after = states_of(model, TEXT)
    lm_head = model.target.model.lm_head.weight
    for method, at in (("medusa", -2), ("tokenswift", -1)):
        wanted = layers_of(tokenswift_tensors(), raw[at], lm_head)
        if method == "tokenswift":
            wanted.insert(0, lm_head @ after[at])
        assert first_guesses(model, method, TEXT) == [logits.topk(3).indices.tolist() for logits in wanted]
        mistaken = layers_of(tokenswift_tensors(), after[at], lm_head)
        assert [logits.topk(3).indices.tolist() for logits in mistaken] != first_guesses(model, method, TEXT)[-COUNT:]


def test_heads_of_medusa_guess_side_by_side(base: Path, tmp_path: Path) -> None:
    model = load(str(base), dtype="float64", device="cpu", heads=medusa_file(base, tmp_path, layers=2))
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


LENGTHS = {"ar": 40, "medusa": 40, "tokenswift": 40}


@pytest.mark.parametrize("kind", ["tokenswift", "medusa"])
def test_every_method_writes_the_text_of_plain_decoding(base: Path, tmp_path: Path, kind: str) -> None:
    if kind == "tokenswift":
        model = load(str(tokenswift_model(base, tmp_path / "m")), dtype="float64", device="cpu")
    else:
        model = load(str(base), dtype="float64", device="cpu", heads=medusa_file(base, tmp_path))
    found = texts(model, LENGTHS)
    assert found["medusa"] == found["tokenswift"] == found["ar"]
    assert len(set(found["ar"])) > 20


def test_the_states_before_the_norm_survive_passes_that_are_replayed() -> None:
    target, text = Target(tiny_llama("gqa", torch.float64), LengthOnDevice), list(range(9))
    heads = medusa_heads()
    heads.pre_norm = True
    target.tap()
    model = LoadedModel("tiny", None, target, heads, ())
    run = begin(model, text, 30, method="medusa", options=DraftOptions(tree=(2, 2), nodes=9))
    steps = run.steps()
    for _ in range(6):
        next(steps)
        last, node = run.decoding._context.last, run.decoding._context.node
        assert last.raw.shape == last.hidden.shape
        torch.testing.assert_close(target.model.model.norm(last.raw[node]), last.hidden[node])
    heads.pre_norm = False


@pytest.mark.parametrize("where", ["one file", "no prefix", "medusa among the weights", "heads of ours beside them"])
def test_where_heads_may_be(base: Path, tmp_path: Path, where: str) -> None:
    folder = tmp_path / "m"
    shutil.copytree(base, folder)
    vocab = json.loads((base / "config.json").read_text())["vocab_size"]
    if where == "medusa among the weights":
        add_shard(folder, medusa_tensors(vocab, prefix="medusa_head."))
        say(folder, medusa_num_heads=COUNT, medusa_num_layers=1)
    elif where == "no prefix":
        add_shard(folder, tokenswift_tensors(prefix=""))
        say(folder, medusa_heads=COUNT)
    else:
        shards = [tokenswift_tensors(), *(load_file(path) for path in folder.glob("model-*.safetensors"))]
        for path in folder.glob("model*"):
            path.unlink()
        everything = {name: value for shard in shards for name, value in shard.items()}
        save_file(everything, folder / "model.safetensors", metadata={"format": "pt"})
        say(folder, medusa_heads=COUNT)
    if where == "heads of ours beside them":
        MedusaHeads(HIDDEN, 1, vocab).save(folder / "heads.safetensors")
    heads = load(str(folder), device="cpu").heads
    assert heads is not None
    wanted = {"medusa among the weights": ("medusa", 3), "heads of ours beside them": ("medusa", 1)}
    assert (heads.kind, heads.count) == wanted.get(where, ("chained", 3))


def test_heads_of_a_model_of_the_hub(base: Path, tmp_path: Path, monkeypatch) -> None:
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
    def apply(folder: Path) -> None:
        path = next(iter(folder.glob("m*extra.safetensors")), folder / "medusa_lm_head.safetensors")
        tensors = load_file(path)
        change(tensors)
        path.unlink()
        if path.name.startswith("model"):
            add_shard(folder, tensors)
        else:
            save_file(tensors, path)

    return apply


def pickled(folder: Path) -> None:
    (folder / "medusa_lm_head.safetensors").unlink()
    (folder / "medusa_lm_head.pt").write_bytes(b"whatever")


T = "model.medusa_layers"
BAD_TOKENSWIFT = {
    "another count": (lambda folder: say(folder, medusa_heads=4), "has 3 heads, its configuration says 4"),
    "a tensor lost": (changed(lambda x: x.pop(f"{T}.1.linear.weight")), r"lacks heads\.1\.linear\.weight"),
    "a tensor too wide": (
        changed(lambda x: x.update({f"{T}.1.linear.weight": drawn(HIDDEN, 7)})),
        r"of shape \[32, 7\]",
    ),
    "another hidden size": (changed(lambda x: halve(x)), "was made for hidden size 16, the model has 32"),
    "not a number": (
        changed(lambda x: x[f"{T}.0.linear.weight"].fill_(torch.nan)),
        "something else than finite numbers",
    ),
}


def halve(tensors: dict[str, Tensor]) -> None:
    for name, value in tensors.items():
        tensors[name] = value[tuple(slice(16) for _ in value.shape)].clone()


BAD_MEDUSA = {
    "more said than there": (
        lambda folder: say(folder, medusa_num_heads=5),
        "has 3 heads with 1 blocks, .* says 5 with 1",
    ),
    "another vocabulary": (changed(lambda x: shorten(x)), "was made for a vocabulary of 11, the model has"),
    "a bias lost": (changed(lambda x: x.pop("1.0.linear.bias")), r"lacks heads\.1\.blocks\.0\.bias"),
    "an LM head with a bias": (changed(lambda x: x.update({"0.1.bias": drawn(4)})), r"has 0\.1\.bias, which no head"),
    "pickled": (pickled, "a pickle, which could run code"),
    "a configuration that is a list": (lambda folder: (folder / "config.json").write_text("[1]"), "no JSON object"),
}


def shorten(tensors: dict[str, Tensor]) -> None:
    for name, value in tensors.items():
        if "linear" not in name:
            tensors[name] = value[:11].clone()


def refused(match: str, model: Path, heads: Path | None) -> None:
    with pytest.raises(InputError, match=match) as error:
        load(str(model), device="cpu", heads=heads)
    assert error.value.field == "heads"
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", BAD_TOKENSWIFT)
def test_models_whose_heads_are_broken(base: Path, tmp_path: Path, name: str) -> None:
    folder = tokenswift_model(base, tmp_path / "m")
    spoil, match = BAD_TOKENSWIFT[name]
    spoil(folder)
    refused(match, folder, None)


@pytest.mark.parametrize("name", BAD_MEDUSA)
def test_files_of_medusa_that_are_broken(base: Path, tmp_path: Path, name: str) -> None:
    folder = medusa_file(base, tmp_path)
    spoil, match = BAD_MEDUSA[name]
    spoil(folder)
    refused(match, base, folder)


def test_other_things_that_are_no_heads(base: Path, tmp_path: Path) -> None:
    (tmp_path / "heads.pt").write_bytes(b"whatever")
    refused("is a pickle, which could run code when it is read; convert it", base, tmp_path / "heads.pt")
    (tmp_path / "empty").mkdir()
    refused("there are no heads in", base, tmp_path / "empty")
    refused("there are no heads in", base, base)
    folder = tokenswift_model(base, tmp_path / "m")
    lone = tmp_path / "lone"
    lone.mkdir()
    shutil.copy(folder / "model-extra.safetensors", lone)
    refused("has no rms_norm_eps in the configuration beside it", base, lone / "model-extra.safetensors")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    (lone / "model.safetensors.index.json").write_text(json.dumps({**index, "weight_map": 3}))
    refused("has no weight_map", base, lone)


def test_a_shard_of_another_folder_is_not_read(base: Path, tmp_path: Path) -> None:
    folder = tokenswift_model(base, tmp_path / "m")
    shutil.move(folder / "model-extra.safetensors", tmp_path)
    path = folder / "model.safetensors.index.json"
    path.write_text(path.read_text().replace("model-extra", "../model-extra"))
    with pytest.raises(InputError, match="there are no heads in"):
        find_heads(folder)


def test_a_model_without_a_final_norm_that_is_known(base: Path, tmp_path: Path) -> None:
    folder = tmp_path / "m"
    opt = ARCHITECTURES["OPT"]
    checkpoint(replace(opt, settings={**opt.settings, "do_layer_norm_before": False}), folder)
    refused("does not go with this model, which has no final norm", folder, tokenswift_model(base, tmp_path / "t"))
