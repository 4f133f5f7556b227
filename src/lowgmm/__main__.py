"""``python -m lowgmm``."""

import sys

from lowgmm.cli import main

sys.exit(main())
