"""The small programs that a release runs: version, changelog, package index, an older wheel.

And that a fact with one home has one: the version, the floor of torch, the actions' pins.
"""

import ast
import html.parser
import json
import re
import runpy
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import convt_reduce

ROOT = Path(__file__).resolve().parent.parent
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
sys.path.insert(0, str(ROOT / "tools"))

import older_wheel  # noqa: E402
import version  # noqa: E402
import wheel_index  # noqa: E402


def test_the_version_is_that_of_the_tree():
    installed = convt_reduce.__version__.partition("+")[0]
    assert installed == version.version()


def test_no_other_file_names_the_version():
    """A second place is forgotten at the next release. The changelog is history, not a place."""
    current = version.version()
    homes = {ROOT / "convt_reduce" / "_version.py", ROOT / "CHANGELOG.md"}
    # A file name, a requirement, an assignment; a measurement may name the version it is of.
    told = r"(convt[_-]reduce[-=~>]+|version[\W_]{1,8})"
    written = re.compile(rf"{told}{re.escape(current)}(?![\d.])", re.IGNORECASE)
    assert written.search(f'__version__ = "{current}"')
    assert written.search(f"convt_reduce-{current}-py3")
    for path in [*ROOT.glob("*"), *(path for name in WHERE for path in (ROOT / name).rglob("*"))]:
        if path.is_file() and path.suffix in TEXT and path not in homes:
            assert not written.search(path.read_text()), f"{path} names version {current}"


WHERE = ("convt_reduce", "csrc", "docs", "tools", "examples", "benchmarks", ".github", ".ci")
TEXT = {".md", ".py", ".toml", ".in", ".yml", ".sh", ".cpp", ".h", ".cu", ".cuh", ""}


def tree(folder, current="1.2.3", changelog="## 1.2.3 - 2026-01-31\n\n- A thing.\n"):
    (folder / "convt_reduce").mkdir()
    (folder / "convt_reduce" / "_version.py").write_text(f'__version__ = "{current}"\n')
    (folder / "CHANGELOG.md").write_text(
        f"# Changelog\n\n{changelog}\n## 1.2.2 - 2025-12-31\n\nOld.\n"
    )
    return folder


def test_a_tag_of_the_version_with_its_part_of_the_changelog(tmp_path):
    root = tree(tmp_path)
    assert version.tag_problem("v1.2.3", root) is None
    assert version.notes((root / "CHANGELOG.md").read_text(), "1.2.3") == "- A thing."


@pytest.mark.parametrize("tag", ["v1.2.4", "1.2.3", "v1.2.3rc1", "v1.2"])
def test_a_tag_of_another_version(tmp_path, tag):
    problem = version.tag_problem(tag, tree(tmp_path))
    assert problem == f"the tag must be v1.2.3, as convt_reduce/_version.py says, got {tag}."


@pytest.mark.parametrize(
    "changelog", ["", "## 1.2.3 - 2026-01-31\n", "## 1x2x3 - 2026-01-31\n\nA.\n"]
)
def test_a_release_without_its_part_of_the_changelog(tmp_path, changelog):
    assert "CHANGELOG.md must have a heading '## 1.2.3 -" in version.tag_problem(
        "v1.2.3", tree(tmp_path, changelog=changelog)
    )


def test_the_version_command_fails_on_another_tag():
    command = [sys.executable, str(ROOT / "tools" / "version.py")]
    run = subprocess.run([*command, "--tag", "v999.0"], capture_output=True, text=True)
    assert run.returncode == 1
    assert "the tag must be v" in run.stderr
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.stdout.strip() == version.version()


def asset(name, digest="sha256:" + "ab" * 32):
    address = f"https://example.org/releases/{name.replace('+', '%2B')}"
    return {"name": name, "browser_download_url": address, "digest": digest}


def release(*assets, draft=False):
    return {"draft": draft, "assets": list(assets)}


