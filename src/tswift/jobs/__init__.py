"""A run that is kept: its folder, its text so far, and how to go on with it.

Begin with ``folder`` (what is written, and why it survives a crash) and ``job.Job``, which
decodes into a folder; ``config`` is what a run is asked for, ``batch`` many prompts,
``verification`` the audit of a folder. The command line, the server, benchmarks and training
import it.
"""
