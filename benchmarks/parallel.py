"""Requests at once: tswift's server, texts side by side and one after another, beside llama.cpp's,
in turns.

llama.cpp's server runs by the interpreter of an environment that has ``xllamacpp``; it is no
dependency of tswift. Every turn sends as many requests at once as there are texts, to one server,
while the others wait; a rate is all new tokens over the time until the last answer. Both draw at
the same temperature, with no end-of-text token. With ``--prefill N`` a text goes on after so many
tokens: both servers have read them before, so that decoding is timed, and what a server reads
again is timed with it.

    python -m benchmarks.parallel FILE.gguf --python /tmp/xl/bin/python --texts 1,4,8
    --tokens 300 --methods ar,auto --repeats 3 --out results/parallel-cpu
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.tables import markdown
from tswift.machine import environment, now

ASKED = (
    "Write a story about a lighthouse keeper.",
    "Explain how a steam engine works.",
    "Describe the city of Venice at night.",
    "Write a letter from a sailor to his mother.",
    "Tell the history of the bicycle.",
    "Tell me about the planet Mars.",
    "Write a dialogue between a cat and a dog.",
    "Give advice to a young painter.",
)
LLAMA, ALONE, BESIDE = "llama.cpp", "tswift, one after another", "tswift"
# serves a file with a slot for each text, until a signal comes; in an environment without tswift
_SERVE_LLAMA = """
import sys, time, xllamacpp
file, texts, positions, threads = sys.argv[1], *map(int, sys.argv[2:])
wanted = xllamacpp.CommonParams()
wanted.model.path = file
wanted.n_parallel = texts
wanted.n_ctx = texts * positions
wanted.cpuparams.n_threads = wanted.cpuparams_batch.n_threads = threads
running = xllamacpp.Server(wanted)
print(running.listening_address, flush=True)
while True:
    time.sleep(1)
"""
_BOOK = Path(__file__).parents[1] / "prompts" / "long-novel.txt"


@contextmanager
def server(words: list[str]) -> Iterator[str]:
    """A server in a process, by the last word of the line in which it says its address."""
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert process.stdout is not None
        url = next(
            word.rstrip("/").removesuffix("/v1")
            for line in process.stdout
            for word in line.split()
            if word.startswith("http://127")
        )
        # what it says later is not to fill the pipe
        subprocess.Popen(["cat"], stdin=process.stdout, stdout=subprocess.DEVNULL)
        yield url
    finally:
        process.terminate()
        process.wait()


def ask(url: str, body: dict[str, Any]) -> int:
    """How many tokens a request's answer has."""
    data = json.dumps(body).encode()
    request = urllib.request.Request(
        f"{url}/v1/completions", data, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=3600) as answer:
        return int(json.load(answer)["usage"]["completion_tokens"])


def turn(url: str, prompts: list[str], asked: argparse.Namespace, more: dict[str, Any]) -> float:
    """Tokens per second of all texts, asked for at once."""
    bodies = [
        {
            "prompt": prompt,
            "max_tokens": asked.tokens,
            "temperature": asked.temperature,
            "seed": seed,
            "ignore_eos": True,
            **more,
        }
        for seed, prompt in enumerate(prompts)
    ]
    with ThreadPoolExecutor(len(bodies)) as pool:
        started = time.perf_counter()
        made = sum(pool.map(lambda body: ask(url, body), bodies))
        return made / (time.perf_counter() - started)


def main() -> None:
    """Time all in turns, print a table, and write the samples."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file")
    parser.add_argument(
        "--python", help="an interpreter that has xllamacpp; none times tswift alone"
    )
    parser.add_argument("--texts", default="1,4,8", help="at once, separated by commas")
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--prefill", type=int, default=0, help="about so many tokens before a text")
    parser.add_argument("--methods", default="ar,auto")
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    counts = [int(count) for count in asked.texts.split(",")]
    most = max(counts)
    book = _BOOK.read_text()
    # letters, of which a token has four or five
    before = [book[300 * k : 300 * k + int(4.3 * asked.prefill)] for k in range(most)]
    prompts = [f"{before[k]}\n\n{ASKED[k % len(ASKED)]}\n" for k in range(most)]
    samples: list[dict[str, Any]] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        ways: list[tuple[str, str, dict[str, Any]]] = []
        for name, width in ((ALONE, 1), (BESIDE, most)):
            words = [sys.executable, "-m", "tswift", "serve", "--port", "0", "--model", asked.file]
            words += ["--parallel", str(width), "--queue", str(most), "--runs", str(folder / name)]
            url = stack.enter_context(server(words))
            ways += [
                (f"{name}, {method}", url, {"method": method})
                for method in asked.methods.split(",")
            ]
        if asked.python:
            positions = asked.tokens + 2 * asked.prefill + 200
            numbers = [most, positions, os.cpu_count() or 1]
            words = [asked.python, "-c", _SERVE_LLAMA, asked.file, *map(str, numbers)]
            ways.append((LLAMA, stack.enter_context(server(words)), {}))
        for name, url, more in ways:
            turn(url, prompts, argparse.Namespace(**{**vars(asked), "tokens": 2}), more)
            print(f"{name} is there", flush=True)
        for repeat in range(asked.repeats):
            for count in counts:
                for name, url, more in ways:
                    rate = turn(url, prompts[:count], asked, more)
                    samples.append({"way": name, "texts": count, "repeat": repeat, "rate": rate})
                    print(f"{repeat + 1}: {count} texts, {name}: {rate:.1f}", flush=True)
    rows = []
    for name, *_ in ways:
        rates = {
            count: [x["rate"] for x in samples if (x["way"], x["texts"]) == (name, count)]
            for count in counts
        }
        rows.append(
            {
                "tokens/s in all": name,
                **{
                    f"{count} at once": f"{median(own):.1f} ({min(own):.1f} to {max(own):.1f})"
                    for count, own in rates.items()
                },
            }
        )
    print(markdown(rows))
    if asked.out:
        asked.out.mkdir(parents=True, exist_ok=True)
        import torch

        content = {
            "command": sys.argv,
            "ended": now(),
            "environment": environment(torch.device("cpu")),
            "samples": samples,
        }
        file = asked.out / f"after-{asked.prefill}.json"
        file.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
