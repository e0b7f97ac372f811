"""From a name to a model that decodes, in two halves: a plan, and what is loaded by it.

Begin with ``plan.plan_model``: a ``ModelPlan`` is made before anything is loaded, reads no weights,
refuses what cannot be had, and tells sizes and memory. ``model.load_model`` loads a ``LoadedModel``
by it; ``network`` chooses who reads the weights: transformers, or ``packing``. The engine,
jobs and commands import them.
"""
