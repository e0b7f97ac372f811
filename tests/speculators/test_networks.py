"""Published drafters: recognised, every tensor accounted for,
and each kind's logits those of a dense recomputation.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config

from benchmarks.architectures import ARCHITECTURES
from tests.drafters import (
    BLOCK,
    DRAFT_LAYERS,
    HIDDEN,
    IN_PLACE,
    LAYERS,
    LAYOUTS,
    MASK,
    SIZES,
    TAPS,
    VOCAB,
    WINDOW,
    Dense,
    config_of,
    drafter_folder,
    qwen3,
    target_of,
    tensors_of,
)
from tests.helpers import CACHE, CPU, first, needs_program, random_prompt, refused
from tswift.caches import FullKV, WindowKV
from tswift.drafting.options import DraftOptions
from tswift.engine import Request, begin
from tswift.forward.cpu.products import PackedLinear
from tswift.forward.passes import Nodes
from tswift.forward.target import Target
from tswift.loading.model import load as load_model
from tswift.loading.plan import plan_model
from tswift.models import shapes
from tswift.models.checkpoint import SHAPES
from tswift.models.config import ModelConfig
from tswift.speculators.draft_network import DraftNetwork
from tswift.speculators.drafter_files import describe_drafter, find_drafter, published_spec
from tswift.speculators.networks import count_weights

BUDGET, SINKS = 12, 2


def load(folder: Path) -> DraftNetwork:
    return find_drafter(folder).load(target_of())


def config_with(**changes: int) -> Qwen3Config:
    """The target's, with other sizes."""
    config = deepcopy(qwen3().config)
    for name, value in changes.items():
        setattr(config, name, value)
    return config


def tapped(target: Target, text: Sequence[int]) -> torch.Tensor:
    """Taps of a text, by passes of several sizes."""
    kv = FullKV(target.kv_shape, len(text))
    found = []
    for start, end in ((0, 5), (5, 6), (6, len(text))):
        tokens = torch.tensor(text[start:end])
        found.append(target.forward(Nodes(tokens, torch.arange(start, end), kv, None)).layer_states)
        kv.commit(range(end - start))
    return torch.cat(found)


def window(network: DraftNetwork, budget: int, scratch: int) -> WindowKV:
    return WindowKV(network.spec.kv_shape(torch.float64, CPU), budget, SINKS, scratch)


@torch.inference_mode()
def remembered(
    network: DraftNetwork, text: Sequence[int], taps: torch.Tensor, kv: WindowKV, new: range
) -> torch.Tensor:
    """Take tokens of a text into a window; returns the state after the last."""
    places = kv.staying(new)
    at, slots = torch.tensor(places), torch.tensor([kv.slot(place) for place in places])
    state = network.remember(taps[at], torch.tensor(text)[at + 1], at, slots, kv, kv)
    kv.hold(slots)
    return state[-1:]


@needs_program
def test_in_float32_a_processor_rounds_layers_to_8_bits(tmp_path):
    text = random_prompt(40, 1, VOCAB)
    folder = drafter_folder(tmp_path, "eagle-safeai")
    found = []
    for dtype in (torch.float64, torch.float32):
        network = find_drafter(folder).load(target_of(dtype=dtype))
        packed = [each for each in network.modules() if isinstance(each, PackedLinear)]
        assert len(packed) == (9 if dtype == torch.float32 else 0)
        found.append(network.fc(tapped(network.target, text)).double())
    assert 0 < float((found[1] - found[0]).abs().max()) < 0.05 * float(found[0].std())


def test_the_name_that_others_give_to_dspark(tmp_path):
    named = drafter_folder(tmp_path, "dspark", {"architectures": ["DSparkDraftModel"]})
    assert find_drafter(named).spec == find_drafter(drafter_folder(tmp_path / "own", "dspark")).spec


