"""A server with OpenAI's interface over one loaded model.

Begin with ``runs``: one thread decodes requests one after the other, each into a folder like that
of ``tswift generate``, and readers look there; ``routes`` speaks HTTP, ``requests`` reads bodies.
Only the command line imports it.
"""
