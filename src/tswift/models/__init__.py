"""A model that is named: its files (safetensors, GGUF), configuration, tokenizer, device, dtype.

Begin with ``config.ModelConfig`` (what the user asks for) and ``checkpoint`` (where it lies).
What the user named and cannot be used raises an ``InputError`` of one line, in every function
here. Nothing here forwards a token.
"""
