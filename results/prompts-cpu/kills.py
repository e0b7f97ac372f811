"""Many texts as one job, killed at random moments and gone on with, beside the same undisturbed.

    python results/prompts-cpu/kills.py FOLDER --texts 200 --len 500 --kills 10

Exits with 1 where a text differs, is missing, or was made twice.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from pathlib import Path
from random import Random

NOVEL = Path(__file__).parents[2] / "prompts" / "long-novel.txt"
SLACK = 2.0  # most seconds between a text's beginning and a kill
ALONE = 5  # texts that are also made by a command of their own


def command(*words: object) -> list[str]:
    """``tswift generate`` with some options."""
    return [sys.executable, "-m", "tswift", "generate", *map(str, words), "--quiet"]


def write_prompts(path: Path, count: int, random: Random) -> list[dict[str, object]]:
    """Prompts of 20 to 120 words of a novel, each with a seed."""
    words = NOVEL.read_text().split()
    lines: list[dict[str, object]] = []
    for seed in range(count):
        start = random.randrange(len(words) - 120)
        prompt = " ".join(words[start : start + random.randint(20, 120)])
        lines.append({"prompt": prompt, "seed": seed})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return lines


def killed(asked: list[str], out: Path, more: float, slack: float, told: Path) -> bool:
    """Whether a command was still at work when it was killed: when it had begun so many texts more,
    and some seconds later. What it printed goes to a file.
    """
    there = begun(out)
    with told.open("ab") as printed:
        process = subprocess.Popen(asked, stdout=printed)
        while process.poll() is None and begun(out) < there + more:
            time.sleep(0.01)
        try:
            process.wait(slack)
        except subprocess.TimeoutExpired:
            process.kill()  # SIGKILL
            process.wait()
            return True
    return False


def begun(out: Path) -> int:
    """How many texts of a batch have a record."""
    return len(list(out.glob("*/run.json")))


def finished(out: Path) -> int:
    """How many texts of a batch are finished."""
    records = out.glob("*/run.json")
    return sum(json.loads(path.read_text()).get("state") == "finished" for path in records)


def main() -> int:
    """Make the texts undisturbed, make them with kills, compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--texts", type=int, default=200)
    parser.add_argument("--len", type=int, default=500)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)  # texts that are there are not made again
    prompts, random = given.folder / "prompts.jsonl", Random(given.seed)
    lines = write_prompts(prompts, given.texts, random)
    plain, out = given.folder / "plain", given.folder / "killed"
    before = time.perf_counter()
    asked = command("--prompts", prompts, "--out", plain, "--len", given.len, "--method", "ar")
    subprocess.run(asked, check=True, stdout=subprocess.DEVNULL)
    took = time.perf_counter() - before
    print(f"{given.texts} texts of {given.len} tokens undisturbed, by ar: {took:.0f} s", flush=True)

    told = given.folder / "printed.jsonl"
    asked = command("--prompts", prompts, "--out", out, "--len", given.len)
    for number in range(given.kills):
        left = given.texts - begun(out)
        more = random.randrange(max(1, 2 * left // (given.kills - number + 1)))
        if not killed(asked, out, more, random.uniform(0, SLACK), told):
            print(f"kill {number + 1}: ended before", flush=True)
            continue
        print(f"kill {number + 1}: {finished(out)} finished, {begun(out)} begun", flush=True)
    assert not killed(asked, out, math.inf, 0, told)

    whole = (plain / "out.jsonl").read_bytes()
    same = whole == (out / "out.jsonl").read_bytes()
    texts = [json.loads(line) for line in whole.splitlines()]
    tokens = {(out / text["folder"] / "tokens.u32").stat().st_size // 4 for text in texts}
    printed = [json.loads(line)["id"] for line in told.read_bytes().splitlines()]
    print(f"out.jsonl the same, byte for byte: {same}; {len(texts)} texts of {tokens} tokens")
    print(f"lines printed: {len(printed)}, of different texts: {len({*printed})}")
    alone = 0
    for place in random.sample(range(given.texts), min(ALONE, given.texts)):
        line = lines[place]
        asked = command("--prompt-text", line["prompt"], "--seed", line["seed"], "--len", given.len)
        own = subprocess.run([*asked, "--method", "reuse"], check=True, capture_output=True)
        alone += own.stdout.decode() == texts[place]["text"]
    print(f"equal to a run of its own: {alone} of {ALONE}")
    right = len(texts) == given.texts and tokens == {given.len}
    twice = len({*printed}) != len(printed)
    return int(not (same and right and alone == min(ALONE, given.texts)) or twice)


if __name__ == "__main__":
    sys.exit(main())
