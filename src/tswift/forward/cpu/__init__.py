"""Passes by C programs on a CPU: one call for all layers, weights packed as codes or as floats.

Begin with ``program.PassProgram`` and the opening comment of ``program.c``. ``parts`` says what of
a transformers model the program computes, and refuses what it does not; ``products`` packs weights
and multiplies by them; ``recurrence`` steps the states of recurrent layers; ``kv_bounds``
says in which steps 16 bits hold keys and values. Loading asks what the program would serve, and
heads that draft are multiplied by it.
"""
