"""The Triton kernels, compiled for GPUs that are not here:
the interpreter takes more than the compiler does.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="triton is not installed")
pytestmark = pytest.mark.slow  # the compiler takes 20 s

# compute capability, dtype, KV heads, query heads per KV head, head size, nodes, kind; see
# benchmarks/offline.py
FLOATS = PLAIN, TREE, WIDER, SEVEN, OLDER, OLDER_TREE, LARGE, *OTHERS = [
    "90,bfloat16,8,4,128,1,chain",
    "90,bfloat16,8,4,128,32,tree",
    "90,bfloat16,8,4,128,48,tree",
    "90,bfloat16,4,7,128,18,tree",
    "80,bfloat16,8,4,128,1,chain",
    "80,bfloat16,8,4,128,32,tree",
    "80,float16,4,2,256,32,tree",
    "80,bfloat16,2,4,64,1,chain",
    "80,bfloat16,2,4,64,32,tree",
    "90,bfloat16,4,2,256,1,chain,window,softcap",
    "90,bfloat16,4,2,256,64,tree,window,softcap",
]
CODES = [f"{case},int8" for case in (PLAIN, TREE, OLDER, OLDER_TREE, LARGE)]
CASES = [*FLOATS, *CODES]


# capability, dtype, KV heads, query heads per KV head, head size, hidden size, the MLP's, kind
LAYERS = [
    "90,bfloat16,8,4,128,4096,14336,layer",
    "90,bfloat16,8,8,128,8192,28672,layer,norms,int8",
    "80,bfloat16,8,4,128,4096,14336,layer",
    "80,float16,3,3,64,576,1536,layer,norms,int8",
]


CODED = [  # as layers, with forms of most weights, of values' and of the LM head's
    "80,bfloat16,8,4,128,4096,14336,codes,Q4_K,Q6_K,Q6_K",
    "89,bfloat16,8,4,128,4096,14336,codes,int4,int4,int8",
    "90,bfloat16,8,4,128,4096,14336,codes,int4,int4,int8",
]


WALKS = ["90,bfloat16,8,128,32,walk", "80,bfloat16,8,128,1,walk"]
STATES = ["90,float32,16,32,128,128,states,corrects", "80,float32,16,32,128,128,states,corrects"]


@pytest.fixture(scope="module")
def lines(tmp_path_factory) -> list[dict]:
    """All kernels, in the order of the cases."""
    env = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton"))}
    env.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.offline", "--json"]
    command += [
        word for case in (*CASES, *LAYERS, *CODED, *WALKS, *STATES) for word in ("--case", case)
    ]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def kernels(lines: list[dict]) -> dict[str, list[dict]]:
    """By case: the kernel that attends, the one that combines, the one that stores."""
    return {case: lines[3 * index : 3 * index + 3] for index, case in enumerate(CASES)}


@pytest.mark.parametrize("case", CASES)
def test_nothing_spills_and_all_fits(kernels, case):
    for kernel in kernels[case]:
        assert kernel["spills"] == 0, kernel
        assert kernel["registers"] <= 255
        assert kernel["shared"] <= (163 if kernel["capability"] == 80 else 227) * 1024
        assert kernel["programs"] >= 1
    if case.startswith("80"):
        assert kernels[case][0]["shared"] <= 99 * 1024  # all that small GPUs have


def test_products_are_done_by_tensor_cores_and_keys_copied_ahead(kernels):
    for case in CASES:
        attend = kernels[case][0]
        assert attend["wgmma" if attend["capability"] == 90 else "mma"] > 0
        assert attend["copies"] > 0


@pytest.mark.parametrize(
    "pair", [(PLAIN, TREE), (OLDER, OLDER_TREE), OTHERS[:2], OTHERS[2:], CODES[:2], CODES[2:4]]
)
def test_rows_go_through_the_same_arithmetic_in_every_pass_of_a_model(kernels, pair):
    """Whatever the number of rows, and in a chain as in a tree;
    see :func:`tswift.attention.triton.configuration`.
    """
    for one, other in zip(kernels[pair[0]][:2], kernels[pair[1]][:2], strict=True):
        assert one["arithmetic"] == other["arithmetic"]
        assert (
            one["warps"] == other["warps"]
            or one["ROWS"] / one["warps"] == other["ROWS"] / other["warps"] == 16
        )
    assert kernels[PLAIN][0]["arithmetic"] != kernels[OLDER][0]["arithmetic"]


BETWEEN = ["add_norm_rows"] * 3 + ["rotate_rows", "silu_mul_rows"]
PRODUCTS = ["multiply_heads", "multiply_add", "multiply_add", "multiply_silu_rows"]
WALKING = ["lay_out_node", "walk_tree", "append_path", "append_path", "lay_out_node", "walk_tree"]
STEPPING = ["step_nodes"] * 3 * len(STATES)  # by the host, a tree of the device's, a path


@pytest.fixture(scope="module")
def layers(lines: list[dict]) -> list[dict]:
    """The kernels of layers."""
    made = lines[3 * len(CASES) : -len(WALKING + STEPPING) - _CODED]
    # over 32 rows, 64 and 512
    assert [kernel["kernel"] for kernel in made] == [*BETWEEN, *PRODUCTS * 3] * len(LAYERS)
    return made


_CODED = 16 * len(CODED)  # four kernels over 1 row, 16, 32 and 512
_LOOPS = {8: 300, 16: 350, 32: 450}  # instructions for 64 by 64 codes, by rows at a time


def test_products_of_codes_fit_and_hardly_spill(lines):
    """They are bound by instructions where memory is fast. Outside of its loop a wide pass of heads
    spills a little.
    """
    end = -len(WALKING + STEPPING)
    made = lines[end - _CODED : end]
    assert {kernel["kernel"] for kernel in made} == {"multiply_codes"}
    for at, kernel in enumerate(made):
        assert kernel["spills"] <= (96 if at % 16 == 12 else 0), kernel
        assert kernel["programs"] >= 5, kernel
        assert 100 < kernel["loop"] <= _LOOPS[kernel["ROWS"]], kernel
        assert kernel["mma"] + kernel["wgmma"] > 0, kernel
        assert kernel["copies"] > 0, kernel


def test_in_layers_nothing_spills_and_nothing_is_fused(layers):
    """A product fused with a sum is rounded once, and no longer what PyTorch computes."""
    for kernel in layers:
        assert kernel["spills"] == 0, kernel
        wide = kernel["kernel"] in PRODUCTS and kernel["ROWS"] > 64
        assert kernel["programs"] >= (1 if wide else 2), kernel
        assert kernel["fused"] == 0, kernel


def test_products_of_layers_are_done_by_tensor_cores_and_weights_copied_ahead(
    layers,
):
    for kernel in layers:
        if kernel["kernel"] in PRODUCTS:
            assert kernel["wgmma" if kernel["capability"] == 90 else "mma"] > 0, kernel
            assert kernel["copies"] > 0, kernel


def test_trees_are_walked_and_states_stepped_without_spills(lines):
    made = lines[-len(WALKING + STEPPING) :]
    assert [kernel["kernel"] for kernel in made] == WALKING + STEPPING
    assert not any(kernel["spills"] for kernel in made)
    stepping = made[-len(STEPPING) :]
    assert not any(kernel["fused"] for kernel in stepping)
    for at in range(0, len(stepping), 3):  # in prompts, in a captured pass, in its commit
        assert len({kernel["arithmetic"] for kernel in stepping[at : at + 3]}) == 1
