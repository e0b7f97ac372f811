"""Models whose layers keep different keys and values (Gemma 4): what caches hold,
and what is told before loading.
"""

from __future__ import annotations

import pytest
import torch

from benchmarks.architectures import ARCHITECTURES, checkpoint
from tests.helpers import CPU, first, seeded
from tswift.caches import POLICIES, FullKV, KVShape, LayerKV, PartialKV
from tswift.loading.model import load
from tswift.loading.plan import plan_model
from tswift.models.config import ModelConfig
from tswift.models.shapes import shape_of

KINDS = {
    "Gemma 4 (K = V, other heads in global layers)": [
        (2, 16, 0),
        (1, 32, 1),
        (2, 16, 2),
        (1, 32, 3),
    ],
    "Gemma 4 E (shared keys and values, embeddings by layer)": [
        (2, 16, 0),
        (2, 32, 1),
        (2, 16, 0),
        (2, 32, 1),
    ],
}


@pytest.mark.parametrize("kind", first(2, [*KINDS]))
def test_what_layers_keep_is_known_before_they_are_loaded(kind, tmp_path):
    checkpoint(ARCHITECTURES[kind], tmp_path)
    target = load(str(tmp_path)).target
    spec = plan_model(ModelConfig(model=str(tmp_path), kv_dtype="float32"))
    kept = [LayerKV(*layer) for layer in KINDS[kind]]
    assert (list(target.kv_shape.by_layer), list(spec.kv_shape.by_layer)) == (kept, kept)
    numbers = sum(
        heads * size for layer, (heads, size, source) in enumerate(kept) if source == layer
    )
    assert target.kv_shape.bytes_per_token == spec.kv_shape.bytes_per_token == 2 * 4 * numbers
    shape = shape_of(target.model, 4)
    assert (shape.kv_bytes, shape.flops(1) - shape.flops(0)) == (
        2 * 4 * numbers,
        4 * 4 * (16 + 32 + 16 + 32),
    )
    tables = [
        weight.numel()
        for name, weight in target.model.named_parameters()
        if "per_layer.weight" in name
    ]
    assert shape.parameters - shape.read == sum(tables)  # the LM head's are read
    assert FullKV(target.kv_shape, 10).nbytes == 10 * shape.kv_bytes


def test_layers_with_the_same_keys_choose_by_all_their_queries():
    """A layer that is alone would take other keys than one that is read by two."""
    shared = KVShape(
        2, 1, 4, torch.float64, CPU, True, by_layer=(LayerKV(1, 4, 0), LayerKV(1, 4, 0))
    )
    full = FullKV(shared, 100)
    made = torch.randn(1, 100, 4, generator=seeded(0), dtype=torch.float64)
    full.write(0, made, -made)
    full.advance(100)
    assert full.keys[0].data_ptr() == full.keys[1].data_ptr()
    queries = [
        torch.tensor([[each]], dtype=torch.float64) for each in ([1.0, 0, 0, 0], [0.0, 1, 0, 0])
    ]
    partial = PartialKV(shared, 16, 0, POLICIES["dynamic"])
    partial.select(full, queries)
    wanted = made[0, :96, 0] + made[0, :96, 1]
    held = {*partial.positions(1)[0].tolist()}
    assert held == {96, 97, 98, 99, *wanted.topk(12).indices.tolist()}
    assert torch.equal(partial.values[1][0, :16], -made[0, partial.positions(0)[0]])


def test_layers_that_differ_move_together():
    shape = KVShape(2, 2, 4, torch.float32, CPU, by_layer=(LayerKV(2, 4, 0), LayerKV(1, 8, 1)))
    kv = FullKV(shape, 12)
    for layer, (heads, size, _) in enumerate(shape.kept):
        made = torch.arange(8.0).view(1, 8, 1).expand(heads, 8, size)
        keys, values = kv.write(layer, made, made + 100)
        assert (keys.shape, values.shape) == ((heads, 8, size), (heads, 8, size))
    kv.commit([0, 3, 5])
    other = FullKV(shape, 20)
    other.copy_from(kv)
    for layer in (0, 1):
        assert other.keys[layer][-1, :3, 0].tolist() == [0, 3, 5]
        assert other.values[layer][0, :3, -1].tolist() == [100, 103, 105]