@pytest.mark.parametrize("budget", first(1, [BUDGET, 64]))
@pytest.mark.parametrize("layout", first(2, LAYOUTS[::-1]))
def test_logits_are_those_of_a_dense_recomputation(layout, budget, tmp_path):
    network = load(drafter_folder(tmp_path, layout))
    text = random_prompt(30, 3, VOCAB)
    levels = min(3, network.spec.count)
    beam = 2
    kv = window(network, budget, network.spec.slots(levels, beam))
    state = remembered(network, text, tapped(network.target, text[:-1]), kv, range(len(text) - 1))
    with torch.inference_mode():
        root, place = torch.tensor(text[-1:]), torch.tensor([len(text) - 1])
        begun = network.begin(state, root, place, kv, kv.held)
        # two branches that part at once, and swap places
        found = [begun(0, None, root)]
        found.append(begun(1, torch.tensor([0, 0]), torch.tensor([7, 8])))
        found.append(begun(2, torch.tensor([1, 0]), torch.tensor([20, 21])))
    dense = Dense(layout, qwen3())
    seen = dense.window(len(text) - 1, budget, SINKS)
    paths = [[[]], [[7], [8]], [[8, 20], [7, 21]]]
    block = None if "eagle" in layout else dense.block(text, seen)
    for level, rows in enumerate(paths):
        for row, path in enumerate(rows):
            ours = found[level][min(row, len(found[level]) - 1)]
            theirs = (
                dense.eagle(text, path, seen)
                if block is None
                else dense.biased(block, [text[-1], *path])
            )
            inside = theirs > -torch.inf
            assert (ours[~inside] < -1000).all()
            ours = ours[inside]
            theirs = theirs[inside]
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def test_a_block_is_that_of_transformers_own_module(tmp_path):
    """Muse-Glimmer's assistant: as saved, with a window in one layer, the model's embeddings as
    they are stored.
    """
    module = pytest.importorskip(
        "transformers.models.muse_glimmer_assistant.modeling_muse_glimmer_assistant"
    )
    from transformers import MuseGlimmerAssistantConfig
    from transformers.cache_utils import DFlashCache

    known = config_of("dflash-sliding")
    sizes = {name: known[name] for name in SIZES if name != "vocab_size"}
    kinds = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW}
    own = {"target_layer_ids": [*TAPS], "mask_token_id": MASK, "block_size": BLOCK}
    config = MuseGlimmerAssistantConfig(**sizes, **kinds, **own, num_hidden_layers=DRAFT_LAYERS)
    theirs = module.MuseGlimmerAssistantModel(config)
    renamed = {
        "fc.weight": "encoder.fc.weight",
        "hidden_norm.weight": "encoder.output_norm_enc.weight",
    }
    theirs.load_state_dict(
        {renamed.get(name, name): value for name, value in tensors_of("dflash").items()}
    )
    theirs.save_pretrained(tmp_path)
    found = find_drafter(tmp_path)
    assert (found.spec.kind, found.spec.vocab_size, found.layout) == (
        "dflash",
        0,
        "Muse-Glimmer's assistant",
    )
    found.refuse_misfit(qwen3().config)
    with refused("has mask_token_id 96, the vocabulary has 96"):
        found.refuse_misfit(config_with(vocab_size=VOCAB - 1))
    network = found.load(target_of())
    text = random_prompt(20, 4, VOCAB)
    kv = window(network, 64, BLOCK)
    state = remembered(network, text, tapped(network.target, text[:-1]), kv, range(len(text) - 1))
    root = torch.tensor(text[-1:])
    begun = network.begin(state, root, torch.tensor([len(text) - 1]), kv, kv.held)
    config._attn_implementation = "eager"
    noise = qwen3().get_input_embeddings().weight.detach()[[text[-1]] + [MASK] * (BLOCK - 1)]
    taps = Dense("dflash", qwen3()).taps(text[:-1])
    cache = DFlashCache(config=config)
    cache.set_previous_accepted_tokens(len(taps))
    with torch.no_grad():
        out = theirs.double().eval()(
            noise_embeds=noise[None], context_hidden_states=taps[None], **{CACHE: cache}
        )
        logits = qwen3().lm_head(out.last_hidden_state[0, 1:])
    ours = torch.cat([begun(level, None, root) for level in range(BLOCK - 1)])
    torch.testing.assert_close(ours, logits, rtol=1e-5, atol=1e-5)


