"""Published drafters made for a test: synthetic folders in the exact formats,
and a dense recomputation.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from benchmarks.architectures import ARCHITECTURES
from tests.helpers import seeded
from tswift.forward.target import Target
from tswift.models.checkpoint import Checkpoint
from tswift.speculators.mtp_files import native_head

HIDDEN, HEADS, KV_HEADS, SIZE, INNER, VOCAB, LAYERS = 32, 4, 2, 16, 48, 97, 8  # of the target
TAPS = (1, 4)
BLOCK = 4
MASK = 96
RANK = 8
DRAFT_VOCAB = 40
DRAFT_LAYERS = 2
EPS, THETA = 1e-6, 10_000.0
WINDOW = 5  # of layers that slide
RECURRENT = "Qwen3.5 to 3.8 (gated delta nets)"
LAYOUTS = (
    *("dspark", "deepspec-dflash", "dflash", "eagle-safeai", "eagle-speculators"),
    *("dspark-speculators", "dflash-speculators", "dflash-sliding", "dflash2-speculators"),
    "dflash2",
)
IN_PLACE = tuple(layout for layout in LAYOUTS if layout.startswith("dflash"))
# layers
SLIDING = {
    "dflash-speculators": (0,),
    "dflash-sliding": (0, 1),
    "dflash2-speculators": (1,),
    "dflash2": (0, 1),
}
MOVING = ("dflash-sliding", "dflash2")  # whose windows end at each slot
FACTOR, CAP, SCALE = 0.3, 5.0, 1.7  # of what an LM head gives, and of embeddings (z-lab's DFlash2)
GROUP, CHOSEN = 8, 11  # channels that share a weight, and candidates that are scored (DFlash2)
SIZES = {
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": SIZE,
    "vocab_size": VOCAB,
    "rms_norm_eps": EPS,
    "rope_theta": THETA,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
}


@functools.cache
def qwen3(dtype: torch.dtype = torch.float64) -> Qwen3ForCausalLM:
    """The target, with peaked distributions; the same weights at every call."""
    sizes = {
        **SIZES,
        "num_hidden_layers": LAYERS,
        "max_position_embeddings": 16_384,
        "initializer_range": 0.3,
    }
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return Qwen3ForCausalLM(Qwen3Config(**sizes, tie_word_embeddings=False)).to(dtype).eval()


@functools.cache
def qwen35(dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    """A model with recurrent layers, whose configuration tells of an MTP head."""
    known = ARCHITECTURES[RECURRENT]
    kinds = ["linear_attention", "linear_attention", "full_attention", "linear_attention"]
    more = {"num_hidden_layers": len(kinds), "layer_types": kinds, "mtp_num_hidden_layers": 1}
    with torch.random.fork_rng():
        made = replace(known, settings={**known.settings, **more}).make(VOCAB)
    return made.to(dtype).eval()


def load_own_head(target: Target):
    """Have a random MTP head for such a model."""
    checkpoint = Checkpoint("shape:recurrent", "", None)
    checkpoint.__dict__["config"] = target.model.config
    found = native_head(checkpoint)
    assert found is not None
    with torch.random.fork_rng():
        torch.manual_seed(4)
        found.load(target)


def target_of(dtype: torch.dtype = torch.float64) -> Target:
    """A new wrapper of the target: each drafter taps one of its own."""
    from copy import deepcopy

    return Target(deepcopy(qwen3(dtype)))


def _attention(width: int, normed: bool) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj": (HEADS * SIZE, width),
        "self_attn.k_proj": (KV_HEADS * SIZE, width),
        "self_attn.v_proj": (KV_HEADS * SIZE, width),
        "self_attn.o_proj": (HIDDEN, HEADS * SIZE),
        "mlp.gate_proj": (INNER, HIDDEN),
        "mlp.up_proj": (INNER, HIDDEN),
        "mlp.down_proj": (HIDDEN, INNER),
        "input_layernorm": (HIDDEN,),
        "post_attention_layernorm": (HIDDEN,),
    }
    return shapes | ({"self_attn.q_norm": (SIZE,), "self_attn.k_norm": (SIZE,)} if normed else {})


def _shapes(layout: str) -> dict[str, tuple[int, ...]]:
    """Shapes by name, ``.weight`` left out, as DRAFTERS.md lists them."""
    if layout.startswith("eagle"):
        prefix = "midlayer." if layout == "eagle-safeai" else "layers.0."
        own = {**_attention(2 * HIDDEN, False), "hidden_norm": (HIDDEN,)}
        shapes = {prefix + name: shape for name, shape in own.items()}
        shapes |= {"fc": (HIDDEN, 3 * HIDDEN), "norm": (HIDDEN,), "lm_head": (DRAFT_VOCAB, HIDDEN)}
        return shapes | ({"embed_tokens": (VOCAB, HIDDEN)} if layout == "eagle-speculators" else {})
    shapes = {"fc": (HIDDEN, len(TAPS) * HIDDEN), "hidden_norm": (HIDDEN,), "norm": (HIDDEN,)}
    for index in range(DRAFT_LAYERS):
        shapes |= {
            f"layers.{index}.{name}": shape for name, shape in _attention(HIDDEN, True).items()
        }
    if layout == "dflash-speculators":
        shapes["lm_head"] = (DRAFT_VOCAB, HIDDEN)
    if layout.startswith("dflash2"):
        for index in range(DRAFT_LAYERS):
            for part in ("attention_conv", "mlp_conv"):
                name = f"layers.{index}.{part}"
                shapes[f"{name}.base_kernel"] = (2, 2, HIDDEN)
                shapes[f"{name}.kernel_projection"] = (4 * HIDDEN // GROUP, HIDDEN)
        for codes in ("predecessor", "successor"):
            shapes[f"candidate_selector.{codes}_codebook"] = (VOCAB, RANK)
        shapes["candidate_selector.hidden_projection"] = (RANK, HIDDEN)
    if layout.startswith("dspark"):
        shapes |= {"markov_head.markov_w1": (VOCAB, RANK), "markov_head.markov_w2": (VOCAB, RANK)}
        shapes |= {"confidence_head.proj": (1, HIDDEN + RANK)}
    return shapes


def config_of(layout: str) -> dict[str, Any]:
    """The published configuration."""
    sizes = {"model_type": "qwen3", **SIZES, "num_hidden_layers": DRAFT_LAYERS}
    if layout == "eagle-safeai":
        sizes |= {"model_type": "llama", "num_hidden_layers": 1, "draft_vocab_size": DRAFT_VOCAB}
        return {"architectures": ["LlamaForCausalLM"], **sizes}
    if layout == "eagle-speculators":
        inner = {**sizes, "model_type": "llama", "num_hidden_layers": 1}
        own = {
            "draft_vocab_size": DRAFT_VOCAB,
            "norm_before_residual": True,
            "target_hidden_size": None,
        }
        return {
            "speculators_model_type": "eagle3",
            "architectures": ["Eagle3Speculator"],
            **own,
        } | {"transformer_layer_config": inner, "eagle_aux_hidden_state_layer_ids": [2, 3, 6]}
    if layout in ("dspark-speculators", "dflash-speculators", "dflash2-speculators"):
        kinds = [
            f"{'sliding' if index in SLIDING.get(layout, ()) else 'full'}_attention"
            for index in range(2)
        ]
        own = {
            "block_size": BLOCK,
            "mask_token_id": MASK,
            "aux_hidden_state_layer_ids": [tap + 1 for tap in TAPS],
        }
        own |= {"draft_vocab_size": DRAFT_VOCAB if layout == "dflash-speculators" else VOCAB}
        if layout == "dflash2-speculators":
            own |= {"conv_group_size": GROUP, "selector_rank": RANK, "selector_top_k": CHOSEN}
        else:
            own["sliding_window_non_causal"] = False
        if layout == "dspark-speculators":
            own |= {"markov_rank": RANK, "enable_confidence_head": True, "sample_from_anchor": True}
        inner = {
            **sizes,
            "layer_types": kinds,
            "sliding_window": WINDOW,
            "use_sliding_window": True,
        }
        return {
            "speculators_model_type": layout.partition("-")[0],
            "transformer_layer_config": inner,
            **own,
        }
    if layout in MOVING:
        own = {"mask_token_id": MASK, "target_layer_ids": list(TAPS), "block_size": BLOCK}
        said = {
            "architectures": ["DFlashDraftModel"],
            **sizes,
            "layer_types": ["sliding_attention"] * DRAFT_LAYERS,
            "sliding_window": WINDOW,
            "use_sliding_window": True,
            "is_causal": False,
            "num_target_layers": LAYERS,
        }
        if layout == "dflash2":
            said["architectures"] = ["DFlash2DraftModel"]
            own |= {"conv_group_size": GROUP, "conv_kernel_size": 2}
            own |= {"selector_rank": RANK, "selector_top_k": CHOSEN}
            own |= {"output_multiplier": FACTOR, "final_logit_softcapping": CAP}
            own["input_embedding_scale"] = SCALE
        return {**said, "dflash_config": own}
    if layout == "dflash":
        own = {"mask_token_id": MASK, "target_layer_ids": list(TAPS)}
        return {
            "architectures": ["DFlashDraftModel"],
            **sizes,
            "block_size": BLOCK,
            "dflash_config": own,
        }
    said = {"target_layer_ids": list(TAPS), "block_size": BLOCK, "mask_token_id": MASK}
    rank = 0 if layout == "deepspec-dflash" else RANK
    said |= {"markov_rank": rank, "markov_head_type": "vanilla", "enable_confidence_head": rank > 0}
    return {
        "architectures": ["Qwen3DSparkModel"],
        **sizes,
        **said,
        "layer_types": ["full_attention"] * DRAFT_LAYERS,
    }


@functools.cache
def tensors_of(layout: str) -> dict[str, Tensor]:
    """Random weights by their published names, float32."""
    random = seeded(11)
    found = {}
    for name, shape in _shapes(layout).items():
        weight = torch.randn(shape, generator=random)
        bare = name.endswith(("base_kernel", "codebook"))
        stored = name if bare else f"{name}.weight"
        found[stored] = 1 + 0.2 * weight if len(shape) == 1 else 0.3 * weight
        if name.startswith("confidence_head"):
            found[f"{name}.bias"] = 0.3 * torch.randn(shape[0], generator=random)
    if layout.startswith("eagle") or layout == "dflash-speculators":
        ids = torch.randperm(VOCAB, generator=random)[:DRAFT_VOCAB].sort().values
        found["d2t"] = ids - torch.arange(DRAFT_VOCAB)
        found["t2d"] = torch.isin(torch.arange(VOCAB), ids)
    elif layout in ("dspark", "deepspec-dflash"):
        own = qwen3()
        found["embed_tokens.weight"] = own.model.embed_tokens.weight.detach().float()
        found["lm_head.weight"] = own.lm_head.weight.detach().float()
    return found


def drafter_folder(
    folder: Path,
    layout: str,
    config: Mapping[str, Any] | None = None,
    tensors: Mapping[str, Tensor | None] | None = None,
) -> Path:
    """Write a drafter as it is published, with changes;
    None takes a tensor or an entry of the configuration away.
    """
    folder.mkdir(parents=True, exist_ok=True)
    said = {
        name: value
        for name, value in {**config_of(layout), **(config or {})}.items()
        if value is not None
    }
    (folder / "config.json").write_text(json.dumps(said))
    kept = {
        name: value
        for name, value in {**tensors_of(layout), **(tensors or {})}.items()
        if value is not None
    }
    save_file(
        {name: value.contiguous() for name, value in kept.items()}, folder / "model.safetensors"
    )
    return folder


# ---- dense recomputation: no cache, no window, no tree


def _norm(rows: Tensor, weight: Tensor) -> Tensor:
    return rows * (rows.pow(2).mean(-1, keepdim=True) + EPS).rsqrt() * weight.to(rows)


def _rotate(rows: Tensor, places: Tensor) -> Tensor:
    """``[n, heads, d]`` to places ``[n]``."""
    rates = 1 / THETA ** (torch.arange(0, SIZE, 2).float() / SIZE)
    angles = (places.float()[:, None] * rates).repeat(1, 2)[:, None]
    half = torch.cat([-rows[..., SIZE // 2 :], rows[..., : SIZE // 2]], -1)
    return rows * angles.cos().to(rows) + half * angles.sin().to(rows)


class Dense:
    """A drafter's logits from published tensors and taps of the whole text, in float64."""

    def __init__(self, layout: str, network):
        self.layout, self.network = layout, network
        self.weights = {name: value.double() for name, value in tensors_of(layout).items()}

    def _w(self, name: str) -> Tensor:
        return self.weights[f"{name}.weight"]

    def _keys(self, prefix: str, rows: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = (
            (rows @ self._w(f"{prefix}.{each}_proj").T).unflatten(-1, (KV_HEADS, SIZE))
            for each in "kv"
        )
        normed = f"{prefix}.k_norm.weight" in self.weights
        return _rotate(_norm(keys, self._w(f"{prefix}.k_norm")) if normed else keys, places), values

    def _attend(
        self, prefix: str, rows: Tensor, places: Tensor, keys: Tensor, values: Tensor, mask: Tensor
    ) -> Tensor:
        queries = (rows @ self._w(f"{prefix}.q_proj").T).unflatten(-1, (HEADS, SIZE))
        if f"{prefix}.q_norm.weight" in self.weights:
            queries = _norm(queries, self._w(f"{prefix}.q_norm"))
        queries = _rotate(queries, places)
        keys, values = (each.repeat_interleave(HEADS // KV_HEADS, 1) for each in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", queries, keys) * SIZE**-0.5
        paid = scores.masked_fill(~mask, -torch.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", paid, values).flatten(1) @ self._w(f"{prefix}.o_proj").T

    def _mlp(self, prefix: str, rows: Tensor) -> Tensor:
        gate, up, down = (self._w(f"{prefix}.mlp.{name}_proj") for name in ("gate", "up", "down"))
        rows = _norm(rows, self._w(f"{prefix}.post_attention_layernorm"))
        rows, after = self._mixed(f"{prefix}.mlp_conv", rows)
        return after((torch.nn.functional.silu(rows @ gate.T) * (rows @ up.T)) @ down.T)

    def _mixed(self, name: str, rows: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Rows of a block after one of DFlash2's convolutions, and its other one:
        term by term; rows as they are where there is none.
        """
        if f"{name}.base_kernel" not in self.weights:
            return rows, lambda given: given
        base = self.weights[f"{name}.base_kernel"]
        told = (rows @ self._w(f"{name}.kernel_projection").T).view(len(rows), 2, 2, -1)

        def mixed(part: int, given: Tensor) -> Tensor:
            out = torch.zeros_like(given)
            for row in range(len(given)):
                for tap in range(min(2, row + 1)):
                    for at in range(HIDDEN):
                        factor = base[part, tap, at] + told[row, part, tap, at // GROUP]
                        out[row, at] += given[row - tap, at] * factor
            return out

        return mixed(0, rows), lambda given: mixed(1, given)

    def taps(self, text: Sequence[int]) -> Tensor:
        """``[n, M * H]`` of the text's tokens, by transformers' own pass."""
        ids = (
            (2, 4, 5)
            if self.layout == "eagle-safeai"
            else (2, 3, 6)
            if "eagle" in self.layout
            else (2, 5)
        )
        with torch.no_grad():
            states = self.network(torch.tensor([text]), output_hidden_states=True).hidden_states
        return torch.cat([states[index][0] for index in ids], -1)

    def window(self, length: int, budget: int, sinks: int) -> Tensor:
        """``[length]`` bool: which of the first tokens are seen."""
        place = torch.arange(length)
        return (place < sinks) | (place >= length - (budget - sinks))

    def block(self, text: Sequence[int], seen: Tensor) -> Tensor:
        """``[levels, V]``, without the bias of the token before,
        after a text whose last token is the root.
        """
        context = _norm(self.taps(text[:-1]) @ self._w("fc").T, self._w("hidden_norm"))[seen]
        old = torch.arange(len(text) - 1)[seen]
        new = torch.arange(BLOCK) + len(text) - 1
        embed, head = (
            get().weight
            for get in (self.network.get_input_embeddings, self.network.get_output_embeddings)
        )
        rows = embed[torch.tensor([text[-1]] + [MASK] * (BLOCK - 1))].detach()
        rows = rows * SCALE if self.layout == "dflash2" else rows
        everything = torch.ones(BLOCK, len(old) + BLOCK, dtype=torch.bool)
        near = everything.clone()
        near[:, : len(old)] = (
            new[:, None] - old < WINDOW if self.layout in MOVING else old >= len(text) - 1 - WINDOW
        )
        if self.layout == "dflash-speculators":
            near[:, len(old) :].tril_()
        for index in range(DRAFT_LAYERS):
            prefix = f"layers.{index}.self_attn"
            normed = _norm(rows, self._w(f"layers.{index}.input_layernorm"))
            normed, after = self._mixed(f"layers.{index}.attention_conv", normed)
            parts = [self._keys(prefix, context, old), self._keys(prefix, normed, new)]
            keys, values = (torch.cat(pair) for pair in zip(*parts, strict=True))
            sees = near if index in SLIDING.get(self.layout, ()) else everything
            rows = rows + after(self._attend(prefix, normed, new, keys, values, sees))
            rows = rows + self._mlp(f"layers.{index}", rows)
        self.hidden = _norm(rows, self._w("norm"))[int(self.layout in IN_PLACE) :]
        if "lm_head.weight" not in self.weights or "d2t" not in self.weights:
            logits = self.hidden @ head.detach().T
            return torch.tanh(logits * FACTOR / CAP) * CAP if self.layout == "dflash2" else logits
        return self._of_all(self.hidden @ self._w("lm_head").T)

    def _of_all(self, logits: Tensor) -> Tensor:
        full = torch.full((*logits.shape[:-1], VOCAB), -torch.inf, dtype=torch.float64)
        full[..., self.weights["d2t"].long() + torch.arange(DRAFT_VOCAB)] = logits
        return full

    def biased(self, logits: Tensor, path: Sequence[int]) -> Tensor:
        """``[V]`` of the slot after a path of tokens, the root first."""
        if self.layout.startswith("dflash2"):
            slot = logits[len(path) - 1]
            selector = "candidate_selector"
            best = slot.topk(CHOSEN).indices
            before = self.weights[f"{selector}.predecessor_codebook"][path[-1]]
            told = before * (self._w(f"{selector}.hidden_projection") @ self.hidden[len(path) - 1])
            full = torch.full_like(slot, -torch.inf)
            full[best] = slot[best] + self.weights[f"{selector}.successor_codebook"][best] @ told
            return full
        if not self.layout.startswith("dspark"):
            return logits[len(path) - 1]
        told = self._w("markov_head.markov_w1")[path[-1]]
        return logits[len(path) - 1] + self._w("markov_head.markov_w2") @ told

    def eagle(self, text: Sequence[int], path: Sequence[int], seen: Tensor) -> Tensor:
        """``[V]`` after a drafted path below the text's last token,
        -inf outside the draft vocabulary.
        """
        prefix = "midlayer" if self.layout == "eagle-safeai" else "layers.0"
        embed = self.weights.get(
            "embed_tokens.weight", self.network.get_input_embeddings().weight.detach()
        )
        states = self.taps(text[:-1]) @ self._w("fc").T
        tokens = [*text[1:]]
        seen = seen.clone()
        for drafted in [*path, None]:
            rows = torch.cat(
                [
                    _norm(embed[torch.tensor(tokens)], self._w(f"{prefix}.input_layernorm")),
                    _norm(states, self._w(f"{prefix}.hidden_norm")),
                ],
                -1,
            )
            places = torch.arange(len(rows))
            keys, values = self._keys(f"{prefix}.self_attn", rows, places)
            last = slice(len(rows) - 1, None)
            attended = self._attend(
                f"{prefix}.self_attn", rows[last], places[last], keys, values, seen[None]
            )
            before = (
                _norm(states, self._w(f"{prefix}.hidden_norm"))
                if "speculators" in self.layout
                else states
            )
            out = before[last] + attended
            out = out + self._mlp(prefix, out)
            if drafted is not None:
                states = torch.cat([states, out])
                tokens = [*tokens, drafted]
                seen = torch.cat([seen, seen.new_ones(1)])
        own = self._w("lm_head") @ _norm(out[0], self._w("norm"))
        return self._of_all(own)
