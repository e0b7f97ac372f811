"""A sampler's Triton kernels, where they draw what the rule draws."""

from __future__ import annotations

import torch

from tswift.sampling.rule import Sampler


def use_kernels(
    sampler: Sampler, dtype: torch.dtype, candidates: int = 0, interpreted: bool = False
) -> None:
    """Use Triton kernels on CUDA in :meth:`Sampler.draw_rows`, for logits of this dtype and the
    parameters as they are.

    They are used if they draw the same on this device, which is tried once, and waited for: not
    while a CUDA graph is captured. Otherwise the sampler's ``fault`` says why not.
    :meth:`Sampler.candidates` uses them, too, if it is asked for as many; ``interpreted`` ones run
    without CUDA, in Triton's interpreter.
    """
    device, vocab_size = sampler.newest.device, len(sampler.newest)
    if not (sampler.newest.is_cuda or interpreted):
        return
    try:
        from tswift.sampling.sampler_check import triton_sampler_fault
        from tswift.sampling.sampler_triton import TritonSampler
    except ImportError:
        sampler.fault = "triton is not installed"
        return
    sampler.fault = None
    for count in {0, min(candidates, vocab_size)}:
        read = dtype if count else sampler.lowered_dtype(dtype)
        fault = triton_sampler_fault(sampler.after_lowering, vocab_size, read, device, count)
        if fault is None and (read, count) not in sampler.kernels:
            # never replaced: what a captured graph reads has to stay where it is
            made = TritonSampler(sampler.after_lowering, sampler.seed, vocab_size, device)
            sampler.kernels[read, count] = made
        sampler.fault = sampler.fault or fault
