"""llama.cpp beside tswift on the same GGUF file, in turns: tokens per second by depth,
and how far logits are off.

llama.cpp runs in a process of its own, by the interpreter of an environment that has
``llama-cpp-python`` (built from source on the machine, so that it uses all of the processor). It is
no dependency of tswift. Depths beyond the model's positions are left out.

    python -m benchmarks.llama FILE.gguf --python /tmp/llama/bin/python --depths 0,1024,4096
    --tokens 64 --repeats 3
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from statistics import median
from typing import Any

FLASH = {"llama.cpp": False, "llama.cpp, flash attention": True}
LOOKUP = "llama.cpp, prompt lookup"
_WAITING = "OMP_WAIT_POLICY"
LOOKED_UP = 10  # tokens that it drafts, the default of llama-cpp-python


class Peer:
    """llama.cpp in a process that answers questions, one line each."""

    def __init__(self, python: str, file: Path, positions: int, threads: int) -> None:
        words = [
            python,
            __file__,
            "--serve",
            str(file),
            "--positions",
            str(positions),
            "--threads",
            str(threads),
        ]
        # its threads spin at barriers, as they do for its users; ours sleep (main), so that they do
        # not disturb them
        own = {name: value for name, value in os.environ.items() if name != _WAITING}
        self._process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=own
        )

    def ask(self, **question: Any) -> Any:
        """Its answer to a question."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("llama.cpp has ended; its error stands above")
        return json.loads(line)

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


@contextmanager
def peer(*given: Any) -> Iterator[Peer]:
    """llama.cpp while it is needed."""
    running = Peer(*given)
    try:
        yield running
    finally:
        running.close()


def serve(file: str, positions: int, threads: int) -> None:
    """Answer questions about the file by llama.cpp: run by the other interpreter."""
    import numpy as np
    from llama_cpp import Llama
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    common = {
        "n_ctx": positions,
        "n_threads": threads,
        "n_threads_batch": threads,
        "verbose": False,
    }
    models: dict[str, Any] = {}

    def model(name: str) -> Any:
        if name not in models:
            draft = LlamaPromptLookupDecoding(num_pred_tokens=LOOKED_UP) if name == LOOKUP else None
            every = name in ("logits", LOOKUP)  # logits of all tokens
            models[name] = Llama(
                file,
                flash_attn=FLASH.get(name, True),
                draft_model=draft,
                logits_all=every,
                **common,
            )
        return models[name]

    for line in sys.stdin:
        asked = json.loads(line)
        llama, ids = model(asked["name"]), asked["ids"]
        llama.reset()
        answer: dict[str, Any] = {}
        if "logits" in asked:
            llama.eval(ids)
            np.save(asked["logits"], llama.scores[: len(ids)].astype(np.float32))
        elif asked["name"] == LOOKUP:
            drawn = []
            for token in llama.generate(ids, temp=0.0):
                drawn.append(token)
                if len(drawn) == 1:
                    start = time.perf_counter()  # the prompt is read
                if len(drawn) > asked["tokens"]:
                    break
            answer = {"seconds": time.perf_counter() - start, "tokens": len(drawn) - 1}
        else:  # without the package's sampler, which takes as long as the model
            llama.eval(ids)
            start = time.perf_counter()
            for _ in range(asked["tokens"]):
                logits = np.ctypeslib.as_array(llama._ctx.get_logits(), shape=(llama.n_vocab(),))
                llama.eval([int(np.argmax(logits))])
            answer = {"seconds": time.perf_counter() - start, "tokens": asked["tokens"]}
        print(json.dumps(answer), flush=True)


def measure(model: Any, method: str, ids: Sequence[int], tokens: int) -> float:
    """Tokens per second of a method of ours, after its prompt."""
    import tswift
    from tswift.sampling.parameters import SamplingParams

    params = SamplingParams(temperature=0.0, min_p=0.0, penalty=1.0)
    start, made = 0.0, 0
    for step in tswift.generate(model, ids, tokens + 1, method=method, params=params):
        if start:
            made += len(step.tokens)
        else:
            start = time.perf_counter()
    return made / (time.perf_counter() - start)


