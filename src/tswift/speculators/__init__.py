"""Networks that were trained to draft for a model, and their files.

Begin with ``heads`` (on the model's last hidden state) and ``networks`` (published drafters:
EAGLE-3, DSpark, DFlash, MTP layers, assistants). ``heads_files``, ``drafter_files`` and
``mtp_files`` read what others publish, drafters by one of ``layouts``. How a draft tree is
made of them is drafting's.
"""
