"""Layouts that drafters are published in, a module each.

Each says which configurations are of it (``matches``), the drafter's sizes by them (``spec``) and
its tensors' ``names``. Begin with ``layout``, which all of them are made of;
``drafter_files.LAYOUTS`` is the table of them.
"""
