"""A model's own head for multi-token prediction: what it computes, where it is found;
no text changes by it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from benchmarks.architectures import ARCHITECTURES, checkpoint, stock
from benchmarks.mtp import StockHead, add_tensors
from tests.helpers import first, options_for, random_prompt, refused, tokens_of
from tswift.caches import FullKV, WindowKV
from tswift.decoding.loop import Decoding
from tswift.drafting.methods import make_drafter
from tswift.drafting.options import DraftOptions
from tswift.engine import generate
from tswift.forward.text import prefill
from tswift.loading.model import load
from tswift.sampling.parameters import SamplingParams

KIND = "Qwen3.5 to 3.8 (gated delta nets)"
MOE = "Qwen3.5 to 3.8 MoE (gated delta nets)"
NEXT = "Qwen3-Next (gated delta nets)"
MELLUM = "Mellum 2 (windows)"
GLM = "GLM-4.5 to 4.7 MoE"
KINDS = (KIND, MOE, NEXT, MELLUM, GLM)
ONE_BY_ONE = (NEXT, MELLUM, GLM)  # how their publishers write experts
BY_TRANSFORMERS = (MELLUM, GLM)  # transformers has a reader of their heads
pytestmark = pytest.mark.skipif(
    not ARCHITECTURES[KIND].there, reason="not in this version of transformers"
)

Head = StockHead | MtpModel


def random_head(model: PreTrainedModel) -> Head:
    """One by transformers' modules; of a model whose heads transformers reads, as it makes it."""
    with torch.random.fork_rng():
        torch.manual_seed(8)
        if hasattr(model.config, "num_mtp_layers"):
            head: Head = MtpModel(model, 1)
            parts = head.layers
        else:
            parts = head = StockHead(model)
        with torch.no_grad():
            for weight in [*parts.parameters(), *parts.buffers()]:
                nn.init.normal_(weight, std=0.3)
    return head


def in_the_publishers_layout(kind: str, head: Head, layers: int) -> dict[str, Tensor]:
    """The tensors of a head, named as its publisher's checkpoints name them."""
    if isinstance(head, StockHead):
        tensors = {f"mtp.{name}": each for name, each in head.state_dict().items()}
    else:
        ours = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc"}
        tensors = {}
        for name, each in head.layers[0].state_dict().items():
            part, _, rest = name.partition(".")
            if kind == GLM:
                named = {"mtp_block": "", "post_norm": "shared_head.norm."}.get(part, f"{part}.")
                tensors[f"model.layers.{layers}.{named}{rest}"] = each
            else:
                own = {**ours, "mtp_block": "layers.0", "post_norm": "norm"}
                tensors[f"mtp.{own[part]}.{rest}"] = each
    if kind in ONE_BY_ONE:
        tensors = one_by_one(tensors)
    if kind == GLM:  # which has copies, too
        for name in ("embed_tokens", "shared_head.head"):
            copied = head.embed_tokens if name == "embed_tokens" else head.shared_head
            tensors[f"model.layers.{layers}.{name}.weight"] = copied.weight
    return tensors


