"""How large keys and values can be, by the weights: the steps of a KV cache in 16 bits."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tswift.forward.cpu.parts import LayerParts, Unfit, in_float32, norm_weight, read_parts
from tswift.forward.cpu.products import PackedEmbedding, PackedLinear
from tswift.forward.passes import PROMPT_CHUNK


def integer_steps(network: PreTrainedModel) -> Tensor:
    """The finest steps in which 16 bits hold every key and value that the weights can give.

    Returns:
        As in :class:`~tswift.caches.KVShape`.

    Raises:
        Unfit: the modeling code is not known to put them together from a norm, a linear layer and a
            rotation.
    """
    config = network.config.get_text_config()
    parts = read_parts(network)
    width = parts.head_dim
    turned = max(abs(scale) for _, scale in parts.rotaries)
    share = 2 * len(parts.rotaries[0][0])  # of a head, which rotation mixes
    queries = config.num_attention_heads * width
    rows = config.num_key_value_heads * width

    def most(layer: LayerParts, name: str, before: int) -> Tensor:
        # what a norm puts out is at most the root of its size times its weights, and its product
        # with a row follows
        own = layer.linears[name]
        mine = slice(None) if own is not None else slice(queries + before, queries + before + rows)
        linear = own or layer.linears["queries"]
        norm = layer.norms["pre_attention_norm"]
        if not (isinstance(linear, PackedLinear) or type(linear.weight) is nn.Parameter):
            raise Unfit("its weights are quantised")
        weight = in_float32(linear.weight)[mine]
        # without a norm it reads the sum of the embedding and of what layers have added
        bound = weight.norm(dim=1) * (longest if norm is None else 0.0)
        for each in added if norm is None else [norm_weight(norm)]:
            bound += (weight * each).norm(dim=1) * config.hidden_size**0.5
        if linear.bias is not None:
            bound = bound + in_float32(linear.bias)[mine].abs()
        return bound.view(-1, width)

    bounds = []
    added: list[Tensor] = []  # by the norms of what layers have added
    longest = 0.0  # embedding
    if any(layer.norms["pre_attention_norm"] is None for layer in parts.layers):
        if any(
            layer.norms[name] is None
            for layer in parts.layers
            for name in ("post_attention_norm", "post_mlp_norm")
        ):
            raise Unfit("there are no bounds of its keys and values")
        longest = _longest_row(parts.embeddings, config.vocab_size) * abs(parts.embedding_scale)
    for layer in parts.layers:
        if layer.recurrent is not None:
            continue
        keys = most(layer, "keys", 0)
        values = most(layer, "values", rows)
        norm = layer.norms["key_norm"]
        if norm is not None:
            weight = norm_weight(norm)
            keys = (weight.abs() * len(weight) ** 0.5).view(-1, width).expand_as(keys)
        pair = keys[:, :share].unflatten(1, (2, -1)).norm(dim=1) * turned
        bounds.append(torch.stack([torch.cat([pair, pair, keys[:, share:]], 1), values]))
        if longest:
            ends = (layer.norms[name] for name in ("post_attention_norm", "post_mlp_norm"))
            added += [norm_weight(each) * parts.residual_scale for each in ends]
    return torch.stack(bounds, 1).clamp_min(1e-30) / (2**15 - 1)


def _longest_row(embeddings: nn.Embedding | PackedEmbedding, count: int) -> float:
    """The largest norm of an embedding."""
    some = torch.arange(count).split(PROMPT_CHUNK)
    return max(float(embeddings(ids).float().norm(dim=1).max()) for ids in some)
