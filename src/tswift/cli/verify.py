"""``tswift verify``: is this text what the sampling rule draws?"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tswift.cli import options
from tswift.cli.output import FAILED, Bars, Output, loading_notice, show, writable
from tswift.errors import InputError
from tswift.jobs.config import AuditConfig, TextConfig
from tswift.jobs.folder import AUDIT, read_run, read_tokens
from tswift.models.config import ModelConfig, refuse_shape
from tswift.sampling.parameters import SamplingParams

if TYPE_CHECKING:
    from tswift.decoding.audit import Audit
    from tswift.jobs.verification import AuditInput
    from tswift.loading.model import LoadedModel
    from tswift.tables import Table


_MAX_SHOWN = 20


def verdict(audit: Audit, *notes: str | None) -> Table:
    """What was found, as a table: a line per class, how far rounding reaches,
    and what the audit does not see.
    """
    from tswift.tables import Table

    rows = [
        _row("drawn exactly", audit.exact, (audit.least_lead, audit.greatest_lead)),
        _row("within rounding", len(audit.within), (finding.margin for finding in audit.within)),
        _row("violations", len(audit.violations), (finding.margin for finding in audit.violations)),
    ]
    if audit.width is not None:
        del rows[1]
    title = f"{audit.tokens:,} tokens judged in {audit.seconds:,.1f} s"
    return Table(
        title,
        ("", "tokens", "smallest", "largest"),
        rows,
        left=1,
        notes=[*filter(None, notes), *_notes(audit)],
    )


def _row(name: str, count: int, margins: Iterable[float | None]) -> tuple[str, ...]:
    known = [margin for margin in margins if margin is not None]
    return name, f"{count:,}", _number(min(known, default=None)), _number(max(known, default=None))


def _notes(audit: Audit) -> Iterator[str]:
    yield "drawn exactly: smallest and largest lead in score over the next token"
    yield "other rows: smallest and largest change of the logits that explains the token"
    if audit.width is None:
        yield (
            f"passes of different widths differ by up to {_number(audit.measured)} in a logit; "
            f"within rounding is up to {_number(audit.bound)}"
        )
        yield (
            f"{audit.near_ties:,} of {audit.tokens:,} tokens have a competitor within rounding: "
            "an error that swaps them is not seen"
        )
    else:
        yield "all logits are those of the run, bit for bit: any changed token is seen"
    if audit.measured > audit.limit:
        yield (
            f"that is more than rounding can make, {_number(audit.limit)}: these passes do not "
            "compute the same"
        )
    if audit.violations:
        places = ", ".join(str(finding.index) for finding in audit.violations[:_MAX_SHOWN])
        more = len(audit.violations) - _MAX_SHOWN
        yield f"violations at generated tokens (from 0) {places}" + (
            f" and {more:,} more" if more > 0 else ""
        )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


@options.takes(
    TextConfig,
    AuditConfig,
    SamplingParams,
    ModelConfig,
    without=("length", "heads", "draft_model", "drafter", "attention"),
    shown={
        "model": "the run's, or demo",
        "device": "the run's, or auto",
        "dtype": "the run's, or auto",
        "kv_dtype": "the run's, or auto",
        "weights": "as the run's model was",
        "exact": "as the run; within rounding with --tokens",
    },
)
def verify(
    typed: options.Typed,
    run: Annotated[
        Path | None, typer.Argument(help="Folder of a run, finished or not.", show_default=False)
    ] = None,
    tokens: Annotated[
        Path | None,
        options.option(
            "Options",
            "Instead of a run: file of token ids, little-endian uint32, made with the options "
            "given.",
            "--tokens",
        ),
    ] = None,
    json_file: options.Json = None,
    quiet: options.Quiet = False,
    no_progress: options.NoProgress = False,
) -> None:
    """Check every token of a run, or of a text and the options that made it,
    in one pass over the text.

    Each token of an exact run is drawn exactly or a violation. Of others it may also be within
    rounding: a change of the logits no larger than rounding makes, which is measured, explains it.
    A run's text.txt must be the text of its tokens. Exit code 1 if it is not, or if there is a
    violation.
    """
    made = [name for name in typed.values if name not in typed.of(ModelConfig)]
    if run is None and tokens is None:
        raise InputError("give the folder of a run, or --tokens and the options that made them")
    if run is not None and tokens is not None:
        raise InputError("cannot be given together with a run", "tokens")
    if run is not None and made:
        raise InputError("goes with --tokens; a run has its own", made[0])
    config = typed.make(AuditConfig)
    refuse_shape(config.model.model)
    # what is mistyped is refused before torch is imported, which takes seconds
    record = None if run is None else read_run(run)
    ids, text = (
        ([], "")
        if tokens is None
        else (read_tokens(tokens, "tokens"), config.text.read(config.model.model))
    )
    found = writable(json_file)
    named = run is None or "model" in config.given
    with loading_notice(config.model.model if named else str(run), quiet):
        from tswift.jobs.verification import run_input, text_input

        if record is not None:
            audited = run_input(record, config)
        else:
            assert tokens is not None
            audited = text_input(tokens, ids, config, text)
    _judge(audited, found, typed.command, quiet, not no_progress)


def verify_folder(
    model: LoadedModel | None, path: Path, command: Sequence[str], quiet: bool, progress: bool
) -> None:
    """Verify a run that is done, with its model if that is still loaded;
    ``verify.json`` goes to its folder.

    Raises:
        Exit: it is not what the rule draws.
    """
    from tswift.jobs.verification import run_input, with_model

    run = read_run(path)
    audited = run_input(run) if model is None else with_model(run, model)
    _judge(audited, Output(path / AUDIT), command, quiet, progress, stderr=True)


def _judge(
    audited: AuditInput,
    found: Output,
    command: Sequence[str],
    quiet: bool,
    progress: bool,
    stderr: bool = False,
) -> None:
    """Audit, print and write what was found; exit with 1 if the text is not what the rule draws."""
    with Bars(quiet, progress) as bars:
        audit = audited.audit(lambda done, total: bars.update("verify", done, total))
    table = verdict(audit, audited.text_fault, audited.note)
    if not stderr:
        found.show(table)
    elif not quiet:
        show(table, stderr=True)
    found.write("verify", command, audited.report(audit))
    if not audit.ok or audited.text_fault:
        raise typer.Exit(FAILED)
