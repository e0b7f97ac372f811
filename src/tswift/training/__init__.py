"""Training of heads and of small draft models, from a corpus to a file that decoding loads.

Begin with ``config`` and ``run``; ``tasks`` says what is trained, ``agreement`` how often a draft
model draws what its target draws, ``teacher`` what the model itself would write. Only the
command line and the recipes import it.
"""
