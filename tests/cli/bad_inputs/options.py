"""Options: wrong types, out of range, empty, huge, negative, no numbers;
and those that do not go together.
"""

from __future__ import annotations

from collections.abc import Sequence

from tests.cli.bad_inputs.case import Case, words_of

_HUGE = "1" + "0" * 40

# by command and option: values, each of them bad alone
VALUES: dict[str, dict[str, Sequence[str]]] = {
    "generate": {
        "--len": ("", "0", "9" * 5000),
        "--model": ("", ".", "..", "nope/", "a/b/c", "/nowhere", "~nobody/x", "x" * 5000),
        "--device": ("", "cuda:x", "cuda:99", "meta"),
        "--dtype": ("", "int8"),
        "--heads": ("", "nope", "/nowhere", "x" * 5000, "nowhere\x00", "/dev/zero", "\x1b[2Jgone"),
        "--resume": ("", "nowhere", "nowhere\x00"),
    },
    "generate --resume RUN": {
        "--len": ("3", "4096"),
        "--temperature": ("0.5", "nan"),
        "--method": ("ar", "nope"),
        "--heads": ("chained", "nope"),
        "--model": ("demo", "/nowhere"),
        "--device": ("cuda:9", "tpu"),
        **{"--prompt": ("other.txt",), "--out": ("elsewhere",), "--preset": ("llama3.1-8b",)},
    },
    "train": {
        "--corpus": ("", "/nowhere", "/dev/zero", "nowhere\x00", "x" * 5000),
        "--model": ("", "/nowhere", "shape:llama3.1-8b"),
        "--kind": ("", "nope"),
    },
    "compare": {
        "--heads": ("nope",),
        "--model": ("shape:nope", "shape:", "shape:llama3.1-8b", "/nowhere"),
    },
    "bench": {
        "--prefill": ("1", "4000", _HUGE),
        "--warmup": ("5000",),
        "--prompts": ("", "/nowhere", "pg19:²"),
        "--model": ("shape:nope",),
    },
    "roofline": {
        "--model": ("shape:nope", "/nowhere"),
        "--dtype": ("nope",),
        "--bandwidth": ("nan", "1e308"),
    },
    "verify --tokens": {
        "--prefill": ("0",),
        "--min-p": ("2",),
        "--model": ("/nowhere", "shape:llama3.1-8b"),
    },
    "verify RUN": {"--model": ("/nowhere",), "--device": ("nope",), "--dtype": ("nope",)},
}

