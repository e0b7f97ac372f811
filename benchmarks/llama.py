"""llama.cpp beside tswift on the same GGUF file, in turns: tokens per second by depth,
and how far logits are off.

llama.cpp runs in a process of its own, by the interpreter of an environment that has
``llama-cpp-python`` (built from source on the machine, so that it uses all of the processor). It is
no dependency of tswift. At each depth a prompt is read once; then all go on from there in turns,
llama.cpp from the same place each time, ours from where it was. With ``--yarn X`` both stretch
their positions. With ``--states FOLDER`` what llama.cpp has read is kept there: so what takes it
half an hour can be read before, in parts, and only decoding is timed on an idle machine.

    python -m benchmarks.llama FILE.gguf --python /tmp/llama/bin/python --depths 0,1024,4096
    --tokens 64 --repeats 3
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from statistics import median
from typing import Any

LOGITS = {"logits": "llama.cpp", "logits, flash": "llama.cpp, flash attention"}
FLASH = {"llama.cpp": False, "llama.cpp, flash attention": True}
LOOKUP = "llama.cpp, prompt lookup"
OURS = {"tswift ar": "ar", "tswift auto": "auto"}
WAYS = dict(zip(("llama", "flash", "lookup", "ar", "auto"), (*FLASH, LOOKUP, *OURS), strict=True))
_WAITING = "OMP_WAIT_POLICY"
KEPT = 2048  # tokens of a prompt after which llama.cpp's state is kept
LOOKED_UP = 10  # tokens that it drafts, the default of llama-cpp-python


class Peer:
    """llama.cpp in a process that answers questions, one line each."""

    def __init__(self, asked: argparse.Namespace, positions: int) -> None:
        words = [asked.python, __file__, "--serve", asked.file]
        words += ["--positions", str(positions), "--threads", str(asked.threads)]
        words += ["--yarn", str(asked.yarn)] if asked.yarn else []
        words += ["--states", str(asked.states)] if asked.states else []
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


def serve(asked: argparse.Namespace) -> None:
    """Answer questions about the file by llama.cpp: run by the other interpreter."""
    import numpy as np
    from llama_cpp import LLAMA_ROPE_SCALING_TYPE_YARN, Llama
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    common = {
        "n_ctx": asked.positions,
        "n_threads": asked.threads,
        "n_threads_batch": asked.threads,
        "verbose": False,
    }
    if asked.yarn:
        common |= {
            "rope_scaling_type": LLAMA_ROPE_SCALING_TYPE_YARN,
            "rope_freq_scale": 1 / asked.yarn,
        }
    models: dict[str, Any] = {}

    def model(name: str) -> Any:
        if name not in models:
            draft = LlamaPromptLookupDecoding(num_pred_tokens=LOOKED_UP) if name == LOOKUP else None
            every = name in (*LOGITS, LOOKUP)  # logits of all tokens
            models[name] = Llama(
                asked.file,
                flash_attn=FLASH.get(name, name != "logits"),
                draft_model=draft,
                logits_all=every,
                **common,
            )
        return models[name]

    prompts: dict[str, list[int]] = {}
    for line in sys.stdin:
        question = json.loads(line)
        name = question["name"]
        ids = question.get("ids")
        llama = model(name)
        answer: dict[str, Any] = {}
        if "logits" in question:
            llama.reset()
            llama.eval(ids)
            np.save(question["logits"], llama.scores[: len(ids)].astype(np.float32))
        elif ids is not None:
            read(llama, ids, asked, FLASH.get(name, True))
            prompts[name] = ids
        elif name == LOOKUP:
            drawn = llama.generate(prompts[name], temp=0.0)  # goes back to where the prompt ends
            next(drawn)
            start = time.perf_counter()
            for _ in range(question["tokens"]):
                next(drawn)
            answer = {"seconds": time.perf_counter() - start}
        else:  # without the package's sampler, which takes as long as the model
            depth = llama.n_tokens
            start = time.perf_counter()
            for _ in range(question["tokens"]):
                logits = np.ctypeslib.as_array(llama._ctx.get_logits(), shape=(llama.n_vocab(),))
                llama.eval([int(np.argmax(logits))])
            answer = {"seconds": time.perf_counter() - start}
            llama.n_tokens = depth  # what is beyond is forgotten by the next eval
        print(json.dumps(answer), flush=True)


def read(llama: Any, ids: list[int], asked: argparse.Namespace, flash: bool) -> None:
    """Have llama.cpp read a prompt, from where it came to when it read it before."""
    import ctypes

    import llama_cpp

    llama.reset()
    if asked.states is None:
        llama.eval(ids)
        return
    text = repr((asked.file, asked.positions, asked.yarn, flash, ids))
    path = asked.states / f"{hashlib.sha256(text.encode()).hexdigest()[:20]}.state"
    asked.states.mkdir(parents=True, exist_ok=True)
    context = llama._ctx.ctx
    part = path.with_suffix(".part")
    tokens = (llama_cpp.llama_token * len(ids))()
    count = ctypes.c_size_t()
    if path.exists():
        name = str(path).encode()
        most = len(ids)
        loaded = llama_cpp.llama_state_load_file(context, name, tokens, most, ctypes.byref(count))
        if not loaded or list(tokens[: count.value]) != ids[: count.value]:
            raise SystemExit(f"{path} is not this prompt's")
        llama.input_ids[: count.value] = ids[: count.value]
        llama.n_tokens = count.value - 1  # logits are not kept: the last token is read again
    while llama.n_tokens < len(ids):
        llama.eval(ids[llama.n_tokens :][:KEPT])
        if llama.n_tokens > count.value:
            tokens = (llama_cpp.llama_token * llama.n_tokens)(*ids[: llama.n_tokens])
            llama_cpp.llama_state_save_file(context, str(part).encode(), tokens, llama.n_tokens)
            part.replace(path)


def opened(model: Any, method: str, ids: Sequence[int], most: int) -> Callable[[int], float]:
    """A method of ours that has read its prompt: seconds for so many more tokens."""
    import tswift
    from tswift.sampling.parameters import SamplingParams

    params = SamplingParams(temperature=0.0, min_p=0.0, penalty=1.0)
    steps = tswift.generate(model, ids, most, method=method, params=params)
    next(steps)

    def decode(tokens: int) -> float:
        """Seconds for at least so many tokens, as for exactly so many."""
        made = 0
        start = time.perf_counter()
        while made < tokens:
            made += len(next(steps).tokens)
        return (time.perf_counter() - start) * tokens / made

    return decode


def speeds(model: Any, other: Peer, text: Sequence[int], asked: argparse.Namespace) -> None:
    """Print the table of tokens per second, medians over the repeats."""
    # a step makes a few tokens more, and the first turn is not counted
    made = (asked.repeats + 1) * (asked.tokens + 40)
    for depth in [each for each in asked.depths if each + made <= model.target.max_positions]:
        ids = list(text[: max(depth, 1)])
        ways: dict[str, Callable[[int], float]] = {}
        for name in filter(asked.ways.__contains__, (*FLASH, LOOKUP)):
            other.ask(name=name, ids=ids)
            ways[name] = lambda tokens, name=name: other.ask(name=name, tokens=tokens)["seconds"]
        for name, method in OURS.items():
            if name in asked.ways:
                ways[name] = opened(model, method, ids, made)
        rates: dict[str, list[float]] = {name: [] for name in ways}
        for turn in range(asked.repeats + 1):
            for name, decode in ways.items():
                rate = asked.tokens / decode(asked.tokens)
                if turn:
                    rates[name].append(rate)
        for name, values in rates.items():
            lowest = min(values)
            highest = max(values)
            print(
                f"| {depth:,} | {name} | {median(values):.1f} | {lowest:.1f} to {highest:.1f} |",
                flush=True,
            )


def divergences(model: Any, other: Peer, ids: list[int]) -> None:
    """Print KL from float32 arithmetic on the same weights, of ours and of llama.cpp's logits."""
    import numpy as np
    import torch

    found = {f"tswift, inputs of {bits} bits": logits_of(model, ids, bits) for bits in (16, 8)}
    with torch.inference_mode():
        right = in_floats(model.target.model)(torch.tensor([ids]), use_cache=False).logits[0]
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/logits.npy"
        for name, way in LOGITS.items():
            other.ask(name=name, ids=ids, logits=path)
            found[way] = torch.from_numpy(np.load(path))
    expected = right.double().log_softmax(-1)
    for name, logits in found.items():
        apart = (expected.exp() * (expected - logits.double().log_softmax(-1))).sum(-1)
        changed = (logits.argmax(-1) != right.argmax(-1)).double().mean().item()
        print(
            f"| {name} | {apart.mean():.2e} | {apart.max():.2e} | {100 * changed:.1f}% |",
            flush=True,
        )


