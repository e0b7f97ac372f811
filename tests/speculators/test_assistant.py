"""Gemma 4's assistants draft what transformers' own class does,
from the model's own keys and values.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor

from benchmarks.architectures import ARCHITECTURES, checkpoint, drawn
from tests.helpers import CACHE, first, random_prompt, refused, seeded, tokens_of
from tswift.caches import FullKV, WindowKV
from tswift.decoding.loop import chunks
from tswift.drafting.options import DraftOptions
from tswift.engine import generate
from tswift.loading.model import LoadedModel, load
from tswift.sampling.parameters import SamplingParams
from tswift.speculators.assistant import AssistantSpeculator
from tswift.speculators.drafter_files import describe_drafter, find_drafter

Assistant = getattr(transformers, "Gemma4AssistantForCausalLM", None)
pytestmark = pytest.mark.skipif(Assistant is None, reason="this transformers has no assistants")
KINDS = (
    "Gemma 4 (K = V, other heads in global layers)",
    "Gemma 4 E (shared keys and values, embeddings by layer)",
)
PATHS = [[[]], [[7], [8]], [[8, 20], [7, 21]]]  # of drafts, level by level


def written(
    kind: str, folder: Path, clusters: bool
) -> tuple[LoadedModel, torch.nn.Module, torch.nn.Module]:
    """A model with an assistant, and transformers' own of both."""
    stock = checkpoint(ARCHITECTURES[kind], folder / "model").double().eval()
    text = stock.config.get_text_config()
    own = {
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "num_attention_heads": 4,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
        "use_double_wide_mlp": False,
        "num_kv_shared_layers": 3,
        "final_logit_softcapping": None,
        "vocab_size": text.vocab_size,
        "num_key_value_heads": 2,
    }
    parts = next(each for each in range(20, text.vocab_size) if text.vocab_size % each == 0)
    config = transformers.Gemma4AssistantConfig(
        text_config={**ARCHITECTURES[kind].settings, **own},
        backbone_hidden_size=text.hidden_size,
        use_ordered_embeddings=clusters,
        num_centroids=parts,
        centroid_intermediate_top_k=3,
    )
    with pytest.MonkeyPatch.context() as patch:  # 5.23 makes no model of its own configuration
        modes = property(lambda self: ["reuse"] * self.num_hidden_layers)
        patch.setattr(transformers.Gemma4TextConfig, "kv_sharing_modes", modes, raising=False)
        assistant = drawn(Assistant(config)).double().eval()
    if clusters:
        order = torch.randperm(text.vocab_size, generator=seeded(1))
        assistant.masked_embedding.token_ordering.copy_(order)
    assistant.save_pretrained(folder / "assistant")
    asked = {"dtype": "float64", "device": "cpu", "drafter": str(folder / "assistant")}
    return load(str(folder / "model"), **asked), stock, assistant


@torch.no_grad()
def as_published(stock, assistant, text: list[int], path: list[int]) -> Tensor:
    """``[V]`` logits after a text and drafts, by the loop of transformers' candidate generator."""
    stock.set_attn_implementation("eager")
    assistant.set_attn_implementation("eager")
    cache = transformers.DynamicCache()  # without a configuration windows are kept whole
    out = stock(
        torch.tensor([text[:-1]]), use_cache=True, output_hidden_states=True, **{CACHE: cache}
    )
    # of the last layers with some of their own, which 5.23 returns of E models alone
    kinds = stock.config.get_text_config().layer_types
    shared = {kind: (own.keys, own.values) for kind, own in zip(kinds, cache.layers, strict=False)}
    state = out.hidden_states[-1][:, -1:]
    place = torch.tensor([[len(text) - 1]])
    for token in [text[-1], *path]:
        embedded = stock.get_input_embeddings()(torch.tensor([[token]]))
        found = assistant(
            inputs_embeds=torch.cat([embedded, state], -1),
            position_ids=place,
            shared_kv_states=shared,
        )
        state = found.last_hidden_state
    return found.logits[0, -1]


@pytest.mark.parametrize("clusters", [False, True])
@pytest.mark.parametrize("kind", first(1, KINDS))
def test_logits_are_those_of_transformers_own_class(kind, clusters, tmp_path):
    model, stock, assistant = written(kind, tmp_path, clusters)
    target = model.target
    network = model.target.speculator
    assert isinstance(network, AssistantSpeculator)
    text = random_prompt(40, 3, target.vocab_size)
    full = FullKV(target.kv_shape, 64)
    count = len(text) - 1
    hidden = torch.cat([each.hidden for each in chunks(target, text[:-1], full, count)])
    kv = WindowKV(network.spec.kv_shape(target.dtype, target.device), 64, 4, 8)
    places = torch.arange(count)
    with torch.inference_mode():
        last = network.remember(hidden, torch.tensor(text[1:]), places, places, kv, full)[-1:]
        kv.hold(places)
        root = torch.tensor(text[-1:])
        begun = network.begin(last, root, torch.tensor([count]), kv, kv.held)
        found = [begun(0, None, root)]
        # two branches that part at once, and swap places
        found.append(begun(1, torch.tensor([0, 0]), torch.tensor([7, 8])))
        found.append(begun(2, torch.tensor([1, 0]), torch.tensor([20, 21])))
    for level, paths in enumerate(PATHS):
        for row, path in enumerate(paths):
            theirs = as_published(stock, assistant, text, path)
            ours = found[level][row]
            # norms are float32 in both
            inside = theirs > theirs.min() if clusters else torch.ones_like(theirs) > 0
            assert inside.sum() > 10
            assert (ours[~inside] < -1000).all()
            torch.testing.assert_close(ours[inside], theirs[inside], rtol=1e-5, atol=3e-5)


@pytest.mark.parametrize("kind", first(1, KINDS))
def test_texts_are_those_of_plain_decoding(kind, tmp_path):
    model, *_ = written(kind, tmp_path, True)
    prompt = random_prompt(100, 4, model.target.vocab_size)
    params = SamplingParams(min_p=0.0)
    options = DraftOptions(budget=64, costs="nominal")
    texts = []
    for method in ("ar", "eagle"):
        steps = list(
            generate(
                model, prompt, 30, method=method, params=params, seed=2,
                options=options if method == "eagle" else None,
            )
        )  # fmt: skip
        texts.append(tokens_of(steps))
    assert texts[0] == texts[1]
    assert max(step.nodes for step in steps) > 1


def test_what_a_folder_holds_and_whom_it_is_for(tmp_path):
    written(KINDS[0], tmp_path, False)
    folder = tmp_path / "assistant"
    told = describe_drafter(folder)
    assert (told["kind"], told["layers"], told["hidden_size"]) == ("assistant", 3, 24)
    found = find_drafter(folder)
    text = transformers.AutoConfig.from_pretrained(tmp_path / "model").get_text_config()
    found.refuse_misfit(text)
    for other in (
        transformers.Gemma4TextConfig(**ARCHITECTURES[KINDS[1]].settings, num_key_value_heads=2),
        transformers.LlamaConfig(),
    ):
        with refused("reads 1 KV heads of 32 in a layer of full_attention"):
            other.hidden_size, other.vocab_size = found.spec.tap_size, found.spec.vocab_size
            found.refuse_misfit(other)
    text.hidden_size = 33
    with refused("was made for hidden size 32, the model has 33"):
        found.refuse_misfit(text)