def speeds(model: Any, other: Peer, text: Sequence[int], asked: argparse.Namespace) -> None:
    """Print the table of tokens per second, medians over the repeats."""
    most = model.target.max_positions - asked.tokens - 1
    for depth in [depth for depth in asked.depths if depth <= most]:
        ids = list(text[: max(depth, 1)])
        peers = (*FLASH, *([] if asked.no_lookup else [LOOKUP]))
        if depth == asked.depths[0]:
            for name in peers:  # the first tokens read the file
                other.ask(name=name, ids=ids, tokens=8)
            measure(model, "ar", ids, 8)
        rates: dict[str, list[float]] = {}
        for _ in range(asked.repeats):
            for name in peers:
                took = other.ask(name=name, ids=ids, tokens=asked.tokens)
                rates.setdefault(name, []).append(took["tokens"] / took["seconds"])
            for method in ("ar", "auto"):
                rates.setdefault(f"tswift {method}", []).append(
                    measure(model, method, ids, asked.tokens)
                )
        for name, values in rates.items():
            lowest, highest = min(values), max(values)
            print(
                f"| {depth:,} | {name} | {median(values):.1f} | {lowest:.1f} to {highest:.1f} |",
                flush=True,
            )


def divergences(model: Any, other: Peer, ids: list[int]) -> None:
    """Print KL from float32 arithmetic on the same weights, of ours and of llama.cpp's logits."""
    import numpy as np
    import torch

    from tswift.caches import FullKV
    from tswift.forward.target import chunks

    kv = FullKV(model.target.kv_shape, len(ids))
    with torch.inference_mode():
        ours = torch.cat(
            [model.target.logits(chunk.hidden) for chunk in chunks(model.target, ids, kv)]
        )
        right = in_floats(model.target.model)(torch.tensor([ids]), use_cache=False).logits[0]
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/logits.npy"
        other.ask(name="logits", ids=ids, logits=path)
        theirs = torch.from_numpy(np.load(path))
    expected = right.double().log_softmax(-1)
    for name, logits in {"tswift": ours, "llama.cpp": theirs}.items():
        apart = (expected.exp() * (expected - logits.double().log_softmax(-1))).sum(-1)
        changed = (logits.argmax(-1) != right.argmax(-1)).double().mean().item()
        print(
            f"| {name} | {apart.mean():.2e} | {apart.max():.2e} | {100 * changed:.1f}% |",
            flush=True,
        )


def in_floats(network: Any) -> Any:
    """A model of codes as transformers computes it on the dequantised weights, in float32."""
    import torch
    from torch import nn
    from transformers import AutoModelForCausalLM

    from tswift.forward.integers import IntegerLinear, PackedEmbedding

    config = deepcopy(network.config)  # which is told of another attention
    plain = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    )
    for name, module in network.named_modules():
        if isinstance(module, IntegerLinear | PackedEmbedding):
            owner = plain.get_submodule(name)
            owner.weight = nn.Parameter(module.packed.codes().dequantized(), requires_grad=False)
    plain.load_state_dict(dict(network.named_parameters()), strict=False)
    plain.get_decoder().rotary_emb.inv_freq.copy_(network.get_decoder().rotary_emb.inv_freq)
    return plain.eval()


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--positions", type=int, default=8192)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--python", default="/tmp/llama/bin/python", help="interpreter that has llama-cpp-python"
    )
    parser.add_argument(
        "--depths",
        type=lambda text: [int(each) for each in text.split(",")],
        default=[0, 1024, 4096],
    )
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--text", type=Path, default=Path("prompts/long-novel.txt"))
    parser.add_argument("--kv-dtype", default="auto")
    parser.add_argument("--only", choices=("speed", "kl"))
    parser.add_argument(
        "--no-lookup",
        action="store_true",
        help="leave out prompt lookup, which reads prompts slowly",
    )
    asked = parser.parse_args()
    if asked.serve:
        serve(asked.file, asked.positions, asked.threads)
        return
    os.environ[_WAITING] = "passive"
    from tswift.loading import load

    model = load(asked.file, kv_dtype=asked.kv_dtype)
    print(f"tswift: {model.layers}{model.remarks()}")
    text = model.encode(asked.text.read_text())
    with peer(
        asked.python,
        Path(asked.file),
        min(asked.positions, model.target.max_positions),
        asked.threads,
    ) as other:
        if asked.only != "kl":
            print("| depth | | tokens/s | |\n| ---: | --- | ---: | --- |")
            speeds(model, other, text, asked)
        if asked.only != "speed":
            print("| | KL mean | largest | greedy tokens changed |\n| --- | ---: | ---: | ---: |")
            divergences(model, other, text[:1024])


if __name__ == "__main__":
    main()
