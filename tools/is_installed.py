"""Exit with 0 if exactly this wheel is installed: `python tools/is_installed.py WHEEL`."""

import hashlib
import json
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

try:
    # pip notes here what it installed from, with the file's hash.
    origin = distribution("convt_reduce").read_text("direct_url.json")
except PackageNotFoundError:
    origin = None
installed = json.loads(origin or "{}").get("archive_info", {}).get("hashes", {}).get("sha256")
sys.exit(installed != hashlib.sha256(Path(sys.argv[1]).read_bytes()).hexdigest())
