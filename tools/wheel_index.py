"""A static package index (PEP 503) of the wheels attached to releases:
`python tools/wheel_index.py RELEASES.json FOLDER`.

RELEASES.json is what GitHub's API gives for a repository's releases, one page or a list of pages.
Drafts are left out. FOLDER gets a page for each CUDA, FOLDER/cu12/convt-reduce/index.html and the
like, so that `pip install convt_reduce --index-url .../cu12` needs no choice between suffixes.
"""

from __future__ import annotations

import html
import json
import re
import sys
from pathlib import Path

PROJECT = "convt-reduce"
# What an installer must know before it downloads; pyproject.toml's requires-python.
PYTHON = ">=3.10"


def wheels(releases: list[dict]) -> dict[str, list[tuple[str, str, str]]]:
    """For each suffix like cu12 the wheels' (file name, address, SHA-256), newest release first."""
    found: dict[str, list[tuple[str, str, str]]] = {}
    for release in releases:
        if release["draft"]:
            continue
        for asset in sorted(release["assets"], key=lambda asset: asset["name"]):
            suffix = re.fullmatch(r"convt_reduce-[^-]+\+(cu\d+)-.+\.whl", asset["name"])
            if suffix is None:
                continue
            algorithm, _, digest = (asset.get("digest") or "").partition(":")
            if algorithm != "sha256":
                raise ValueError(f"{asset['name']} has no SHA-256, got {asset.get('digest')}")
            entry = (asset["name"], asset["browser_download_url"], digest)
            found.setdefault(suffix[1], []).append(entry)
    return found


def project_page(entries: list[tuple[str, str, str]]) -> str:
    links = [
        f'<a href="{html.escape(address)}#sha256={digest}" '
        f'data-requires-python="{html.escape(PYTHON)}">{html.escape(name)}</a><br>'
        for name, address, digest in entries
    ]
    return page(PROJECT, links)


def page(title: str, links: list[str]) -> str:
    head = '<!DOCTYPE html>\n<html><head><meta name="pypi:repository-version" content="1.0">'
    return "\n".join([f"{head}<title>{title}</title></head><body>", *links, "</body></html>", ""])


def write(releases: list[dict], folder: Path) -> None:
    for suffix, entries in wheels(releases).items():
        project = folder / suffix / PROJECT
        project.mkdir(parents=True)
        (project / "index.html").write_text(project_page(entries))
        link = f'<a href="{PROJECT}/">{PROJECT}</a>'
        (folder / suffix / "index.html").write_text(page(suffix, [link]))


def main() -> int:
    content = json.loads(Path(sys.argv[1]).read_text())
    pages = content if content and isinstance(content[0], list) else [content]
    write([release for releases in pages for release in releases], Path(sys.argv[2]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