class Links(html.parser.HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.found, self.text = [], ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        if tag == "a":
            self.found.append(dict(attributes))


def test_the_index_has_a_page_for_each_cuda(tmp_path):
    new, old = "convt_reduce-1.1.0", "convt_reduce-1.0.0"
    tags = "py3-none-manylinux_2_28_x86_64.whl"
    pages = [
        [release(asset(f"{new}+cu13-{tags}"), asset(f"{new}+cu12-{tags}"), asset(f"{new}-{tags}"))],
        [
            release(asset(f"{old}+cu12-{tags}"), asset("SHA256SUMS"), asset(f"{old}.tar.gz")),
            release(asset(f"convt_reduce-2.0.0+cu12-{tags}"), draft=True),
        ],
    ]
    (tmp_path / "releases.json").write_text(json.dumps(pages))
    run = subprocess.run(
        [
            sys.executable,
            str(ROOT / "tools" / "wheel_index.py"),
            tmp_path / "releases.json",
            tmp_path,
        ],
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    cu12 = Links((tmp_path / "cu12" / "convt-reduce" / "index.html").read_text()).found
    assert [link["href"] for link in cu12] == [
        f"https://example.org/releases/{name}%2Bcu12-{tags}#sha256={'ab' * 32}"
        for name in (new, old)
    ]
    assert {link["data-requires-python"] for link in cu12} == {wheel_index.PYTHON}
    cu13 = Links((tmp_path / "cu13" / "convt-reduce" / "index.html").read_text()).found
    assert [link["href"].split("#")[0].split("/")[-1] for link in cu13] == [f"{new}%2Bcu13-{tags}"]
    assert Links((tmp_path / "cu13" / "index.html").read_text()).found == [
        {"href": "convt-reduce/"}
    ]


def test_the_index_of_one_page_of_releases_and_of_none(tmp_path):
    name = "convt_reduce-1.0.0+cu12-py3-none-manylinux_2_28_x86_64.whl"
    wheel_index.write([release(asset(name))], tmp_path / "one")
    assert name in (tmp_path / "one" / "cu12" / "convt-reduce" / "index.html").read_text()
    wheel_index.write([], tmp_path / "none")
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("digest", [None, "", "md5:00"])
def test_the_index_refuses_a_wheel_without_its_hash(tmp_path, digest):
    wheel = asset("convt_reduce-1.0.0+cu12-py3-none-any.whl", digest)
    with pytest.raises(ValueError, match="has no SHA-256, got"):
        wheel_index.write([release(wheel)], tmp_path)


def test_the_index_asks_for_the_same_python_as_the_package():
    asked = re.search(
        r'^requires-python = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE
    )
    assert asked[1] == wheel_index.PYTHON


def test_an_older_wheel_differs_in_version_and_one_module(tmp_path):
    name = "convt_reduce-5.6.7-py3-none-linux_x86_64.whl"
    with zipfile.ZipFile(tmp_path / name, "w") as archive:
        archive.writestr("convt_reduce/__init__.py", "x = 1\n")
        archive.writestr("convt_reduce/_build_info.json", '{"version": "5.6.7", "torch": "5.6.7"}')
        archive.writestr(
            "convt_reduce-5.6.7.dist-info/METADATA", "Name: convt_reduce\nVersion: 5.6.7\n"
        )
        archive.writestr("convt_reduce-5.6.7.dist-info/RECORD", "stale\n")
    (tmp_path / "old").mkdir()
    wheel = older_wheel.older(tmp_path / name, tmp_path / "old")
    assert wheel.name == "convt_reduce-0.0.1-py3-none-linux_x86_64.whl"
    with zipfile.ZipFile(wheel) as archive:
        content = {entry: archive.read(entry).decode() for entry in archive.namelist()}
    assert content["convt_reduce/_build_info.json"] == '{"version": "0.0.1", "torch": "5.6.7"}'
    assert "Version: 0.0.1\n" in content["convt_reduce-0.0.1.dist-info/METADATA"]
    assert "convt_reduce/only_in_the_old_version.py" in content
    record = content["convt_reduce-0.0.1.dist-info/RECORD"].splitlines()
    assert {line.split(",")[0] for line in record} == set(content)
    assert "stale" not in record


def test_the_oldest_torch_is_the_same_everywhere():
    """The ABI the libraries are built for, the loader's floor, the package's requirement."""
    from convt_reduce import _loader

    setup = ast.parse((ROOT / "setup.py").read_text())
    (target,) = (
        ast.literal_eval(node.value)
        for node in setup.body
        if isinstance(node, ast.Assign) and node.targets[0].id == "ABI_TARGET"
    )
    assert target == _loader.OLDEST_TORCH
    floor = f'torch>={".".join(map(str, target))}"'
    assert (ROOT / "pyproject.toml").read_text().count(floor) == 2
    assert convt_reduce.build_info()["abi_target"] == ".".join(map(str, target))


def test_the_architectures_of_a_release():
    release_architectures = runpy.run_path(str(ROOT / "tools" / "architectures.py"))[
        "release_architectures"
    ]
    for cuda in ((12, 6), (12, 9), (13, 0), (13, 5)):
        for machine in ("x86_64", "aarch64"):
            archs = release_architectures(cuda, machine)
            assert any(arch.startswith("9.0") for arch in archs)
            assert [arch for arch in archs if arch.endswith("+PTX")] == archs[-1:]
            assert ("7.0" in archs) == (cuda < (13, 0))
            assert ("11.0" in archs) == (cuda >= (13, 0) and machine == "aarch64")


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_pin_actions_limit_time_and_only_wire(workflow):
    text = workflow.read_text()
    for action in re.findall(r"uses: (.+)", text):
        assert re.fullmatch(r"\./\S+|[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", action), action
    assert "\npermissions: {}\n" in text
    assert "\nconcurrency:\n" in text
    jobs = len(re.findall(r"^    runs-on: ", text, re.MULTILINE))
    assert jobs == len(re.findall(r"^    timeout-minutes: ", text, re.MULTILINE))
    assert not re.search(r"run: [|>]", text), "a step of more than one line belongs in tools/ci"
    for script in re.findall(r"(tools/\S+\.(?:sh|py))", text):
        path = ROOT / script
        assert path.is_file(), script
        assert path.suffix == ".py" or path.stat().st_mode & 0o100, f"{script} is not executable"


def test_there_are_workflows():
    names = {path.stem for path in WORKFLOWS}
    assert names >= {"checks", "wheels", "sdist", "compat", "release", "gpu"}


def test_the_messages_that_the_documentation_explains_exist():
    """docs/install.md is looked up by message; a sentence that changed must change there too."""
    text = (ROOT / "docs" / "install.md").read_text()
    messages = re.findall(
        r"^\| `([^`]+)` \|", text.split("## When something goes wrong")[1], re.MULTILINE
    )
    assert len(messages) > 12
    sources = [
        ROOT / "setup.py",
        ROOT / "csrc" / "library.cpp",
        ROOT / "csrc" / "cuda" / "ops.cpp",
        ROOT / "convt_reduce" / "_loader.py",
    ]
    # Neighbouring string literals are one sentence.
    said = "".join(re.sub(r'"\s*f?"', "", path.read_text()) for path in sources)
    said = said.replace("{OLDEST_TORCH[0]}.{OLDEST_TORCH[1]}", "2.10")
    for message in messages:
        assert message in said, message
