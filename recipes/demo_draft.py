"""The recipe of the bundled draft model: ``python -m recipes.demo_draft --corpus FOLDER --out
DIR``.

It is ``recipes.draft`` on the documents that the bundled model was trained on, and figures of what
came of it on the six that both never saw. A training that was stopped is gone on with.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from recipes.agreement import Scores, compare, mean, read_logits
from recipes.corpus import PG19, load_documents, split, token_stream
from recipes.draft import DraftPlan, load_large, train_draft
from tswift.caches import FullKV
from tswift.errors import InputError, Object
from tswift.forward.passes import Nodes
from tswift.forward.target import Target
from tswift.loading.model import LoadedModel, load
from tswift.models.config import DEMO
from tswift.sampling.parameters import SamplingParams, apply_eos_policy

POSITIONS = (0, 10_000, 40_000, 98_000)
WINDOW, TEXTS = 1024, 2  # tokens compared at each position, and in how many texts
RECENT = 512  # tokens that the draft model reads, as over a bounded cache
_ROWS = 256  # tokens in a pass, which all have that many before them
STEPS = 5000


def build(corpus: str, out: Path, work: Path, plan: DraftPlan, about: str = "") -> None:
    """Train on a corpus, or go on with that; measure, and write model and card to ``out``."""
    kept, held = split(load_documents(corpus))
    record = train_draft(load_large(DEMO, "cpu"), plan, out, work / "train")
    model = load(DEMO, device="cpu", draft_model=str(out))
    figures = measure(model, token_stream(held, model.tokenizer), print)
    (out / "README.md").write_text(
        _card(model, plan, record, figures, about or f"`{corpus}`", len(kept))
    )


def keep_documents(corpus: str, path: Path) -> None:
    """Write the documents that are trained on to a parquet file, if it is not there."""
    import pyarrow
    from pyarrow import parquet

    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        kept, _ = split(load_documents(corpus))
        parquet.write_table(pyarrow.table({"text": kept}), path, row_group_size=16)


def measure(
    model: LoadedModel, held_out: np.ndarray, log: Callable[[str], None]
) -> list[list[Scores]]:
    """Compare the draft model with the model at each of ``POSITIONS`` of texts that neither was
    trained on.

    Returns:
        Means over the texts, where the draft model reads the whole text and where it reads the last
        512 tokens.
    """
    assert model.draft is not None
    params, _ = apply_eos_policy(SamplingParams(), model.eos_ids, stop_at_eos=False)
    length = POSITIONS[-1] + WINDOW + 1
    scores: list[list[tuple[Scores, Scores]]] = []
    for start in np.linspace(0, len(held_out) - length, TEXTS).astype(int):
        text = held_out[start : start + length].tolist()
        scores.append(
            agreements(model.target, model.draft, text, POSITIONS, WINDOW, params, RECENT)
        )
        log(f"held-out text from token {start:,}: {scores[-1]}")
    return [
        [mean([text[place][reads] for text in scores]) for place in range(len(POSITIONS))]
        for reads in range(2)
    ]


@torch.inference_mode()
def agreements(
    target: Target,
    draft: Target,
    text: Sequence[int],
    positions: Sequence[int],
    window: int,
    params: SamplingParams,
    recent: int,
) -> list[tuple[Scores, Scores]]:
    """Compare a draft model with its target on ``window`` tokens from each of rising positions on.

    The target reads the whole text before a position; the draft model, too, or just its last
    ``recent`` tokens.
    """
    caches = [FullKV(model.kv_shape, positions[-1] + window) for model in (target, draft)]
    scores = []
    for position in positions:
        ours, whole = (
            read_logits(model, text, position, window, kv)
            for model, kv in zip((target, draft), caches, strict=True)
        )
        last = _read_recent(draft, text, position, window, recent)
        scores.append(
            (
                compare(params, text, position, ours, whole),
                compare(params, text, position, ours, last),
            )
        )
    return scores


def _read_recent(
    model: Target, text: Sequence[int], position: int, window: int, recent: int
) -> Tensor:
    """``[window, V]`` logits with the last ``recent`` tokens (up to 256 more) in the cache,
    at their own positions.
    """
    rows = []
    for start in range(position, position + window, _ROWS):
        first = max(0, start - recent)
        end = min(start + _ROWS, position + window)
        kv = FullKV(model.kv_shape, end - first)
        hidden = []
        for begin in range(first, end, _ROWS):
            places = torch.arange(begin, min(begin + _ROWS, end), device=model.device)
            tokens = torch.tensor(text[begin : begin + len(places)], device=model.device)
            hidden.append(model.forward(Nodes(tokens, places, kv, None)).hidden)
            kv.commit(range(len(places)))
        rows.append(torch.cat(hidden)[start - first :])
    return model.logits(torch.cat(rows)).float()


def _card(
    model: LoadedModel,
    plan: DraftPlan,
    record: Object,
    figures: Sequence[Sequence[Scores]],
    about: str,
    documents: int,
) -> str:
    assert model.draft is not None

    def row(scores: Sequence[Scores], name: str) -> str:
        return " | ".join(f"{each[name]:.3f}" for each in scores)

    whole, recent = figures
    template = (Path(__file__).parent / "draft_card.md").read_text()
    return template.format(
        model=model.draft.model.num_parameters(),
        config=model.draft.model.config,
        about=about,
        documents=documents,
        record=record,
        plan=plan,
        minutes=round(record["seconds"] / 60),
        date=time.strftime("%Y-%m-%d"),
        window=WINDOW,
        texts=TEXTS,
        recent=RECENT,
        head=" | ".join(f"{position:,}" for position in POSITIONS),
        rule=" | ".join("---" for _ in POSITIONS),
        target_losses=row(whole, "target_loss"),
        losses=row(whole, "loss"),
        agreements=row(whole, "agreement"),
        recent_losses=row(recent, "loss"),
        recent_agreements=row(recent, "agreement"),
    )


def main() -> None:
    """Parse the command line and build."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--corpus", default=PG19, help="folder of .parquet or .txt files, or a hub id: %(default)s"
    )
    parser.add_argument("--out", type=Path, default=Path("src/tswift/models/demo/draft"))
    parser.add_argument(
        "--work", type=Path, default=Path("build/demo-draft"), help="intermediate results"
    )
    parser.add_argument("--steps", type=int, default=STEPS, help="of 4,096 tokens")
    parser.add_argument(
        "--about", default="", help="what the corpus is, for the model card (default: its name)"
    )
    args = parser.parse_args()
    path = args.work / "corpus" / "kept.parquet"
    try:
        keep_documents(args.corpus, path)
        plan = DraftPlan(str(path.parent), args.steps, seed=1, held_out=2)
        build(args.corpus, args.out, args.work, plan, args.about)
    except InputError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
