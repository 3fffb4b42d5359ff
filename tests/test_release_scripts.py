"""The shell scripts of tools/ci as far as they go without a network, a container or an hour.

`make release-check` runs them in earnest; here, that they refuse what they cannot do before they do
anything, and that what they share works.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CI = ROOT / "tools" / "ci"
SCRIPTS = sorted(CI.glob("*.sh"))


def bash(*command, **environment):
    return subprocess.run(
        ["bash", *command],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


def shared(script, **environment):
    """Runs a line of shell after what the scripts share, and returns its output."""
    source = f'set -euo pipefail; source "{CI}/env.sh"; {script}'
    run = bash("-c", source, **environment)
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_scripts_parse_say_what_they_do_and_stop_at_the_first_failure(script):
    run = bash("-n", script)
    assert run.returncode == 0, run.stderr
    lines = script.read_text().splitlines()
    if script.name == "env.sh":
        return
    assert lines[0] == "#!/usr/bin/env bash"
    assert lines[1].startswith("# ")
    assert "set -euo pipefail" in lines
    assert any(script.name in line for line in lines[1:10]), "the usage names the script"
    assert script.stat().st_mode & 0o111


@pytest.mark.parametrize(
    ("script", "arguments", "sentence"),
    [
        ("cuda_toolkit.sh", ["12.9", "x"], "must be major.minor from 13.0 on, got '12.9'"),
        ("cuda_toolkit.sh", ["13", "x"], "must be major.minor from 13.0 on, got '13'"),
        ("cuda_toolkit.sh", ["newest", "x"], "must be major.minor from 13.0 on, got 'newest'"),
        ("cuda_toolkit.sh", ["13.0"], "give the folder to make"),
        ("build_wheels.sh", ["11"], "the CUDA major must be 12 or 13, got 11"),
        ("before_build.sh", [], "CONVT_REDUCE_CUDA must be 12 or 13, got 11"),
        ("repair_wheel.sh", [], "give a wheel"),
        ("compat.sh", [], "give a wheel"),
        ("check_sdist.sh", [], "give the source archive"),
        ("check_install.sh", [], "give a wheel"),
        ("publish_assets.sh", ["v1.2.3"], "give the folder of files"),
    ],
)
def test_scripts_refuse_before_they_do_anything(tmp_path, monkeypatch, script, arguments, sentence):
    monkeypatch.chdir(tmp_path)
    run = bash(CI / script, *arguments, CONVT_REDUCE_CUDA="11")
    assert run.returncode != 0
    assert sentence in run.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_python_is_found_by_its_version_and_tried():
    version = "{}.{}".format(*sys.version_info)
    folder = Path(sys.executable).parent
    found = shared(f"find_python {version}", PATH=f"{folder}{os.pathsep}{os.environ['PATH']}")
    asked = subprocess.run(
        [found, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"],
        capture_output=True,
        text=True,
    )
    assert asked.stdout.strip() == version
    assert shared("find_python 3.1 || echo none") == "none"


def test_the_copied_tree_is_what_git_tracks_with_the_changes_made_to_it(tmp_path):
    source = tmp_path / "source"
    (source / "tools" / "ci").mkdir(parents=True)
    (source / "tools" / "ci" / "env.sh").write_text((CI / "env.sh").read_text())
    (source / "kept.txt").write_text("old")
    (source / "build").mkdir()
    (source / "build" / "left.o").write_text("")
    copy = f'source "{source}/tools/ci/env.sh"; copy_tree'
    without_git = bash("-euc", f'{copy} "{tmp_path}/plain"')
    assert without_git.returncode == 0, without_git.stderr
    subprocess.run(["git", "init", "--quiet", source], check=True)
    subprocess.run(["git", "-C", source, "add", "kept.txt", "tools"], check=True)
    (source / "kept.txt").write_text("new")
    (source / "not_added.txt").write_text("")
    with_git = bash("-euc", f'{copy} "{tmp_path}/tracked"')
    assert with_git.returncode == 0, with_git.stderr
    for name in ("plain", "tracked"):
        files = {str(path.relative_to(tmp_path / name)) for path in (tmp_path / name).rglob("*.*")}
        assert files == {"kept.txt", "tools/ci/env.sh"}
    assert (tmp_path / "tracked" / "kept.txt").read_text() == "new"


def test_a_quiet_command_is_heard_when_it_fails():
    assert shared("quietly echo unheard") == ""
    run = bash("-euc", f'source "{CI}/env.sh"; quietly bash -c "echo heard; exit 3"')
    assert run.returncode != 0
    assert "heard" in run.stderr