# by command line: what is typed, and behind "|" what the line has to say
TOGETHER = {
    "generate": """
        --method magicdec --gamma 0 | --gamma
        --draft-weights int8 | --draft-weights is gone: a copy of fewer bits hardly drafted faster
        --method tokenswift --gamma 4 | --gamma
        --method standalone | --draft-model
        --method medusa --draft-model RUN | --draft-model
        --method block --drafter RUN | --drafter
        --method medusa --tree 1,1,1,1 | --tree
        --attention flash --dtype bfloat16 | --attention
        --attention triton --dtype float64 | --attention
        --heads conditioned | --heads
        --len 4090 | --len
        --chat --system /nowhere | --system
        --discard-damaged | --discard-damaged
        --nope | --nope
        --len | --len
        stray | stray
        --quiet=1 | --quiet
        --stop-at-eos 1 | 1
        -x | -x
        --keep-special-tokens --skip-special-tokens | --skip-special-tokens: is given both ways
        --no-stop-at-eos --stop-at-eos | --stop-at-eos: is given both ways
        --skip-too-long | --skip-too-long: goes with --prompts
        --shard 1/2 | --shard: goes with --prompts
        --parallel 2 | --parallel: goes with --prompts
        --preset qwen2.5-7b --sampling paper | --sampling: cannot be given together with --preset
    """,
    "compare": """
        --methods ar,standalone | --draft-model
        --methods ar,medusa --draft-model RUN | --draft-model
        --json | --json
        --out x | --out
    """,
    "bench": """
        --shard 1/2 | --shard is gone: bench measures its grid in one process
        --merge a b | --merge is gone
        --prefill 8 --prefill 8 | --prefill
        --seeds 1 --seed 2 | --seeds: is given twice
        --method ar --methods medusa | --methods: is given twice
        --against BENCH | --against
        --fail-on alpha | --against
        --force | --force
        --against BENCH --fail-on tokens_per_step:9 | --fail-on
        --against BENCH --fail-on speedup:10% | --repeats
        --against BENCH --fail-on alpha --seeds 3 | --against
        --lens 4090 --warmup 0 | --lens
    """,
    "bench --suite": """
        table2 | --suite: no suite 'table2'; there are table1, table3, table4, table5
        table3 --suite table4 | --suite: is given twice
        tabel3 | ; did you mean table3?
        table5 --prefill 8 --ngrams 3 | --ngrams: suite table5 sets it itself
        table14 --prefill 8 | --prefill: suite table14 sets it itself
        table3 --prefill 8 --stop-at-eos | --stop-at-eos: cannot be given together with --suite
        table3 --prefill 8 --simulate-alpha 0.5 | cannot be given together with --suite
        table12 --prefill 8 --with-reference-ar | suite table12 compares no methods
        table12 --prefill 8 --gamma 9 | --gamma: must be between 0 and 3 for tokenswift, got 9
        table12 --prefill 8 --tree medusa=1,1 | which is not among the methods
        table12 --prefill 8 --model shape:llama3.1-8b | --model:
        table12 --prefill 8 --lens 5000 | --lens:
    """,
    "roofline": """
        --device h200 | --bandwidth
        --budget 64 | --budget
    """,
    "verify --tokens": """
        RUN | --tokens: cannot be given together
        --len 3 | --len
        --prompt /nowhere | --prompt
    """,
    "verify RUN": """
        --seed 3 | --seed
        --exact | --exact:
        --prompt x | --prompt
        --stop-at-eos | --stop-at-eos
        RUN |
        --attention sdpa | --attention
    """,
    "generate --resume RUN": """
        --chat | --chat
        --reuse-recent | --reuse-recent
        --no-shared-noise | --shared-noise
    """,
    "train": """
        --out RUN | --out
        --resume RUN | --out
        --seq-len 5000 | --seq-len
        --steps 3 --minutes 1 | --minutes
    """,
    "heads inspect FILE": """
        HEADS |
        --json | --json
    """,
    "tswift": """
        train | --corpus
        train-draft --corpus x | train-draft is gone: python -m recipes.draft
        train --resume /nowhere | --resume
        generate --prompts a.jsonl | --out: is required with --prompts
        generate --prompts a --out b --shard 3/2 | --shard: wants I/N, the Ith of N shards, got
        generate --prompts a --out b --prompt-text c | --prompt-text: is for one text
        generate --prompts a --out b --verify | --verify: is for one text
        generate --prompts a --out b --parallel 65 | --parallel: must be between 1 and 64, got 65
        generate --prompts a --out b --resume c | --resume: cannot be given together with --prompts
        heads nope | nope
        heads inspect | file
        heads inspect /nowhere | /nowhere
        heads inspect /dev/zero | /dev/zero
        heads inspect PROMPT | prompt.txt
        runs /nowhere | /nowhere
        runs PROMPT | prompt.txt
        runs /dev/zero | /dev/zero
        runs a b | b
        nope | nope
        Generate | Generate
        --version=3 | --version
        verify | --tokens
        verify /nowhere | /nowhere
        verify PROMPT | prompt.txt
        roofline --device nope --dtype bfloat16 | --device
        roofline --device a100 --dtype bfloat16 | ; did you mean a100-80g?
        roofline --device h200 --dtype float32 | --dtype
        roofline --bandwidth 100 | --bandwidth
        roofline --flops 100 | --bandwidth
    """,
}


def shortened(value: str) -> str:
    """A value as a case's name says it."""
    return value if len(value) < 40 else f"{value[:12]}... ({len(value):,} characters)"


def _case(command: str, words: Sequence[str], says: str) -> Case:
    return Case(
        f"{command} {' '.join(map(shortened, words))!r}",
        lambda world: words_of(world, command, *words),
        says,
    )


OPTIONS: tuple[Case, ...] = (
    *(
        _case(command, (option, value), option)
        for command, by_option in VALUES.items()
        for option, values in by_option.items()
        for value in values
    ),
    *(
        _case(command, typed.split(), says.strip())
        for command, lines in TOGETHER.items()
        for typed, _, says in (line.partition("|") for line in lines.strip().splitlines())
    ),
)
