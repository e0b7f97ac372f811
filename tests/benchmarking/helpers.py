"""A made-up measurement, in the form of ``bench.json``, and changes to it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from tswift.benchmarking.record import Machine, Measurement, parse, workload_hash

MACHINE = Machine(bandwidth=2e10, flops=1e11)
# what each method drafts along a path and accepts of it, and its seconds per token over plain
# decoding's
_METHODS = {
    "ar": (0, 0.0, 0.0, 1.0),
    "ar-reference": (0, 0.0, 0.0, 1.9),
    "medusa": (3, 0.40, 0.0, 0.8),
    "tokenswift": (4, 0.60, 0.05, 0.55),
}
_SAMPLING = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.1,
    "eta": 0.0,
    "penalty": 1.2,
    "window": 1024,
    "banned": [0],
}
_ENVIRONMENT = {
    "python": "3.11.9",
    "torch": "2.13.0",
    "transformers": "5.23.0",
    "tswift": "0.1.0",
    "git_commit": "4a387207a8f1a2b1d3a1d2f3a4b5c6d7e8f90123",
    "platform": "Linux-6.1-x86_64",
    "cpu": "Intel(R) Xeon(R) Processor @ 2.80GHz",
    "threads": 2,
    "gpu": None,
    "driver": None,
}


def make_measurement(
    methods: Sequence[str] = ("ar", "medusa", "tokenswift"),
    prefills: Sequence[int] = (1024,),
    lens: Sequence[int] = (500, 1000),
    seeds: Sequence[int] = (0, 1),
    prompts: Sequence[str] = ("novel",),
    repeats: int = 1,
    ar: str = "full",
    roofline: bool = False,
    simulated: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """A measurement whose figures are plain functions of prompt, prefill, seed, repeat and length.

    Without ``roofline`` it is as files were before the machine's speed was measured.
    """

    def sample(repeat: int, prompt: str, prefill: int, seed: int, method: str) -> dict[str, Any]:
        depth, alpha, beta, share = _METHODS[method]
        alpha += bool(depth) * (0.01 * (seed % 3) + 0.02 * (len(prompt) % 2))
        share *= 1 + 0.01 * ((3 * seed + 5 * repeat + len(method)) % 4) if method != "ar" else 1.0

        def seconds(tokens: int, of: float) -> float:
            return tokens * (1 + tokens / 100_000 + prefill / 50_000) * 0.01 * of

        def point(length: int) -> dict[str, Any]:
            own, ar_seconds, floor = (seconds(length, of) for of in (share, 1.0, 0.8))
            plain = roofline and method == "ar"
            passes = round(length / (1 + depth * alpha))
            return {
                "len": length,
                "tokens": length,
                "seconds": own,
                "passes": passes,
                "nodes": passes * (2 * depth or 1),
                "accepted": [passes, 0, 0, 0, 0][: depth + 1],
                "reused": round(beta * depth * passes),
                "depth": depth,
                "alpha": alpha,
                "beta": beta,
                "tokens_per_step": 1 + depth * alpha,
                "tokens_per_second": length / own,
                "ar_seconds": ar_seconds,
                "speedup": ar_seconds / own,
                **({"floor_seconds": floor, "of_floor": own / floor} if plain else {}),
            }

        compared = method != "ar" and not (depth and simulated and simulated["alpha"] is not None)
        estimated = method == "ar" and ar == "sampled"
        step = max(lens) // 20
        return {
            "prompt": prompt,
            "prefill": prefill,
            "seed": seed,
            "method": method,
            "repeat": repeat,
            "estimated": estimated,
            "prefill_seconds": prefill * 0.001,
            "same_as_ar": True if compared else None,
            "explained": None,
            "first_difference": None,
            "compared_tokens": lens[-1] if compared else 0,
            "slices": [
                [tokens, seconds(tokens, share)] for tokens in range(step, max(lens) + 1, step)
            ],
            "probes": [[prefill, [0.01, 0.011]]] if estimated else None,
            "points": [point(length) for length in lens],
        }

    workload: dict[str, Any] = {
        "model": "demo",
        "weights": "ab" * 32,
        "dtype": "float32",
        "attention": "sdpa",
        "heads": "conditioned, 3",
        "heads_weights": "cd" * 32,
        "sampling": copy.deepcopy(_SAMPLING),
        "drafting": {method: {"tree": [1, 2, 2, 2]} for method in methods if _METHODS[method][0]},
        "prompts": [{"name": name, "sha256": f"{i:064x}"} for i, name in enumerate(prompts)],
        "prefills": list(prefills),
        "lens": list(lens),
        "seeds": list(seeds),
        "methods": list(methods),
        "ar": ar,
        **({"simulated": simulated} if simulated else {}),
    }
    return {
        "schema": 1,
        "kind": "bench",
        "simulated": simulated is not None,
        "state": "finished",
        "started": "2026-11-21T06:00:00+00:00",
        "ended": "2026-11-21T06:30:00+00:00",
        "command": ["tswift", "bench", "--prompts", "two words.txt"],
        "environment": dict(_ENVIRONMENT),
        **(
            {"machine": {"bandwidth": MACHINE.bandwidth, "flops": MACHINE.flops}}
            if roofline
            else {}
        ),
        "workload": {"hash": workload_hash(workload), **workload},
        "samples": [
            sample(*axes) for axes in product(range(repeats), prompts, prefills, seeds, methods)
        ],
    }


def typed(measurement: dict[str, Any]) -> Measurement:
    """The measurement as it is read."""
    record = parse(measurement, Path("bench.json"), "against")
    assert isinstance(record, Measurement)
    return record


def changed(
    measurement: dict[str, Any], change: Callable[[dict[str, Any]], object]
) -> dict[str, Any]:
    """A copy of a measurement with something changed, its workload's hash brought up to date."""
    other = copy.deepcopy(measurement)
    change(other)
    other["workload"]["hash"] = workload_hash(other["workload"])
    return other


def points_of(measurement: dict[str, Any], method: str) -> Iterator[dict[str, Any]]:
    """The points of a method's samples."""
    return (
        point
        for sample in measurement["samples"]
        if sample["method"] == method
        for point in sample["points"]
    )
