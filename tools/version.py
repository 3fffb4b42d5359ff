"""The version of this tree, which has one home: `python tools/version.py [--tag v1.2.3 [--notes]]`.

With a tag it fails unless the tag, the version and CHANGELOG.md agree; `--notes` prints what
CHANGELOG.md says of that version.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def version(root: Path = ROOT) -> str:
    text = (root / "convt_reduce" / "_version.py").read_text()
    return re.search(r'^__version__ = "(.+)"$', text, re.MULTILINE)[1]


def notes(changelog: str, of: str) -> str | None:
    """The part of the changelog under the heading of one version, or None without one."""
    part = re.search(
        rf"^## \[?{re.escape(of)}\]?( - \d{{4}}-\d\d-\d\d)\n(.*?)(?=^## |\Z)",
        changelog,
        re.MULTILINE | re.DOTALL,
    )
    return part[2].strip() if part else None


def tag_problem(tag: str, root: Path = ROOT) -> str | None:
    """Why ``tag`` cannot become a release of the tree at ``root``, or None."""
    current = version(root)
    if tag != f"v{current}":
        return f"the tag must be v{current}, as convt_reduce/_version.py says, got {tag}."
    if not notes((root / "CHANGELOG.md").read_text(), current):
        return f"CHANGELOG.md must have a heading '## {current} - YYYY-MM-DD' with text under it."
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tag", help="check that this tag is of the tree's version")
    parser.add_argument("--notes", action="store_true", help="print the changelog's part")
    options = parser.parse_args()
    if options.tag is None:
        print(version())
        return 0
    problem = tag_problem(options.tag)
    if problem:
        print(f"version.py: {problem}", file=sys.stderr)
        return 1
    print(notes((ROOT / "CHANGELOG.md").read_text(), version()) if options.notes else version())
    return 0


if __name__ == "__main__":
    sys.exit(main())
