"""From a name to a model that decodes, in two halves: a plan, and what is loaded by it.

Begin with ``plan.plan_model``: a ``ModelPlan`` is made once a command, reads no weights, refuses
what cannot be had, and tells sizes and memory beforehand. ``model.load_model`` loads a
``LoadedModel`` by it, ``network`` reads the weights. The engine, jobs and commands import them.
"""