def one_by_one(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The matrices of all experts as those of each."""
    written = {}
    for name, each in tensors.items():
        base, _, kind = name.rpartition(".")
        if not base.endswith(".experts"):
            written[name] = each
            continue
        for expert, matrix in enumerate(each):
            if kind == "down_proj":
                written[f"{base}.{expert}.down_proj.weight"] = matrix
            else:
                gate, up = matrix.chunk(2)
                written |= {f"{base}.{expert}.gate_proj.weight": gate}
                written |= {f"{base}.{expert}.up_proj.weight": up}
    return written


def with_head(folder: Path, kind: str = KIND) -> tuple[PreTrainedModel, Head]:
    """Write a checkpoint that has one."""
    model = checkpoint(ARCHITECTURES[kind], folder)
    if kind == MELLUM and not hasattr(type(model.config), "num_mtp_layers"):
        pytest.skip("this version of transformers knows of no such head")
    head = random_head(model)
    add_tensors(folder, in_the_publishers_layout(kind, head, model.config.num_hidden_layers))
    return model, head


@torch.inference_mode()
def expected_logits(model: PreTrainedModel, head: Head, text: Tensor) -> Tensor:
    """Of what follows a text, by transformers' modules in float64."""
    model = stock(model)
    before = model.get_decoder()(text[None], use_cache=False).last_hidden_state[:, :-1]
    head.double()
    if isinstance(head, StockHead):
        model.set_attn_implementation("eager")
        return head(model, before, text[None, 1:])[0, -1]
    head.tie_with_main_model(model)
    head.set_experts_implementation("eager")
    places = torch.arange(len(text) - 1)[None]
    cache = MtpCache(config=head.config)
    return head(text[None, 1:], before, torch.ones_like(places), places, cache)[1][0, -1]


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_it_computes_what_layers_of_transformers_do(tmp_path, kind):
    """Over more tokens than a layer's window has, if it has one."""
    own, head = with_head(tmp_path, kind)
    target = load(str(tmp_path), device="cpu", dtype="float64", attention="sdpa").target
    network = target.speculator
    assert network is not None
    text = torch.tensor(random_prompt(40, 2, target.vocab_size))
    full = FullKV(target.kv_shape, 60)
    states = torch.cat([prefill(target, [token], full).hidden for token in text[:-1].tolist()])
    kv = WindowKV(network.spec.kv_shape(target.dtype, target.device), 50, 4, 8)
    places = torch.arange(len(text) - 1)
    kv.hold(places)
    last = network.remember(states, text[1:], places, places, kv, full)[-1:]
    found = network.begin(last, text[-1:], torch.tensor([len(text) - 1]), kv, kv.held)(
        0, None, text[-1:]
    )
    expected = expected_logits(own, head, text)
    torch.testing.assert_close(found[0], expected, rtol=0, atol=1e-5 * float(expected.std()))


@pytest.mark.parametrize("kind", BY_TRANSFORMERS)
def test_the_layout_is_the_one_that_transformers_reads(tmp_path, kind, monkeypatch):
    """So that the test above is of checkpoints as they are published."""
    _, head = with_head(tmp_path, kind)
    own = AutoModelForCausalLM.from_pretrained(tmp_path)
    if kind == GLM:  # it knows the number of layers of what is published alone
        behind = [rf"model\.layers\.{own.config.num_hidden_layers}\."]
        monkeypatch.setattr(own, "_keys_to_ignore_on_load_unexpected", behind)
    read = MtpModel.from_pretrained(own)
    for name, weight in head.layers.state_dict().items():
        assert torch.equal(read.layers.state_dict()[name], weight), name


@pytest.mark.parametrize("kind", first(2, (KIND, MELLUM, GLM, NEXT, MOE)))
def test_no_text_changes_by_it(tmp_path, kind):
    """And it drafts."""
    with_head(tmp_path, kind)
    how = {"exact": True} if kind == KIND else {"dtype": "float64"}
    model = load(str(tmp_path), device="cpu", attention="sdpa", **how)
    prompt = model.encode("The ship had lain")
    options = options_for("mtp", costs="nominal", nodes=12)
    steps = {"ar": [*generate(model, prompt, 24, method="ar")]}
    steps["mtp"] = [*generate(model, prompt, 24, method="mtp", options=options)]
    assert tokens_of(steps["mtp"]) == tokens_of(steps["ar"])
    assert max(step.nodes for step in steps["mtp"]) > 2
    assert model.about()["drafter"]["kind"] == "mtp"


@torch.inference_mode()
def test_after_many_rounds_it_offers_what_a_dense_recomputation_ranks_first(tmp_path):
    """On two levels, after tokens that were accepted and not; the second reads the head's own
    state.
    """
    own, head = with_head(tmp_path)
    target = load(str(tmp_path), device="cpu", dtype="float64", attention="sdpa").target
    own = stock(own)
    own.set_attn_implementation("eager")
    head.double()
    drafter: Any = make_drafter(
        "mtp", target, None, DraftOptions(tree=(2, 1), budget=128, shared_noise=False)
    )
    source = drafter.sources[0]
    propose = source.propose
    checked = []

    def noted(tree, context):
        text = torch.tensor([[*context.text]])
        states = own.get_decoder()(text, use_cache=False).last_hidden_state[:, :-1]
        tokens = text[:, 1:]
        for level in range(2):
            found = int(source._found[level, 0, 1])
            assert found == int(head(own, states, tokens)[0, -1].argmax())
            states = torch.cat([states, head.after(own, states, tokens)[:, -1:]], 1)
            tokens = torch.cat([tokens, torch.tensor([[found]])], 1)
        checked.append(text)
        propose(tree, context)

    source.propose = noted
    greedy = SamplingParams(temperature=0.0, penalty=1.0)
    steps = [*Decoding(target, random_prompt(20, 3, 200), greedy, 1, drafter, 24).steps()]
    assert len(checked) >= len(steps) - 1 > 5


@pytest.mark.parametrize("kind", first(1, (KIND, GLM)))
def test_a_model_without_one_is_refused(tmp_path, kind):
    checkpoint(ARCHITECTURES[kind], tmp_path)
    bare = load(str(tmp_path), device="cpu", attention="sdpa")
    with refused("mtp drafts with the model's own MTP head, and it has none"):
        generate(bare, "The ship", 5, method="mtp")


@pytest.mark.parametrize(
    ("kind", "name", "said"),
    [
        (KIND, "mtp.fc.weight", "has mtp.fc.weight of shape"),
        (NEXT, "mtp.layers.0.mlp.experts.3.up_proj.weight", "experts.3.up_proj.weight of shape"),
        (GLM, "model.layers.2.shared_head.norm.weight", "has model.layers.2.shared_head.norm"),
    ],
)
def test_a_head_of_other_sizes_is_refused(tmp_path, kind, name, said):
    model = checkpoint(ARCHITECTURES[kind], tmp_path)
    tensors = in_the_publishers_layout(kind, random_head(model), model.config.num_hidden_layers)
    assert name in tensors
    add_tensors(tmp_path, {**tensors, name: torch.zeros(3, 3)})
    with refused(re.escape(said)):
        load(str(tmp_path), device="cpu", attention="sdpa")
