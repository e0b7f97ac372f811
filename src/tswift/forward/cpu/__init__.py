"""Passes by C programs on a CPU: one call for all layers, weights packed as codes or as floats.

Begin with ``program.PassProgram`` and the opening comment of ``program.c``. ``parts`` says what of
a transformers model the program computes, and refuses what it does not; ``products`` packs weights
and multiplies by them; ``recurrence`` steps the states of recurrent layers. Only forward imports
it, and what packs or reads codes.
"""
