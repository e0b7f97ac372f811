"""Long texts from language models, faster than plain decoding and token for token the same.

import tswift

model = tswift.load()
steps = tswift.generate(model, "The ship had lain three days becalmed,", 200, seed=1)
print(model.tokenizer.decode([token for step in steps for token in step.tokens]))
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tswift.decoding.drafter import Step
    from tswift.decoding.params import SamplingParams
    from tswift.drafting.options import DraftOptions
    from tswift.engine import generate
    from tswift.errors import Fault, InputError
    from tswift.models.load import load

__version__ = "0.1.0"
__all__ = ["DraftOptions", "Fault", "InputError", "SamplingParams", "Step", "__version__", "generate", "load"]

_HOMES = {
    "load": "tswift.models.load",
    "generate": "tswift.engine",
    "SamplingParams": "tswift.decoding.params",
    "DraftOptions": "tswift.drafting.options",
    "Step": "tswift.decoding.drafter",
    "InputError": "tswift.errors",
    "Fault": "tswift.errors",
}


def __getattr__(name: str) -> object:
    # torch takes seconds to import; `import tswift` and `tswift --help` must not wait for it
    if name not in _HOMES:
        raise AttributeError(f"module 'tswift' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
