"""`python -m naught` is the `naught` command."""

import sys

from naught.cli import main

sys.exit(main())
