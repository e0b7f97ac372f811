"""Attention of the nodes of a draft tree over a KV cache, by several backends with one contract.

Begin with ``sdpa``: ``Attention`` is the contract, and what PyTorch's operators compute is what
the others are compared with. ``backends`` names them (``native`` in C, ``triton``, flash-attn),
says which can serve, and tries them on random rows. It knows caches' layouts and no model.
"""
