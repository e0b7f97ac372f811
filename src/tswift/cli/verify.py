"""``tswift verify``: is this text what the sampling rule draws?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from tswift.cli import options
from tswift.cli.codes import FAILED
from tswift.cli.verdict import print_audit, progress
from tswift.errors import InputError

if TYPE_CHECKING:
    from tswift.decoding.audit import Audit
    from tswift.jobs.verification import Subject
    from tswift.models.loading import LoadedModel

_TEXT = "Instead of a run"


def verify(
    run: Annotated[Path | None, typer.Argument(help="Folder of a run, finished or not.", show_default=False)] = None,
    json_out: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Write everything to FILE; - for stdout.")
    ] = None,
    tokens: Annotated[
        Path | None, options.option(_TEXT, "File of token ids, little-endian uint32, to verify.", "--tokens")
    ] = None,
    prompt: options.Prompt = None,
    prefill: options.Prefill = None,
    seed: Annotated[int | None, options.option(_TEXT, "The seed it was made with. (default: 0)", "--seed")] = None,
    stop_at_eos: Annotated[
        bool, typer.Option("--stop-at-eos", help="End-of-text tokens could be drawn.", rich_help_panel=_TEXT)
    ] = False,
    temperature: options.Temperature = None,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    eta: options.Eta = None,
    penalty: options.Penalty = None,
    window: options.Window = None,
    model: Annotated[
        str | None, options.option("Model", "demo, a folder or a hub id. (default: the run's, or demo)", "--model")
    ] = None,
    device: Annotated[
        str | None, options.option("Model", "auto, cpu, cuda, cuda:1 ... (default: the run's, or auto)", "--device")
    ] = None,
    dtype: Annotated[
        str | None,
        options.option(
            "Model", "auto, float32, float64, bfloat16 or float16. (default: the run's, or auto)", "--dtype"
        ),
    ] = None,
    quiet: options.Quiet = False,
    no_progress: options.NoProgress = False,
) -> None:
    """Check every token of a run, or of a text and the options that made it, in one pass over the text.

    Each token is drawn exactly, within rounding (a change of the logits no larger than rounding makes, which is
    measured, explains it) or a violation. Exit code 1 if there is a violation.
    """
    sampling = options.given(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, eta=eta, penalty=penalty, window=window
    )
    made = {**options.given(prompt=prompt, prefill=prefill, seed=seed), **sampling}
    if stop_at_eos:
        made["stop_at_eos"] = True
    _check_form(run, tokens, made)
    if json_out not in (None, "-") and (Path(json_out).is_dir() or not Path(json_out).parent.is_dir()):
        raise InputError(f"{json_out} cannot be written to", "--json")

    from tswift.jobs.recorded import read_run
    from tswift.jobs.verification import Text, report, subject_of_run, subject_of_text, write_report

    if run is not None:
        subject = subject_of_run(read_run(run), model, device, dtype)
    elif tokens is not None:
        text = Text(tokens, prompt, prefill, seed or 0, stop_at_eos, sampling)
        subject = subject_of_text(text, model, device, dtype)
    else:
        raise InputError("give the folder of a run, or --tokens and the options that made them")
    found = _audited(subject, not (quiet or no_progress))
    if json_out == "-":
        print(json.dumps(report(subject, found), indent=2))
        print_audit(found, Console(stderr=True, quiet=quiet))
    else:
        print_audit(found, Console())
        if json_out is not None:
            write_report(Path(json_out), subject, found)
    if not found.ok:
        raise typer.Exit(FAILED)


def verify_folder(model: LoadedModel, path: Path, quiet: bool, shown: bool) -> None:
    """Verify a run that this process has made, its model still there; ``verify.json`` goes to its folder.

    Raises:
        Exit: there is a violation.
    """
    from tswift.jobs.folder import AUDIT
    from tswift.jobs.recorded import read_run
    from tswift.jobs.verification import with_model, write_report

    subject = with_model(read_run(path), model)
    found = _audited(subject, shown and not quiet)
    write_report(path / AUDIT, subject, found)
    print_audit(found, Console(stderr=True, quiet=quiet))
    if not found.ok:
        raise typer.Exit(FAILED)


def _audited(subject: Subject, shown: bool) -> Audit:
    with progress(shown) as show:
        return subject.audit(show)


def _check_form(run: Path | None, tokens: Path | None, made: dict[str, Any]) -> None:
    if run is not None and tokens is not None:
        raise InputError("cannot be given together with a run", "--tokens")
    if run is not None and made:
        raise InputError("goes with --tokens; a run has its own", f"--{next(iter(made)).replace('_', '-')}")
