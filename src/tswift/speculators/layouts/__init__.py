"""Layouts that drafters are published in, a module each: which configurations are of it
(``matches``), the drafter's sizes by them (``spec``), its tensors' ``names``.
``drafter_files.LAYOUTS`` is the table of them.
"""
