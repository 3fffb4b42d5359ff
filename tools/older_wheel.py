"""An older version of a wheel, to install over: `python tools/older_wheel.py WHEEL FOLDER`.

Version 0.0.1 of the same content, with one module more that the newer version no longer has.
"""

from __future__ import annotations

import base64
import hashlib
import re
import sys
import zipfile
from pathlib import Path

OLD = "0.0.1"


def older(wheel: Path, folder: Path) -> Path:
    name, version, tags = wheel.stem.split("-", 2)
    files = {f"{name}/only_in_the_old_version.py": b""}
    with zipfile.ZipFile(wheel) as archive:
        for entry in archive.namelist():
            data = archive.read(entry)
            if entry.endswith((".dist-info/METADATA", "_build_info.json")):
                data = re.sub(
                    rb'(Version: |"version": ")[^"\n]+', rb"\g<1>" + OLD.encode(), data, count=1
                )
            files[entry.replace(f"{name}-{version}.dist-info", f"{name}-{OLD}.dist-info")] = data
    record = f"{name}-{OLD}.dist-info/RECORD"
    files[record] = (
        "".join(
            f"{entry},sha256={digest(data)},{len(data)}\n"
            for entry, data in files.items()
            if entry != record
        ).encode()
        + f"{record},,\n".encode()
    )
    result = folder / f"{name}-{OLD}-{tags}.whl"
    with zipfile.ZipFile(result, "w", zipfile.ZIP_DEFLATED) as archive:
        for entry, data in files.items():
            archive.writestr(entry, data)
    return result


def digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


if __name__ == "__main__":
    print(older(Path(sys.argv[1]), Path(sys.argv[2])))
