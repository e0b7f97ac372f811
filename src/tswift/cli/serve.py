"""``tswift serve``: an OpenAI-compatible server whose requests are runs."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from importlib.util import find_spec
from typing import Annotated

import typer

from tswift.cli import options
from tswift.cli.streams import INTERRUPTED, loading, one_line
from tswift.decoding.params import SamplingParams
from tswift.drafting.options import DraftOptions
from tswift.errors import InputError
from tswift.jobs.config import RunConfig
from tswift.jobs.folder import lock_folder
from tswift.serving.requests import ServeConfig, job, listen

_KEY = "TSWIFT_API_KEY"
_OF_A_REQUEST = ("prompt", "prompt_text", "prefill", "stop_at_eos", "stop", "logprobs", "chat", "system", "out")


@options.takes(
    ServeConfig,
    RunConfig,
    SamplingParams,
    DraftOptions,
    without=_OF_A_REQUEST,
    shown={"seed": "drawn for each request"},
    texts={"length": "Most tokens of a request that does not say max_tokens. (default: 100,000)"},
)
def serve(
    typed: options.Typed,
    demo_page: Annotated[
        bool, typer.Option("--demo-page", help="Show a text being written, at /.", rich_help_panel="Server")
    ] = False,
    quiet: options.Quiet = False,
) -> None:
    """Serve a model over HTTP, as OpenAI's interface does. Every request is a run that can be resumed.

    Sampling, drafting, --method and --len are what a request gets that does not say otherwise.
    """
    own = {**typed.of(ServeConfig)}
    if "api_key" not in own and os.environ.get(_KEY):
        own["api_key"] = os.environ[_KEY]
    config = ServeConfig(**own)
    defaults = {name: value for name, value in typed.values.items() if name not in typed.of(ServeConfig)}
    base = job(defaults, {}, "-", chat=False)
    missing = [name for name in ("starlette", "uvicorn") if find_spec(name) is None]
    if missing:
        raise InputError(f"tswift serve needs {' and '.join(missing)}: pip install 'tswift[serve]'")
    busy = f"another tswift serve writes to {config.runs}"
    with listen(config) as sock, lock_folder(config.runs, "runs", busy):
        from tswift.jobs.job import Signals

        def say(line: str) -> None:
            if not quiet:
                with suppress(OSError):  # a pipe that nobody reads any more; serving goes on
                    print(f"tswift: {one_line(line)}", file=sys.stderr, flush=True)

        with Signals():
            with loading(base.model, quiet):
                from tswift.models.load import load
                from tswift.serving.routes import serve as answer
                from tswift.serving.runs import Service

                model = load(base.model, quantize=base.quantize, exact=base.exact, **base.loading())
            service = Service(model, config, defaults, say)
            try:
                host, port = sock.getsockname()[:2]
                say(f"{model.name} is served on http://{f'[{host}]' if ':' in host else host}:{port}/v1")
                answer(service, config, sock, demo_page)
            except KeyboardInterrupt as stop:
                say(f"{stop or 'interrupted'}; what is unfinished goes on when tswift serve starts again")
                raise typer.Exit(getattr(stop, "code", INTERRUPTED)) from None
            finally:
                service.close()
                service.join()