def test_embeddings_as_they_are_stored():
    """Not as a model's layers read them: scaled or normed."""
    target = Target(ARCHITECTURES["Gemma 3 (windows)"].make(VOCAB).double())
    tokens = torch.tensor([3, 5])
    stored = target.model.get_input_embeddings().weight
    torch.testing.assert_close(target.embed(tokens, 2.0), stored[tokens] * 2)
    assert not torch.equal(target.embed(tokens), stored[tokens])


def test_a_window_after_many_commits_is_made_from_scratch(tmp_path):
    text = random_prompt(60, 5, VOCAB)
    for layout in ("dspark", "eagle-safeai"):
        network = load(drafter_folder(tmp_path / layout, layout))
        taps = tapped(network.target, text[:-1])
        caches = []
        for sizes in ([59], [7, 1, 3, 2, 20, 1, 5, 1, 1, 4, 3, 11]):
            kv = window(network, BUDGET, 8)
            start = 0
            for size in sizes:
                remembered(network, text, taps, kv, range(start, start + size))
                # what a round leaves is not looked at
                kv.buffers[0][:, :, kv.scratch :] = torch.nan
                start += size
            assert start == 59
            caches.append(kv)
        for once, often in zip(*(kv.buffers for kv in caches), strict=True):
            once = once[:, :, :BUDGET]
            often = often[:, :, :BUDGET]
            torch.testing.assert_close(once, often, rtol=1e-12, atol=1e-12)
        assert caches[0].held.tolist() == caches[1].held.tolist() == [True] * BUDGET + [False] * 9


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_a_folder_holds(layout, tmp_path):
    found = describe_drafter(drafter_folder(tmp_path, layout))
    kinds = {"eagle": "eagle3", "dspark": "dspark", "dflash2": "dflash2"}
    kind = kinds.get(layout.partition("-")[0], "dflash")
    assert found["kind"] == kind
    assert (found["hidden_size"], found["vocab_size"]) == (HIDDEN, VOCAB)
    own = kind == "eagle3" or layout == "dflash-speculators"  # it has an LM head
    assert found["draft_vocab"] == (40 if own else VOCAB)
    assert found["count"] == {
        **dict.fromkeys(IN_PLACE, 3),
        "eagle-safeai": 6,
        "eagle-speculators": 6,
    }.get(layout, 4)
    assert found["taps"] == {"eagle-safeai": None, "eagle-speculators": (1, 2, 5)}.get(
        layout, (1, 4)
    )
    kept = {
        "t2d",
        "d2t",
        *(() if kind == "eagle3" else ("embed_tokens.weight",)),
        *(() if own else ("lm_head.weight",)),
    }
    read = {
        n: t
        for n, t in tensors_of(layout).items()
        if n not in kept and not n.startswith("confidence")
    }
    assert found["parameters"] == sum(weight.numel() for weight in read.values())


def test_taps_by_every_convention(tmp_path):
    """Ids that begin with 1 name layers, others what goes into them (SGLang, pull request 25454).

    z-lab's rule where the ids are missing: round(1 + i (N - 4) / (layers - 1)).
    """
    rows: list[tuple[str, dict[str, object], tuple[int, ...]]] = [
        ("dflash", {"dflash_config": {"mask_token_id": 96}, "num_target_layers": LAYERS}, (1, 5))
    ]
    for ids in ([1, 3, 4], [2, 4, 5]):
        said = {"eagle_aux_hidden_state_layer_ids": ids}
        rows += [
            ("eagle-safeai", {"eagle_config": said}, (1, 3, 4)),
            ("eagle-speculators", said, (1, 3, 4)),
        ]
    said = {"speculators_model_type": None, "architectures": ["Qwen3Eagle3Model"]}
    said |= {"eagle_aux_hidden_state_layer_ids": None, "target_layer_ids": [1, 2, 5]}
    rows.append(("eagle-speculators", said, (1, 2, 5)))
    for number, (layout, config, taps) in enumerate(rows):
        assert (
            find_drafter(drafter_folder(tmp_path / str(number), layout, config)).spec.taps == taps
        )


