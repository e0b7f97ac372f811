"""Texts of ``tswift bench --workload structured``: a diary, a building, a log, and so on with other
contents.

The frame repeats, what stands in it does not. ``structured.json`` has the frames, in which ``{n}``
counts entries, and the words for each other name in braces.

    python -m recipes.structured 12 > prompts/structured.jsonl
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import count, islice
from pathlib import Path
from random import Random

_ENTRIES = 16  # of a text


class _Slots(dict[str, object]):
    """Words for an entry.

    Only ``random()`` is used, which gives the same in every version of Python.
    """

    def __init__(self, words: Mapping[str, Sequence[str]], random: Random, number: int) -> None:
        super().__init__(n=number)
        self._words = words
        self._random = random

    def __missing__(self, name: str) -> str:
        if name not in self._words:  # d3 for a number of three digits
            return "".join(str(int(self._random.random() * 10)) for _ in range(int(name[1:])))
        return self._words[name][int(self._random.random() * len(self._words[name]))]


def structured() -> Iterator[dict[str, str]]:
    """Lines of the file, without end."""
    content = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
    for seed in count():
        for name, form in content["forms"].items():
            random = Random(f"{name} {seed}")
            slots = (_Slots(content["words"], random, number) for number in range(1, _ENTRIES + 1))
            text = form["beginning"] + "".join(map(form["entry"].format_map, slots))
            yield {"id": f"{name}-{seed}", "prompt": text}


if __name__ == "__main__":
    for line in islice(structured(), int(sys.argv[1])):
        print(json.dumps(line))
