"""The door of `python tests/fuzz`."""

import sys
from pathlib import Path

# tests/ in place of this folder: for the oracles, and so that a current folder is never searched.
sys.path[0] = str(Path(__file__).resolve().parent.parent)

from fuzz.cli import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
