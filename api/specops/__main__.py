"""`python -m specops` is the `specops` command."""

import sys

from specops.cli.main import main

sys.exit(main())
