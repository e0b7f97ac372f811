"""Where a model is computed, and in which dtype."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tswift.errors import InputError
from tswift.models.config import KV_DTYPES, parse_dtype_name

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def find_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """The dtype of a name: ``bfloat16``, ``bf16``, ``torch.bfloat16`` and so on;
    not of ``auto``.
    """
    named: torch.dtype = getattr(torch, parse_dtype_name(str(dtype)))
    return named


def own_dtype(config: PreTrainedConfig) -> torch.dtype:
    """The dtype that a model was published in; float32 where its configuration does not say."""
    return find_dtype(_stated_dtype(config) or torch.float32)


def _stated_dtype(config: PreTrainedConfig) -> str | torch.dtype | None:
    return getattr(config.get_text_config(), "dtype", None) or getattr(config, "dtype", None)


def dtype_note(config: PreTrainedConfig, dtype: torch.dtype) -> str:
    """That a model is loaded in another dtype than its checkpoint states; empty if it is not."""
    stated = str(_stated_dtype(config) or dtype).removeprefix("torch.")
    return "" if stated == dtype_name(dtype) else f"checkpoint in {stated}"


def dtype_for(
    dtype: str | torch.dtype, device: torch.device, config: PreTrainedConfig, simulated: bool
) -> torch.dtype:
    """The dtype to load a model in: ``auto`` is float32 on the CPU,
    its own on CUDA and for random weights.
    """
    if dtype != "auto":
        return find_dtype(dtype)
    return own_dtype(config) if device.type == "cuda" or simulated else torch.float32


def keep_precision(device: torch.device) -> None:
    """On CUDA, have no product compute with fewer digits than its numbers have,
    whatever the environment says.

    In TF32, which images for GPUs switch on, positions beyond 2,048 would be rounded; sums that are
    split would be added in bfloat16.
    """
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


def kv_dtype_for(
    kv_dtype: str | torch.dtype, dtype: torch.dtype, device: torch.device, program: bool
) -> torch.dtype:
    """The dtype of a KV cache: ``auto`` is the model's own,
    and int16 where a C program may serve it in float32.

    Texts are as likely as with float32 to five digits (docs/cpu.md). ``program`` says whether a
    model's configuration is one that the program takes.

    Raises:
        InputError: the cache cannot be in this dtype.
    """
    if kv_dtype == "auto":
        return torch.int16 if program and (device.type, dtype) == ("cpu", torch.float32) else dtype
    kind: torch.dtype = getattr(torch, parse_dtype_name(str(kv_dtype), KV_DTYPES, "kv_dtype"))
    if kind not in (dtype, torch.int8) and device.type != "cpu":
        raise InputError(
            f"is the model's own on {device.type}, {dtype_name(dtype)}, or int8; got "
            f"{dtype_name(kind)}",
            "kv_dtype",
        )
    if kind != dtype and kind.itemsize >= dtype.itemsize:
        raise InputError(
            f"is no narrower than the model's own, {dtype_name(dtype)}; got {dtype_name(kind)}",
            "kv_dtype",
        )
    return kind


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype, without ``torch.``."""
    return str(dtype).removeprefix("torch.")


def find_device(device: str) -> torch.device:
    """The device of a name; ``auto`` is CUDA where there is one."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        parsed = torch.device(device)
    except (RuntimeError, ValueError):
        parsed = None
    if (
        parsed is None
        or parsed.type not in ("cpu", "cuda")
        or (parsed.type == "cpu" and parsed.index)
    ):
        raise InputError(f"no device {device!r}; there are auto, cpu, cuda, cuda:0, ...", "device")
    if parsed.type == "cuda" and (parsed.index or 0) >= torch.cuda.device_count():
        raise InputError(
            f"PyTorch finds {torch.cuda.device_count()} CUDA devices here, wanted {device}",
            "device",
        )
    return parsed
