"""``tswift serve``: what is checked before a model is loaded, and what is told of the server."""

from __future__ import annotations

import os
from functools import partial
from importlib.util import find_spec
from typing import Annotated

import typer

from tswift.cli import options
from tswift.cli.output import loading_notice, tell
from tswift.drafting.options import DraftOptions
from tswift.errors import InputError
from tswift.files import lock_folder
from tswift.jobs.config import OF_A_TEXT, RunConfig, TextConfig
from tswift.models.config import ModelConfig
from tswift.sampling.parameters import SamplingParams
from tswift.serving.config import ServeConfig, job

_KEY = "TSWIFT_API_KEY"
_OF_A_REQUEST = (
    "prompt",
    "prompt_text",
    "prefill",
    *OF_A_TEXT,
    "logprobs",
    "chat",
    "system",
    "out",
)


@options.takes(
    ServeConfig,
    ModelConfig,
    TextConfig,
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
        bool,
        typer.Option(
            "--demo-page", help="Show a text being written, at /.", rich_help_panel="Server"
        ),
    ] = False,
    quiet: options.Quiet = False,
) -> None:
    """Serve a model over HTTP, as OpenAI's interface does.

    Every request is a run that can be resumed.

    Sampling, drafting, --method and --len are what a request gets that does not say otherwise.
    """
    own = typed.of(ServeConfig)
    if "api_key" not in own and os.environ.get(_KEY):
        own["api_key"] = os.environ[_KEY]
    config = ServeConfig(**own)
    defaults = {name: value for name, value in typed.values.items() if name not in own}
    base = job(defaults, {}, "-", chat=False)
    missing = [name for name in ("starlette", "uvicorn", "pydantic") if find_spec(name) is None]
    if missing:
        raise InputError(f"tswift serve needs {', '.join(missing)}: pip install 'tswift[serve]'")
    busy = f"another tswift serve writes to {config.runs}"
    from tswift.serving.routes import listen
    from tswift.serving.routes import serve as answer

    with listen(config) as sock, lock_folder(config.runs, "runs", busy):
        from tswift.jobs.job import Signals

        say = partial(tell, quiet=quiet)
        with Signals():
            with loading_notice(base.model.model, quiet, logged=True):
                from tswift.loading.model import load_model
                from tswift.serving.service import Service

                model = load_model(base.to_load())
            service = Service(model, config, defaults, say)
            try:
                host, port = sock.getsockname()[:2]
                say(
                    f"{service.model_id} is served on "
                    f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"
                )
                usual = f"drawn at {service.sampling}, and end at {model.ends}"
                say(f"requests that say nothing else are {usual}")
                answer(service, config, sock, demo_page)
            except KeyboardInterrupt as stop:
                say(
                    f"{str(stop) or 'interrupted'}; what is unfinished goes on when tswift serve "
                    "starts again"
                )
                raise
            finally:
                service.close()
                service.thread.join()
