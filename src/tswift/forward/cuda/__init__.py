"""Passes on a CUDA device: Triton kernels in the place of layers, replayed as CUDA graphs.

Begin with ``graphs.StaticPass``, a pass over one cache that is captured once; ``fused_layers`` puts
the kernels of ``layer_kernels`` in the place of a network's layers. ``*_check`` compares kernels
with plain PyTorch on the device itself before they are used.
"""
