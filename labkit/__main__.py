"""`python -m labkit` is the command `labkit`."""

import sys

from labkit.cli import main

sys.exit(main())
