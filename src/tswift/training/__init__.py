"""Training of heads, from a corpus to a file that decoding loads.

Begin with ``config`` and ``run``; ``tasks`` has the heads that learn, ``teacher`` what the model
itself would write, ``ranks`` the processes that torchrun starts. Only the command line and the
recipes import it.
"""
