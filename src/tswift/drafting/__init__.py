"""What the methods draft from: heads, n-grams, logits of the text so far, chains, published
drafters.

Begin with ``options.METHODS``, the table of methods, and ``methods``, which builds each one's
drafter. A family of sources is a module; ``adaptive`` is ``auto``, which chooses among them in
every step. Whatever is drafted, the text stays the same: decoding sees to that.
"""
