"""GGUF files: every type is decoded without loss,
and the model is what transformers makes of the same weights.
"""

from __future__ import annotations

import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

import tswift
from tests.helpers import METHODS, VOCAB, first, options_for, refused, tokens_of
from tests.models.gguf_files import ARCHITECTURES, dequantized, tiny_model, write_gguf, write_one
from tests.models.refusals import refuse
from tswift.forward.cpu.products import PackedEmbedding, PackedLinear
from tswift.loading import packing as coded
from tswift.loading.model import LoadedModel, load
from tswift.loading.plan import plan_model
from tswift.models import checkpoint
from tswift.models.checkpoint import Checkpoint
from tswift.models.codes import Codes, PackedCodes
from tswift.models.config import BITS, ModelConfig
from tswift.models.gguf import read_gguf
from tswift.models.gguf_blocks import CODED
from tswift.models.hashes import weights_hash
from tswift.sampling.generation_config import params_of, usual_source
from tswift.sampling.parameters import SamplingParams

FIELDS = {"nodes": 12, "budget": 64, "sinks": 4}


@pytest.fixture(autouse=True)
def kept(tmp_path, monkeypatch) -> Path:
    """Where rounded weights are kept."""
    folder = tmp_path / "cache"
    folder.mkdir()
    monkeypatch.setattr(coded, "cache_folder", lambda: folder)
    return folder


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    """A tiny Llama in Q8_0."""
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", tiny_model("llama"))


@pytest.mark.parametrize("kind", CODED, ids=lambda kind: kind.name)
def test_codes_are_the_dequantised_values(kind, tmp_path):
    rows = write_one(tmp_path / "one.gguf", kind)
    found = read_gguf(tmp_path / "one.gguf")
    codes = found.read(found.tensors["one"])
    assert isinstance(codes, Codes)
    assert codes.codes.shape == (48, 512)
    assert int(codes.codes.max()) < 2**codes.bits
    expected = torch.from_numpy(gguf.dequantize(rows, kind))
    assert torch.equal(codes.dequantized(), expected)
    assert torch.equal(PackedLinear(codes).weight, expected)  # as it is packed, too


def test_every_type_is_tried():
    known = {"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"}
    assert {kind.name for kind in CODED} == known


@pytest.mark.parametrize(
    ("kind", "tied"), first(1, [(kind, tied) for tied in (False, True) for kind in ARCHITECTURES])
)
def test_the_model_is_that_of_the_dequantised_weights(kind, tied, tmp_path):
    tied = tied and kind != "olmo2"  # whose files have an LM head
    model = tiny_model(kind, tie_word_embeddings=tied)
    path = write_gguf(tmp_path / "tiny.gguf", model, Kind.Q8_0)
    loaded = load(str(path), exact=False)
    right = dequantized(model, path)
    network = loaded.target.model
    for name in (
        "attention_multiplier",
        "embedding_multiplier",
        "residual_multiplier",
        "logits_scaling",
    ):
        wanted = getattr(model.config, name, None)  # Granite's
        assert getattr(network.config, name, None) == (wanted and pytest.approx(wanted))
    for name, parameter in right.named_parameters():
        owner = network.get_submodule(name.rpartition(".")[0])
        if isinstance(owner, PackedLinear | PackedEmbedding) and name.endswith("weight"):
            assert torch.equal(owner.packed.codes().dequantized(), parameter), name
        else:
            assert torch.equal(network.get_parameter(name), parameter), name
    for name, buffer in right.named_buffers():
        if name.endswith("inv_freq"):  # of windows another one than of all keys
            assert torch.allclose(network.get_buffer(name), buffer), name
    assert loaded.quantization == "Q8_0"
    assert "weights quantised (Q8_0)" in loaded.remarks()
    for name, parameter in tiny_model(kind, tie_word_embeddings=tied).named_parameters():
        assert (right.get_parameter(name) - parameter).abs().max() < 0.02 * parameter.abs().max(), (
            name
        )


def text(model: LoadedModel, method: str, length: int = 60) -> list[int]:
    prompt = model.encode("The ship had lain three days becalmed, and the captain")
    options = options_for(method, **FIELDS, reuse_recent=True)
    steps = tswift.generate(model, prompt, length, method=method, options=options)
    return tokens_of(steps)


