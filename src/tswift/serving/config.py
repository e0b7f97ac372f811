"""Where ``tswift serve`` listens and what it keeps, and the job that is made of options.

Nothing here imports torch.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from tswift.drafting.options import LOADED, DraftOptions, find_method
from tswift.errors import InputError
from tswift.jobs.batch import MOST_TEXTS
from tswift.jobs.config import RunConfig
from tswift.options import Values, check_options, option

_PANEL = "Server"


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """Where ``tswift serve`` listens, and what it keeps."""

    host: str = option(
        "127.0.0.1",
        "Address to listen on; one that other machines can reach wants --api-key.",
        panel=_PANEL,
    )
    port: int = option(
        8000, "Port to listen on; 0 takes any that is free.", panel=_PANEL, least=0, most=65_535
    )
    api_key: str | None = option(
        None,
        "What clients have to send as Authorization: Bearer KEY.",
        panel=_PANEL,
        shown="TSWIFT_API_KEY, or none",
    )
    parallel: int | None = option(
        None,
        "Requests decoded at once, in passes that they share; each text is the same as alone.",
        panel=_PANEL,
        shown="8, where passes can be shared",
        least=1,
        most=MOST_TEXTS,
    )
    queue: int = option(
        8,
        "Requests that may wait; beyond it the answer is 429.",
        panel=_PANEL,
        least=0,
        most=10_000,
    )
    runs: Path = option(
        Path("runs"), "Folder in which every request has a run's folder.", panel=_PANEL
    )
    keep_caches: float | None = option(
        None,
        "GB for caches of earlier texts, whose beginnings new prompts need not forward; 0 for "
        "none.",
        panel=_PANEL,
        shown="a quarter of what is free",
        least=0,
        most=1e6,
        metavar="GB",
    )
    served_model_name: str | None = option(
        None,
        "The model's id, as clients know it.",
        panel=_PANEL,
        shown="its hub id, or the last name of its folder",
        metavar="NAME",
    )

    def __post_init__(self) -> None:
        check_options(self)
        if self.api_key is not None and not (
            self.api_key.isascii() and self.api_key.isprintable() and self.api_key
        ):
            raise InputError("must be printable ASCII, at least one character", "api_key")
        name = self.served_model_name
        if name is not None and not (name and name.isprintable()):
            raise InputError("must be printable text, at least one character", "served_model_name")

    def model_id(self, model: str) -> str:
        """The id under which clients know a model;
        where it lies on this machine's disk is not theirs to know.
        """
        path = Path(model)
        return self.served_model_name or (path.resolve().name if path.exists() else model)


def job(typed: Values, asked: Values, prompt: object, chat: bool) -> RunConfig:
    """The job's configuration: what is asked for, then what was typed,
    then the defaults of ``tswift generate``.

    Where a request asks for another method than the server's own, drafting options that were typed
    for that one are left out, and so is what the model was loaded with that the other method does
    not use.
    """
    values = {**typed, **asked}
    own = typed.get("method", "tokenswift" if typed.get("preset") is not None else RunConfig.method)
    method = values.get("method", own)
    if not isinstance(method, str) or find_method(method).reference:
        raise InputError(
            "must be a method that is served; ar-reference is for measurements", "method"
        )
    if method != own:
        others = {*DraftOptions.__dataclass_fields__, *LOADED} - find_method(method).loads
        values = {name: value for name, value in values.items() if name not in others}
    text = prompt if isinstance(prompt, str) else json.dumps(prompt, ensure_ascii=False)
    return RunConfig.of(**values, prompt_text=text, chat=chat)
