"""A server with OpenAI's interface over one loaded model.

Begin with ``service``: one thread decodes requests side by side, each into a folder like
that of ``tswift generate``; readers look into a ``run``; ``routes`` speaks HTTP,
``requests`` reads bodies. Only the command line imports it.
"""
