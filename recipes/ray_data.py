"""Many texts with Ray Data: each actor holds a model,
and each row of a JSON Lines file is a run's folder.

    pip install ray
    python recipes/ray_data.py prompts.jsonl texts --model demo --actors 2 --len 500

What was made before, by whichever actor, is found in the folders and not made again.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import ray

from tswift.jobs.batch import Batch, line_of
from tswift.jobs.job import Signals


class Writer:
    """A loaded model, and the batch whose texts it writes."""

    def __init__(self, prompts: Path, out: Path, options: dict[str, Any]) -> None:
        self._batch = Batch(prompts, out, options)

    def __call__(self, rows: dict[str, Any]) -> dict[str, Any]:
        """The texts of some rows, by their places in the file."""
        tasks = [self._batch.tasks[place] for place in rows["place"]]
        with Signals() as signals:
            self._batch.make(tasks, ["ray_data.py"], signals)
        return {"place": rows["place"], "line": [line_of(task) for task in tasks]}


def main() -> None:
    """Parse, share the rows out, say how many texts there are."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prompts", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--len", type=int, default=500)
    parser.add_argument("--actors", type=int, default=1)
    parser.add_argument("--gpus", type=float, default=0, help="of an actor")
    given = parser.parse_args()
    out = given.out.resolve()
    prompts = given.prompts.resolve()
    options = {"model": given.model, "length": given.len, "out": out}
    batch = Batch(prompts, out, options)
    batch.claim()
    places = [{"place": place} for place in range(len(batch.tasks))]
    made = ray.data.from_items(places, override_num_blocks=len(places)).map_batches(
        Writer,
        fn_constructor_args=(prompts, out, options),
        batch_size=4,
        compute=ray.data.ActorPoolStrategy(size=given.actors),
        num_gpus=given.gpus,
    )
    print(f"{len(made.take_all()):,} texts were made or were there; all are in {batch.gather()}")


if __name__ == "__main__":
    main()
