"""A KV cache in fewer bits than the model: part of what is decoded, whatever the method; recorded,
and refused.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.cli.conftest import tswift  # noqa: F401
from tests.helpers import (
    decode,
    drafter_of,
    first,
    needs_program,
    options_for,
    random_prompt,
    read_json,
    refused,
    tiny_heads,
    tiny_llama,
)
from tests.jobs.killing import write_record
from tswift.benchmarking.config import RooflineQuery
from tswift.benchmarking.roofline import roofline_tables
from tswift.caches import FullKV
from tswift.drafting.methods import make_drafter
from tswift.forward.adapting import wrap_model
from tswift.forward.text import chunks
from tswift.jobs import verification
from tswift.jobs.config import RunConfig
from tswift.jobs.folder import RECORD
from tswift.jobs.resuming import resume
from tswift.loading.model import load
from tswift.loading.plan import plan_model
from tswift.models.config import ModelConfig
from tswift.models.devices import kv_dtype_for
from tswift.sampling.parameters import SamplingParams

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("method", "kv_dtype"),
    first(1, [("tokenswift", torch.float16), ("snapkv", torch.bfloat16), ("snapkv", torch.int8)]),
)
def test_stock_operators_read_it_too(method, kv_dtype):
    """In float64, where all that rounds is the cache: every method's text is plain decoding's,
    and it does round.
    """
    params = SamplingParams(penalty=1.1)
    prompt = random_prompt(100)
    states = []
    for kind in (kv_dtype, torch.float64):
        target = wrap_model(tiny_llama("gqa", torch.float64), "tiny", "sdpa", kv_dtype=kind)
        assert target.kv_shape.dtype == kind
        plain = decode(target, drafter_of("ar", target, options_for("ar")), prompt, params, 3, 50)
        name, policy = ("magicdec", {"kv": "snapkv"}) if method == "snapkv" else (method, {})
        options = options_for(name, budget=64, **policy)
        drafter = make_drafter(name, target, tiny_heads(), options, None)
        assert decode(target, drafter, prompt, params, 3, 50) == plain
        reference = target.reference()  # reads a cache that it need not convert
        assert reference.kv_shape.dtype == torch.float64
        assert (
            decode(reference, drafter_of("ar", reference, options_for("ar")), prompt, params, 3, 50)
            == plain
        )
        for read in (target, reference):
            kv = FullKV(read.kv_shape, len(prompt))
            states += [forwarded.hidden for forwarded in chunks(read, prompt, kv)]
    assert torch.allclose(states[0], states[1], rtol=0, atol=1e-9)
    assert not torch.allclose(states[0], states[2], rtol=0, atol=1e-6)


def test_what_it_is():
    assert kv_dtype_for("auto", torch.float32, CPU, True) == torch.int16
    for dtype, device, program in (
        (torch.float64, CPU, True),
        (torch.float32, CUDA, True),
        (torch.float32, CPU, False),
        (torch.bfloat16, CPU, True),
    ):
        assert kv_dtype_for("auto", dtype, device, program) == dtype
    assert kv_dtype_for("bf16", torch.float32, CPU, False) == torch.bfloat16
    with refused(r"^kv_dtype: is the model's own on cuda, bfloat16, or int8; got int16$"):
        kv_dtype_for("int16", torch.bfloat16, CUDA, False)
    assert kv_dtype_for("int8", torch.bfloat16, CUDA, False) == torch.int8
    with refused(r"^kv_dtype: is no narrower than the model's own, float32; got float64$"):
        load(kv_dtype="float64")
    with refused(r"^kv_dtype: no dtype 'flot16'"):
        load(kv_dtype="flot16")


def test_auto_is_the_models_own_where_it_would_be_converted_in_every_pass():
    assert load(attention="sdpa").target.kv_shape.dtype == torch.float32
    assert load(attention="sdpa", kv_dtype="float16").target.kv_shape.dtype == torch.float16


def test_a_model_that_does_not_bear_it_is_refused():
    model = tiny_llama("gqa", torch.float32)
    for layer in model.requires_grad_(False).model.layers:
        layer.self_attn.v_proj.weight.mul_(1e7)
        layer.self_attn.o_proj.weight.mul_(1e-7)
    wrap_model(model, "tiny", "sdpa", kv_dtype=torch.bfloat16)
    with refused(r"^kv_dtype: tiny does not bear a cache in float16$"):
        wrap_model(model, "tiny", "sdpa", kv_dtype=torch.float16)


@pytest.mark.parametrize(
    ("recorded", "typed", "wanted"),
    [
        (("float32", "float16"), {}, "float16"),
        (("float32", "float32"), {}, "float32"),  # not what the bundled model would have today
        (("float32", "float16"), {"dtype": "float64"}, "float16"),
        (("float32", "float32"), {"dtype": "float64"}, "float64"),
        (("float32", "float16"), {"model": "other"}, "auto"),
        (("bfloat16", "bfloat16"), {"dtype": "auto"}, "auto"),
    ],
)
def test_a_run_is_judged_with_its_own(recorded, typed, wanted):
    config = RunConfig.of(device="cpu", dtype=recorded[0], kv_dtype=recorded[1])
    assert verification._kv_dtype(config.model, typed) == wanted


def test_memory_counts_its_bytes():
    narrow, wide = (
        plan_model(ModelConfig(model="demo", device="cpu", kv_dtype=kind))
        for kind in ("auto", "float32")
    )
    assert 2 * narrow.kv_shape.bytes_per_token == wide.kv_shape.bytes_per_token
    rows = wide.kv_shape.layers * wide.kv_shape.heads * 2  # of one token
    in_bytes = plan_model(ModelConfig(model="demo", device="cpu", kv_dtype="int8")).kv_shape
    assert 4 * (in_bytes.bytes_per_token - 4 * rows) == wide.kv_shape.bytes_per_token  # a step each
    assert FullKV(in_bytes, 3).nbytes == 3 * in_bytes.bytes_per_token
    asked = {"model": "shape:llama3.1-8b", "device": "h100"}
    _, floor = roofline_tables(RooflineQuery(**asked, kv_dtype="int8"))
    assert floor["shape"]["kv_bytes"] == 2 * 32 * 8 * (128 + 4)
    with refused(r"^kv_dtype: is the model's own on cuda, bfloat16, or"):
        roofline_tables(RooflineQuery(**asked, kv_dtype="int16"))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_rows_of_bytes(bad):
    """Each is off by half its own step at most, nothing stays nothing,
    and what is broken is broken.
    """
    shape = replace(
        plan_model(ModelConfig(model="demo", device="cpu", kv_dtype="int8")).kv_shape, layers=1
    )
    rows = torch.randn(shape.heads, 5, shape.head_dim) * torch.tensor([1, 1e4, 0, 1e-4, 1])[:, None]
    rows[:, 4, 3] = bad
    kept = shape.narrowed(rows, 0, 0)
    assert kept.shape == (shape.heads, 5, shape.row(shape.head_dim))
    back = shape.widened(kept, 0, 0)
    assert ((back - rows).abs()[:, :4] <= rows.abs().amax(-1, keepdim=True)[:, :4] / 253).all()
    assert shape.broken(kept)[:, 4].all()
    assert not shape.broken(kept)[:, :4].any()


@pytest.mark.slow
@needs_program
@pytest.mark.parametrize("kind", ["auto", "int8"])
def test_the_bundled_models_runs(tswift, tmp_path, kind):  # noqa: F811
    """By default exact in int16; it is recorded, resumed and verified so,
    and what was typed is not forgotten.
    """
    words = [
        "generate --prompt-text",
        "The ship had lain three days becalmed,",
        f"--quiet --kv-dtype {kind}",
    ]
    own = {"auto": "int16"}.get(kind, kind)
    for method in ("ar", "tokenswift"):
        tswift(*words, f"--method {method} --len 60 --out {tmp_path}/{method}").ok()
    text = (tmp_path / "ar" / "tokens.u32").read_bytes()
    assert (tmp_path / "tokenswift" / "tokens.u32").read_bytes() == text
    made = read_json(tmp_path / "ar" / RECORD)["model"]
    assert (made["kv_dtype"], made["exact"]["width"]) == (own, 64)
    tswift(*words, f"--method medusa --len 17 --out {tmp_path}/cut").ok()
    tswift(f"generate --resume {tmp_path}/cut --kv-dtype float32 --len 60").refused(
        f"--kv-dtype: the run was made with {own}, got float32"
    )
    tswift(f"generate --resume {tmp_path}/cut --kv-dtype {own} --len 60 --verify").ok()
    assert (tmp_path / "cut" / "tokens.u32").read_bytes() == text
    with refused(rf"^kv_dtype: .* was made with a KV cache in {own}, not in float32$"):
        resume(tmp_path / "cut", {"length": 70}, False, [], loaded=load(kv_dtype="float32"))
    found = tswift(f"verify {tmp_path}/cut --kv-dtype float32")
    assert "the arithmetic here differs" in found.text


@pytest.mark.slow
@needs_program
def test_a_run_from_before_there_was_a_choice_keeps_the_models_own(tswift, tmp_path):  # noqa: F811
    words = ["generate --prompt-text", "The ship", "--method ar --kv-dtype float32 --quiet"]
    tswift(*words, f"--len 40 --out {tmp_path}/whole").ok()
    tswift(*words, f"--len 9 --out {tmp_path}/run").ok()
    record = read_json(tmp_path / "run" / RECORD)
    assert "kv_dtype" not in record["model"]
    assert record["model"]["exact"]["width"] == 64  # the C program's rows are
    del record["options"]["kv_dtype"]
    write_record(tmp_path / "run", record)
    tswift(f"generate --resume {tmp_path}/run --len 40").ok()
    assert (tmp_path / "run" / "tokens.u32").read_bytes() == (
        tmp_path / "whole" / "tokens.u32"
    ).read_bytes()
