"""Are the labels right? The check of the second set, of this folder's programs."""

from __future__ import annotations

import runpy
from pathlib import Path

if __name__ == "__main__":  # this folder is the first place where programs.py is looked for
    runpy.run_path(str(Path(__file__).parents[1] / "second" / "check.py"), run_name="__main__")
