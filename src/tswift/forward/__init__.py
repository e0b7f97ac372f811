"""A pass over a loaded model: from tokens and a KV cache to hidden states and logits.

Begin with ``target.Target``, whose ``forward`` every method calls, and ``eager.EagerRunner``, which
makes its passes by transformers' modeling code (``hf`` replaces its attention). A C program
(``cpu``) or kernels in CUDA graphs (``cuda``) stand in for that where they compute the same, which
``adapting`` tries at load; ``exact_passes`` says whether tokens have the same bits in all of them.
The few products of heads that only draft are here, too; what is drafted and drawn is decided
elsewhere.
"""
