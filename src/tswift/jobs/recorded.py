"""What a run left in its folder, read back: enough to draw its text again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tswift.decoding.sampling import SamplingParams
from tswift.errors import InputError
from tswift.jobs.folder import PROMPT, RECORD, SCHEMA, TOKENS
from tswift.jobs.prompt import fingerprint


@dataclass(frozen=True)
class Recorded:
    """A run as its folder tells it, finished or not.

    Attributes:
        path: the folder.
        state: ``running``, ``finished`` or ``interrupted``.
        params: the sampling parameters, banned end-of-text tokens included.
        seed: the seed.
        prompt: the prompt's token ids.
        tokens: the generated token ids, as far as the run got; at least one.
        model: name of the model, as :func:`tswift.load` takes it.
        device, dtype, attention: how it was loaded.
        heads: kind and number of the heads that drafted; None if the model had none.
    """

    path: Path
    state: str
    params: SamplingParams
    seed: int
    prompt: list[int]
    tokens: list[int]
    model: str
    device: str
    dtype: str
    attention: str
    heads: str | None


def read_run(path: Path) -> Recorded:
    """Read a run's folder.

    Raises:
        InputError: it is no such folder, or what it holds is broken or does not fit together.
    """
    if not path.is_dir():
        raise InputError(f"there is no folder {path}")
    try:
        record = json.loads((path / RECORD).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path} holds no run: there is no {RECORD} in it") from None
    except OSError as error:
        raise InputError(f"{path / RECORD} cannot be read ({error.strerror})") from None
    except ValueError:  # no JSON, or no UTF-8
        raise InputError(f"{path / RECORD} is broken: it is not JSON") from None
    if not isinstance(record, dict) or record.get("schema") != SCHEMA:
        raise InputError(f"{path / RECORD} is not of schema {SCHEMA}, which is all this version reads")
    prompt, tokens = read_tokens(path / PROMPT), read_tokens(path / TOKENS)
    try:
        run = Recorded(path, prompt=prompt, tokens=tokens, **_fields(record))
        known = record["prompt"]["sha256"]
    except (KeyError, TypeError, ValueError) as error:
        reason = f"there is no {error}" if isinstance(error, KeyError) else str(error)
        raise InputError(f"{path / RECORD} is broken: {reason}") from None
    if known != fingerprint(prompt):
        raise InputError(f"{path / PROMPT} is not the prompt of {RECORD}: their SHA-256 differ")
    return run


def read_tokens(path: Path, option: str | None = None) -> list[int]:
    """The token ids in a file of little-endian uint32, at least one.

    Args:
        path: the file.
        option: what the user gave it with, for the error.

    Raises:
        InputError: there is no such file, or it is none of token ids.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise InputError(f"there is no file {path}", option) from None
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror})", option) from None
    if len(data) % 4:
        raise InputError(f"{path} is not a file of uint32: it has {len(data):,} bytes", option)
    if not data:
        raise InputError(f"{path} holds no tokens", option)
    ids: list[int] = np.frombuffer(data, "<u4").tolist()
    return ids


def check_ids(ids: Sequence[int], vocab_size: int, name: str, option: str | None = None) -> None:
    """Refuse token ids that the model does not have.

    Raises:
        InputError: there is one; the first is named.
    """
    for place, token in enumerate(ids):
        if token >= vocab_size:
            message = f"{name} has token id {token:,} at {place:,}, outside the model's vocabulary of {vocab_size:,}"
            raise InputError(message, option)


def _fields(record: dict[str, Any]) -> dict[str, Any]:
    model, sampling = record["model"], dict(record["sampling"])
    params = SamplingParams(**{**sampling, "banned": tuple(sampling["banned"])})
    loaded = {name: model[name] for name in ("device", "dtype", "attention", "heads")}
    about = {"state": record["state"], "params": params, "seed": int(record["options"]["seed"])}
    return {**about, "model": model["name"], **loaded}
