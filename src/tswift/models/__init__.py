"""Models: what the user named and cannot be used raises an ``InputError`` of one line,
in every function here.
"""
