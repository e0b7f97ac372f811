"""What users of ``train`` see, all of it through the command line,
against golden.json.

With TSWIFT_GOLDEN=write that file is written anew, after a change that is meant to be seen.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from tests.helpers import read_json
from tswift.cli import main
from tswift.training.config import TIMES

GOLDEN = Path(__file__).with_name("golden.json")
RUNS = {
    **{
        f"heads {kind} {objective}": f"train --kind {kind} --objective {objective} "
        "--alpha-tokens 9 --lr 0.01"
        for kind in ("chained", "conditioned")
        for objective in ("text", "distill")
    },
}
SHORT = (
    "--seq-len 64 --batch 2 --accumulate 2 --steps 3 --warmup 2 --eval-every 2 --device cpu --out "
    "new"
)


def written(code: int) -> dict[str, Any]:
    """Names of all files, fields and tensors that a short training has written, and its figures."""
    folder = Path("new")
    record = read_json(folder / "train.json")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    with safe_open(folder / "checkpoint.safetensors", framework="pt") as file:
        about = json.loads(file.metadata()["tswift"])
        tensors = {name: str(file.get_tensor(name).dtype) for name in file.keys()}  # noqa: SIM118
    return {
        "code": code,
        "files": sorted(path.name for path in folder.iterdir()),
        "record": sorted(record),
        "plan": record["plan"] | {"corpus": "CORPUS", "model": "MODEL"},
        "corpus": record["corpus"],
        "lines": [[line["step"], sorted(line), sorted(line.get("held_out", ()))] for line in lines],
        "checkpoint": [about | {"seconds": 0}, tensors],
        "losses": [line["loss"] for line in lines if "loss" in line],
        **{
            when: {name: record[when][name] for name in record[when] if name not in TIMES}
            for when in ("before", "after")
        },
    }


def near(found, wanted):
    """``found``, with its figures those of ``wanted`` where they differ by no more than processors
    round.
    """
    if isinstance(wanted, dict) and isinstance(found, dict):
        return {name: near(value, wanted.get(name)) for name, value in found.items()}
    if isinstance(wanted, list) and isinstance(found, list) and len(wanted) == len(found):
        return [near(*pair) for pair in zip(found, wanted, strict=True)]
    same = (
        isinstance(wanted, float)
        and isinstance(found, float)
        and found == pytest.approx(wanted, rel=1e-3, abs=0.05)
    )
    return wanted if same else found


@pytest.mark.parametrize("name", RUNS)
def test_what_is_written_and_every_loss(
    tiny,
    name,
    tmp_path,
    monkeypatch,
    capsys,
):
    monkeypatch.chdir(tmp_path)
    # random weights: those of the model that was trained are each processor's own, and so are its
    # losses
    code = main(
        [
            *RUNS[name].split(),
            "--model",
            str(tiny.deep),
            "--corpus",
            str(tiny.corpus),
            *SHORT.split(),
        ]
    )
    found = written(code)
    golden = read_json(GOLDEN)
    if os.environ.get("TSWIFT_GOLDEN") == "write":
        golden[name] = dict(found)
        lines = ",\n".join(
            f"{json.dumps(key)}: {json.dumps(value)}" for key, value in golden.items()
        )
        GOLDEN.write_text(f"{{\n{lines}\n}}\n")
    wanted = golden[name]
    assert found.pop("losses") == [
        pytest.approx(losses, rel=1e-3) for losses in wanted.pop("losses")
    ]
    assert near(found, wanted) == wanted