def logits_of(model: Any, ids: list[int], bits: int) -> Any:
    """``[n, V]`` logits of a text by our passes, whose inputs are rounded to so many bits."""
    import torch

    from tswift.caches import FullKV
    from tswift.forward.cpu.products import PackedLinear
    from tswift.forward.text import chunks

    target = model.target
    for layer in target.model.modules():
        if isinstance(layer, PackedLinear):
            layer.input_bits = bits
    target.pack()
    kv = FullKV(target.kv_shape, len(ids))
    with torch.inference_mode():
        return torch.cat([target.logits(chunk.hidden) for chunk in chunks(target, ids, kv)])


def in_floats(network: Any) -> Any:
    """A model of codes as transformers computes it on the dequantised weights, in float32."""
    import torch
    from torch import nn
    from transformers import AutoModelForCausalLM

    from tswift.forward.cpu.products import PackedEmbedding, PackedLinear

    config = deepcopy(network.config)  # which is told of another attention
    plain = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    )
    for name, module in network.named_modules():
        if isinstance(module, PackedLinear | PackedEmbedding):
            owner = plain.get_submodule(name)
            owner.weight = nn.Parameter(module.packed.whole(), requires_grad=False)
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
    parser.add_argument("--yarn", type=float)
    parser.add_argument("--only", choices=("speed", "kl"))
    parser.add_argument(
        "--ways",
        type=lambda text: [WAYS[each] for each in text.split(",")],
        default=[*WAYS.values()],
        help=f"of {','.join(WAYS)}; each reads the prompt by itself, lookup slowly without states",
    )
    parser.add_argument("--states", type=Path, help="folder of llama.cpp's prompts, read before")
    asked = parser.parse_args()
    if asked.serve:
        serve(asked)
        return
    os.environ[_WAITING] = "passive"
    from tswift.loading.model import load

    model = load(asked.file, kv_dtype=asked.kv_dtype, yarn=asked.yarn)
    print(f"tswift: {model.layers}{model.remarks()}")
    text = model.encode(asked.text.read_text())
    if max(asked.depths) > len(text):
        parser.error(f"--depths: {asked.text} has {len(text):,} tokens (--text)")
    with peer(asked, min(asked.positions, model.target.max_positions)) as other:
        if asked.only != "kl":
            print("| depth | | tokens/s | |\n| ---: | --- | ---: | --- |")
            speeds(model, other, text, asked)
        if asked.only != "speed":
            print("| | KL mean | largest | greedy tokens changed |\n| --- | ---: | ---: | ---: |")
            divergences(model, other, text[:1024])


if __name__ == "__main__":
    main()
