"""Long texts from language models, faster than plain decoding and token for token the same.

import tswift

model = tswift.load()
steps = tswift.generate(model, "The ship had lain three days becalmed,", 200, seed=1)
print("".join(step.text for step in steps))

The rooms, from the command line down; each imports those below it, and says in its ``__init__``
where to begin: ``cli``, ``serving``, ``training`` and ``benchmarking``; ``jobs`` (runs that are
kept) and ``custom_generate`` (tswift within transformers); ``engine`` (a request becomes a decode)
and ``memory`` (what it takes); ``drafting`` (methods, and what they propose); ``decoding`` (a step:
propose, forward, draw, walk, commit); ``loading`` (a name becomes a model that decodes);
``speculators`` (heads and published drafters); ``forward`` (a pass, with ``cpu`` and ``cuda``);
``sampling`` (which token is drawn) and ``models`` (files, configurations, codes); ``attention`` and
``caches``; and what knows no model: ``options``, ``tables``, ``native_build`` (C
programs), ``files``, ``machine``, ``remembered`` (checks), ``errors``, ``stages``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tswift.decoding.drafter import Step
    from tswift.drafting.options import DraftOptions
    from tswift.engine import generate
    from tswift.errors import DecodeError, InputError
    from tswift.loading.model import load
    from tswift.sampling.parameters import SamplingParams

__version__ = "0.1.0"
__all__ = [
    "DecodeError",
    "DraftOptions",
    "InputError",
    "SamplingParams",
    "Step",
    "__version__",
    "generate",
    "load",
]

_HOMES = {
    "load": "tswift.engine",
    "generate": "tswift.engine",
    "SamplingParams": "tswift.sampling.parameters",
    "DraftOptions": "tswift.drafting.options",
    "Step": "tswift.decoding.drafter",
    "InputError": "tswift.errors",
    "DecodeError": "tswift.errors",
}


def __getattr__(name: str) -> object:
    # torch takes seconds to import; `import tswift` and `tswift --help` must not wait for it
    if name not in _HOMES:
        raise AttributeError(f"module 'tswift' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