@pytest.mark.parametrize(
    ("kind", "length"),
    first(1, [*((kind, 60) for kind in ARCHITECTURES), ("llama", 1200), ("qwen3_5_text", 600)]),
)
def test_all_methods_give_the_tokens_of_plain_decoding(kind, length, tmp_path):
    path = str(write_gguf(tmp_path / "tiny.gguf", tiny_model(kind), Kind.Q4_1))
    recurrent = kind == "qwen3_5_text"  # which drafts for itself in no way, nor for another
    methods = [
        name
        for name, method in METHODS.items()
        if not ("heads" in method.needs or method.reference)
        and not (recurrent and name != "auto" and (method.drafts_itself or method.needs))
    ]
    model = load(path, draft_model=None if recurrent else path)
    assert model.exact is not None
    texts = {method: text(model, method, length) for method in methods}
    assert len(texts["ar"]) == length
    assert len(set(texts["ar"])) > 5
    assert {method: tokens for method, tokens in texts.items() if tokens != texts["ar"]} == {}


def test_names(file, tmp_path):
    alone = Checkpoint.find(str(file.parent))  # the only one in its folder
    assert Checkpoint.find(str(file)).gguf is alone.gguf
    assert Checkpoint.find("demo").gguf is Checkpoint.find("shape:qwen2.5-1.5b").gguf is None
    blob = tmp_path / "sha256-0a1b"  # as Ollama calls it
    blob.write_bytes(file.read_bytes())
    found = Checkpoint.find(str(blob)).gguf
    assert found is not None
    assert found.tensors == alone.gguf.tensors
    blob.write_bytes(b"PK" + file.read_bytes())
    refuse(str(blob), "sha256-0a1b is a file; give the folder it is in, or a GGUF file")
    refuse(str(tmp_path / "c.gguf"), "there is no file .*c.gguf'")


QUANTISED = [f"tiny{part}.gguf" for part in ("-Q8_0", ".Q4_K_M", "-Q4_K_S", "_q4_0", "-UD-Q8_0")]


@pytest.mark.parametrize(
    ("wanted", "right"),
    [
        ("tiny-Q8_0.gguf", "tiny-Q8_0.gguf"),
        ("Q4_K_M", "tiny.Q4_K_M.gguf"),
        ("q4_k_s", "tiny-Q4_K_S.gguf"),
        ("Q4_0", "tiny_q4_0.gguf"),
        ("UD-Q8_0", "tiny-UD-Q8_0.gguf"),
        ("Q8_0", "holds 2 GGUF files Q8_0 .tiny-Q8_0.gguf, tiny-UD-Q8_0.gguf.; name one of them"),
        ("Q4_K", "holds 0 GGUF files Q4_K .* name one of them, as .*:FILE.gguf"),
        ("", "holds 5 GGUF files .* name one of them, as .*:FILE.gguf"),
    ],
)
@pytest.mark.parametrize("where", ["a folder", "the hub"])
def test_a_file_is_found_by_its_quantisation(wanted, right, where, file, tmp_path, monkeypatch):
    files = [*QUANTISED, "mmproj-tiny-Q4_K_M.gguf"]
    monkeypatch.setattr(checkpoint, "list_repo_files", lambda name: ["README.md", *files])
    monkeypatch.setattr(checkpoint, "hf_hub_download", lambda name, asked: str(tmp_path / asked))
    monkeypatch.setattr(checkpoint, "_reachable", lambda: True)
    checkpoint._fetched.cache_clear()
    for name in files:
        (tmp_path / name).write_bytes(file.read_bytes())
    place = "somebody/tiny-GGUF" if where == "the hub" else str(tmp_path)
    model = f"{place}:{wanted}" if wanted else place
    if not wanted and where == "the hub":
        return
    if " " in right:
        refuse(model, right)
    else:
        assert plan_model(ModelConfig(model=model)).vocab_size == VOCAB
        assert Checkpoint.find(model).source == str(tmp_path / right)


def test_the_tokenizer_is_of_the_file_alone(file, tmp_path):
    (tmp_path / "tokenizer.json").write_text("of another model")
    alone = tmp_path / "tiny.gguf"
    alone.write_bytes(file.read_bytes())
    model = load(str(alone))
    assert model.encode("ab!") == [65, 66, 1]
    assert model.eos_ids == (0,)
    assert "user:hello" in model.tokenizer.apply_chat_template(
        [{"role": "user", "content": "hello"}], tokenize=False
    )


