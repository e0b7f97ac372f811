"""``python -m tswift``, which is also what torchrun starts:
``torchrun --nproc-per-node 4 -m tswift train``.
"""

import sys

from tswift.cli import main

sys.exit(main())
