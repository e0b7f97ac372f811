"""The decode loop: a step drafts, forwards a tree, draws at its nodes, walks and commits.

Begin with ``step.Stepper.stepping``, which serves every method, plain decoding too; ``drafter`` has
the tree and what a method has to offer. ``loop`` takes its steps on the host, or as ``device_step``
does, by programs on a CUDA device; ``work`` takes those of several texts, in passes that they
share. ``kept`` has caches of earlier texts; ``audit`` checks a finished text token by token. No
drafter is known by name here.
"""