def test_memory_is_counted_by_the_codes(tmp_path):
    model = tiny_model("llama", num_hidden_layers=4, vocab_size=96)
    path = write_gguf(tmp_path / "tiny.gguf", model, Kind.Q4_1)
    network = load(str(path)).target.model
    held = sum(
        module.bytes.nbytes for module in network.modules() if isinstance(module, PackedCodes)
    )
    counted = plan_model(ModelConfig(model=str(path))).loaded_bytes["weights"]
    assert held <= counted <= 1.2 * held + 10_000


def _changed(at: int, data: bytes) -> Callable[[bytes], bytes]:
    return lambda file: file[:at] + data + file[at + len(data) :]


def _replaced(old: bytes, new: bytes) -> Callable[[bytes], bytes]:
    return lambda file: file.replace(old, new)


def _with_number(name: bytes, value: int) -> Callable[[bytes], bytes]:
    return lambda file: _changed(file.index(name) + len(name) + 4, struct.pack("<I", value))(file)


DAMAGE: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda file: b"", "is damaged, or no GGUF file: it has 0 bytes"),
    "another format": (lambda file: b"PK" + file, "does not begin with GGUF"),
    "version 1": (_changed(4, struct.pack("<I", 1)), "is GGUF of version 1; tswift reads 2 and 3"),
    "the other byte order": (_changed(4, struct.pack(">I", 3)), "is GGUF of version 50331648"),
    "a header that ends": (lambda file: file[:300], "ends within its header, at byte 300"),
    "the last tensor cut": (lambda file: file[:-40], "is truncated: .* ends at byte"),
    "too many values": (_changed(16, struct.pack("<Q", 1 << 60)), "is damaged"),
    "too many tensors": (_changed(8, struct.pack("<Q", 1 << 60)), "is damaged"),
    "a string of an exabyte": (_changed(24, struct.pack("<Q", 1 << 60)), "ends within its header"),
    "another architecture": (
        _replaced(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0mamba"),
        "has the architecture 'mamba'; tswift reads llama, qwen2, qwen3, qwen35, smollm3, olmo2, "
        "phi3, gemma2, gemma3, granite",
    ),
    "a value of no type": (
        _replaced(b"general.name\x08", b"general.name\x63"),
        "of the unknown type 99",
    ),
    "no layers": (_replaced(b"llama.block_count", b"llama.block_kount"), "lacks llama.block_count"),
    "a tensor of another name": (
        _replaced(b"blk.1.attn_k.weight", b"blk.1.attn_x.weight"),
        "lacks blk.1.attn_k.weight",
    ),
    "too many layers": (
        _with_number(b"llama.block_count", 1000),
        "says num_hidden_layers 1000, and its weights can have 128 at most",
    ),
    "other sizes": (
        _with_number(b"llama.feed_forward_length", 64),
        "of shape .*, its metadata make it",
    ),
    "numbers that are NaN": (
        lambda file: file[:-256] + b"\xff" * 256,
        "is broken: .* finite numbers",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_files_are_refused(damage, file, tmp_path):
    change, says = DAMAGE[damage]
    path = tmp_path / "tiny.gguf"
    path.write_bytes(change(file.read_bytes()))
    refuse(str(path), says)


def test_any_cut_is_refused(file, tmp_path):
    whole = file.read_bytes()
    path = tmp_path / "tiny.gguf"
    # padding may follow
    end = max(tensor.start + tensor.bytes for tensor in read_gguf(file).tensors.values())
    for size in [*range(0, 400, 7), *range(400, end, 997), end - 1]:
        path.write_bytes(whole[:size])
        with refused(r"is damaged|is truncated"):
            read_gguf(path)


def test_types_that_are_not_read(tmp_path):
    model = tiny_model(
        "llama", hidden_size=256, intermediate_size=256, head_dim=64, num_key_value_heads=4
    )
    path = write_gguf(tmp_path / "tiny.gguf", model, Kind.TQ1_0)
    refuse(str(path), "of type TQ1_0, which tswift does not read; it reads F32, F16, BF16, Q4_0")


@pytest.mark.parametrize("kind", [Kind.F16, Kind.F32])
def test_files_of_numbers_are_ordinary_models(kind, tmp_path):
    path = write_gguf(tmp_path / "tiny.gguf", tiny_model("llama"), kind)
    model = load(str(path), dtype="float64")
    assert model.quantization is None
    stored = "float16" if kind is Kind.F16 else "float32"
    assert (model.target.dtype, model.dtype_note) == (torch.float64, f"checkpoint in {stored}")


def test_what_does_not_go_with_codes_is_refused(file):
    refuse(
        str(file),
        r"is float32 with weights of integers \(Q8_0\) on cpu; got bfloat16",
        "dtype",
        dtype="bfloat16",
    )
    refuse(
        str(file), "is for checkpoints in safetensors with plain weights", "weights", weights="int4"
    )


@pytest.mark.parametrize("weights", first(1, ["int8", "int4"]))
def test_checkpoints_are_rounded(weights, checkpoint):
    plain, rounded = load(str(checkpoint), dtype="float32"), load(str(checkpoint), weights=weights)
    assert rounded.quantization == weights
    for name, parameter in plain.target.model.named_parameters():
        owner = rounded.target.model.get_submodule(name.rpartition(".")[0])
        if parameter.dim() < 2:
            continue
        bits = 8 if "embed" in name or "lm_head" in name else BITS[weights]
        codes = owner.packed.codes()
        assert codes.bits == bits
        apart = (codes.dequantized() - parameter).abs().unflatten(1, (-1, codes.block))
        assert (apart <= 0.51 * codes.scale[..., None] + 1e-3 * parameter.abs().max()).all()
    assert text(rounded, "auto") == text(rounded, "ar")


def test_rounded_weights_are_kept(checkpoint, kept, tmp_path, monkeypatch):
    folder = shutil.copytree(checkpoint, tmp_path / "model")
    first = weights_hash(load(str(folder), weights="int8").target.model)
    (path,) = kept.iterdir()
    right = coded.quantize
    monkeypatch.setattr(coded, "quantize", lambda *given: pytest.fail("it was kept"))
    assert weights_hash(load(str(folder), weights="int8").target.model) == first
    monkeypatch.setattr(coded, "quantize", right)
    whole = path.read_bytes()
    path.unlink()
    path.write_bytes(whole[:1000])  # it is made anew
    assert weights_hash(load(str(folder), weights="int8").target.model) == first
    assert load(str(folder), weights="int4").quantization == "int4"
    assert len([*kept.iterdir()]) == 2
    os.utime(folder / "model.safetensors", (0, 0))  # another file, by its time
    load(str(folder), weights="int8")
    assert len([*kept.iterdir()]) == 3


@pytest.mark.usefixtures("tiny_shapes")
@pytest.mark.parametrize("name", ["shape:tiny", "shape:tied"])
def test_random_weights_of_a_shape_are_rounded(name):
    model = load(name, weights="int4")
    assert (model.quantization, model.simulated) == ("int4", True)
    assert model.target.dtype == torch.float32
    assert plan_model(ModelConfig(model=name, weights="int4")).dtype == torch.float32


@pytest.mark.parametrize(
    ("named", "source", "wanted"),
    [
        ({}, "llama.cpp", SamplingParams(0.8, 40, 0.95, 0.05, penalty=1.0)),
        ({"temp": 0.5, "top_k": 20}, "model", SamplingParams(0.5, 20, 0.95, 0.05, penalty=1.0)),
        ({"temp": 0.0}, "model", SamplingParams(0.0, penalty=1.0)),
    ],
    ids=str,
)
def test_what_a_files_authors_recommend(named, source, wanted, tmp_path):
    """What they leave open is llama.cpp's, and so is all of a file that says nothing."""
    path = write_gguf(tmp_path / "own.gguf", tiny_model("llama"), sampling=named)
    own = load(str(path)).target.model.generation_config
    assert usual_source(own) == source
    found = params_of(source, own, "own.gguf")
    drawn = "temperature", "penalty", *(("top_k", "top_p", "min_p") if found.temperature else ())
    assert [getattr(found, name) for name in drawn] == [getattr(wanted, name) for name in drawn]
