"""The sampling rule: which token is drawn from logits, a pure function of seed and position.

Begin with ``parameters.SamplingParams`` (the filters, and their order) and ``rule.Sampler``, the
rule in PyTorch; ``sampler_c`` and ``sampler_triton`` compute the same in C and on a GPU.
"""
