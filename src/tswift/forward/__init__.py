"""A pass over a loaded model: from tokens and a KV cache to hidden states and logits.

Begin with ``target.Target``, whose ``forward`` every method calls. Modeling code stays in
transformers (``hf`` replaces its attention); a C program (``program``) or kernels in CUDA graphs
(``fused_layers``, ``passes``) stand in for it where they compute the same, which ``adapting``
tries at load. Sampling and drafting are unknown here.
"""
