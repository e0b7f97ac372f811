"""The decode loop: a step drafts, forwards a tree, draws at its nodes, walks and commits.

Begin with ``step.Stepper.step``, which serves every method, plain decoding too; ``drafter`` has the
tree and what a method has to offer. ``loop`` takes its steps on the host, or as ``device_step``
does, by programs on a CUDA device. ``audit`` checks a finished text token by token. No drafter is
known by name here.
"""
