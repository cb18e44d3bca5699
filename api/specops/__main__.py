"""`python -m specops` is the `specops` command."""

import sys

from specops.cli import main

sys.exit(main())