@pytest.mark.parametrize(
    ("layout", "config", "tensors", "reason"),
    [
        ("dspark", {}, {"layers.1.mlp.up_proj.weight": None}, "lacks layers.1.mlp.up_proj.weight"),
        (
            "dspark",
            {"markov_rank": 0},
            {},
            "has confidence_head.proj.weight of shape [1, 40], where [1, 32] belongs",
        ),
        (
            "dspark",
            {},
            {"confidence_head.proj.bias": None},
            "lacks confidence_head.proj.bias",
        ),
        ("dspark", {"markov_head_type": "odd"}, {}, "has markov_head_type 'odd'"),
        (
            "dspark",
            {},
            {"q.weight": torch.ones(1)},
            "has q.weight, which no dspark drafter of its configuration has",
        ),
        (
            "dflash",
            {},
            {"fc.weight": torch.ones(32, 96)},
            "has fc.weight of shape [32, 96], where [32, 64] belongs",
        ),
        ("dflash", {"block_size": None}, {}, "says nothing of block_size"),
        ("dflash", {"num_hidden_layers": 1000}, {}, "says num_hidden_layers 1000, and its"),
        (
            "dflash",
            {"layer_types": ["sliding_attention"] * 2, "use_sliding_window": True},
            {},
            "says nothing of sliding_window",
        ),
        ("dflash", {"layer_types": ["sliding_attention"]}, {}, "has layers of sliding attention"),
        (
            "eagle-safeai",
            {"layer_types": ["sliding_attention"]},
            {},
            "has layers of sliding attention",
        ),
        ("dflash", {"dflash_config": {"mask_token_id": 97}}, {}, "has mask_token_id 97"),
        (
            "dflash",
            {"rope_scaling": {"type": "dynamic"}},
            {},
            "has rotary embeddings of type 'dynamic'",
        ),
        (
            "dflash",
            {"rope_scaling": {"type": "yarn"}},
            {},
            "makes no drafter of its config.json (KeyError",
        ),
        ("dflash", {"layer_types": 3}, {}, "has layers of sliding attention"),
        ("dflash", {"hidden_size": "32"}, {}, "has hidden_size '32'"),
        (
            "eagle-safeai",
            {},
            {"midlayer.hidden_norm.weight": None},
            "lacks midlayer.hidden_norm.weight",
        ),
        (
            "dflash2-speculators",
            {"conv_group_size": 5},
            {},
            "has convolutions of 2 taps in groups of 5",
        ),
        ("dflash2-speculators", {"selector_top_k": 98}, {}, "has selector_top_k 98"),
        ("dflash2-speculators", {"draft_vocab_size": 40}, {}, "has a draft vocabulary"),
        ("eagle-safeai", {}, {"d2t": None}, "lacks d2t"),
        ("eagle-safeai", {"norm_before_fc": True}, {}, "lacks input_norm.weight"),
        (
            "eagle-speculators",
            {"speculators_model_type": "eagle"},
            {},
            "holds no drafter of a known kind",
        ),
    ],
)
def test_refusals_by_header(layout, config, tensors, reason, tmp_path):
    if config.get("dflash_config"):
        config = {
            "dflash_config": {**config_of(layout)["dflash_config"], **config["dflash_config"]}
        }
    folder = drafter_folder(tmp_path, layout, config, tensors)
    with refused() as error:
        find_drafter(folder)
    assert str(error.value).startswith(f"drafter: {folder} {reason}")
    assert "\n" not in str(error.value)
    assert error.value.field == "drafter"


