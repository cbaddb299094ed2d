"""``python -m whywrong``."""

import sys

from whywrong.reporting.command import main

sys.exit(main())