def test_pickles_are_not_read(tmp_path):
    folder = drafter_folder(tmp_path, "eagle-safeai")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with refused(r"only pytorch_model.bin, a pickle"):
        find_drafter(folder)


def test_another_target_is_refused_by_its_sizes(tmp_path):
    found = find_drafter(drafter_folder(tmp_path, "dspark", {"num_target_layers": LAYERS}))
    found.refuse_misfit(qwen3().config)
    for name, size, reason in (
        ("hidden_size", 16, "hidden size 32, the model has 16"),
        ("vocab_size", 98, "a vocabulary of 97, the model has 98"),
        ("num_hidden_layers", 5, "a model of 8 layers, this one has 5"),
    ):
        with refused(reason):
            found.refuse_misfit(config_with(**{name: size}))
    found = find_drafter(drafter_folder(tmp_path, "dspark"))
    with refused("reads the states after layers 1, 4"):
        found.refuse_misfit(config_with(num_hidden_layers=5))


@pytest.mark.parametrize(
    ("layout", "name", "value", "reason"),
    [
        (
            "dspark",
            "lm_head.weight",
            torch.ones(VOCAB, HIDDEN),
            "another model: its lm_head.weight",
        ),
        (
            "dspark",
            "norm.weight",
            torch.full((HIDDEN,), torch.nan),
            "norm.weight holds something else than finite",
        ),
        ("eagle-safeai", "d2t", torch.full((40,), 90), "d2t leads outside the vocabulary"),
    ],
)
def test_broken_weights_are_refused(layout, name, value, reason, tmp_path):
    with refused(reason):
        load(drafter_folder(tmp_path, layout, tensors={name: value}))


@pytest.mark.parametrize(("model", "size"), [("qwen3-4b", 2.79e9), ("qwen3-8b", 4.74e9)])
def test_published_sizes(model, size):
    """DeepSpec's checkpoints in bfloat16, copies of embeddings and LM head among them."""
    config = SHAPES[model]
    spec = published_spec("dspark", config)
    copies = 2 * config.vocab_size * config.hidden_size
    assert 2 * (count_weights(spec) + copies) == pytest.approx(size, rel=0.005)
    assert spec.taps == (1, 9, 17, 25, 33)


@pytest.mark.parametrize("kind", ["dspark", "dflash", "eagle3"])
def test_random_drafters_have_nothing_of_a_model_but_its_sizes(kind):
    for config in SHAPES.values():
        spec = published_spec(kind, config)
        assert (spec.kind, spec.sliding, spec.rope["rope_type"]) == (kind, (), "default")
        assert (spec.taps is None) == (kind == "eagle3")


def test_shapes_have_random_drafters(monkeypatch):
    monkeypatch.setitem(SHAPES, "small", qwen3().config)
    monkeypatch.setattr(shapes, "_NOISE", 4099)
    for kind, method in (("dspark", "block"), ("dflash", "block"), ("eagle3", "eagle")):
        model = load_model("shape:small", dtype="float64", attention="sdpa", drafter=kind)
        assert model.simulated
        assert model.about()["drafter"] == {"name": kind, "kind": kind}
        spec = plan_model(ModelConfig(model="shape:small", dtype="float64", drafter=kind))
        assert spec.speculator_spec == model.target.speculator_spec
        assert spec.loaded_bytes["drafter"] == sum(
            weight.nbytes for weight in model.target.speculator.parameters()
        )
        begun = begin(
            model,
            Request(
                prompt=random_prompt(20),
                length=8,
                method=method,
                options=DraftOptions(budget=64, tree=(1, 1)),
            ),
        )
        assert sum(len(step.tokens) for step in begun.steps()) == 8
