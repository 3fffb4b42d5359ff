"""tools/check_wheel.py, fed with wheels that are wrong in one way each.

The good wheel is the installed package, packed again; a bad one differs from it in a file name, a
line of metadata or a few bytes of a library. Each fault must be found and named, and nothing else
may be: a check that always complains would pass a test that only looks for its own sentence.
"""

import dataclasses
import importlib.metadata
import io
import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

# The tool's own need. A GPU machine that has pytest and the wheel runs the rest of the suite.
ELFFile = pytest.importorskip("elftools.elf.elffile").ELFFile

TOOLS = Path(__file__).resolve().parent.parent / "tools"
sys.path.insert(0, str(TOOLS))

import check_wheel  # noqa: E402
import wheel_libraries  # noqa: E402

CPU, CUDA, INFO = check_wheel.CPU_LIBRARY, check_wheel.CUDA_LIBRARY, check_wheel.BUILD_INFO
LEFT_BY_PIP = ("INSTALLER", "REQUESTED", "direct_url.json")


class Draft:
    """A wheel in memory: change it, then write() it."""

    def __init__(self):
        installed = importlib.metadata.distribution("convt_reduce")
        self.files = {
            str(entry): Path(installed.locate_file(entry)).read_bytes()
            for entry in installed.files
            if not str(entry).startswith("..")
            and entry.suffix != ".pyc"
            and entry.name not in LEFT_BY_PIP
        }
        self.version = installed.version
        (self.metadata,) = (name for name in self.files if name.endswith("/METADATA"))
        self.tags = re.findall(r"^Tag: (.+)$", self.files[self.wheel_file].decode(), re.MULTILINE)
        platforms = [tag.removeprefix("py3-none-") for tag in self.tags]
        self.tag = "py3-none-" + ".".join(platforms)

    @property
    def wheel_file(self):
        return self.metadata.replace("METADATA", "WHEEL")

    @property
    def machine(self):
        return re.search("(x86_64|aarch64)$", self.tag)[1]

    @property
    def info(self):
        return json.loads(self.files[INFO])

    def change_info(self, **facts):
        self.files[INFO] = json.dumps({**self.info, **facts}).encode()

    def replace(self, name, old, new):
        assert old in self.files[name], f"{name} does not hold {old!r}"
        self.files[name] = self.files[name].replace(old, new)

    def retag(self, tag):
        """The file name and the WHEEL file alike."""
        self.tag = tag
        text = re.sub(rb"^Tag: .+\n", b"", self.files[self.wheel_file], flags=re.MULTILINE)
        python, abi, platforms = tag.split("-")
        lines = [f"Tag: {python}-{abi}-{platform}" for platform in platforms.split(".")]
        self.files[self.wheel_file] = text.rstrip() + ("\n" + "\n".join(lines) + "\n").encode()

    def reversion(self, version):
        self.replace(self.metadata, f"\nVersion: {self.version}".encode(), b"\nVersion: x")
        self.replace(self.metadata, b"\nVersion: x", f"\nVersion: {version}".encode())
        self.version = version

    def rename_symbol(self, name, old, new):
        """Another name of the same length, so that nothing moves in the file."""
        assert len(new) <= len(old)
        new = new.ljust(len(old), b"x")
        self.replace(name, b"\0" + old + b"\0", b"\0" + new + b"\0")

    def write(self, folder):
        wheel = folder / f"convt_reduce-{self.version}-{self.tag}.whl"
        with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED, compresslevel=5) as archive:
            for name, data in self.files.items():
                archive.writestr(name, data)
        return wheel


@pytest.fixture
def draft():
    return Draft()


@pytest.fixture
def cuda_draft(draft):
    if not draft.info["cuda_half"]:
        pytest.skip("the installed package has no CUDA half")
    return draft


def problems(wheel, **settings):
    found = check_wheel.wheel_problems(wheel, **settings)
    if sys.version_info < (3, 11):  # torch-abi-audit has no release for it
        found = [problem for problem in found if "for want of torch-abi-audit" not in problem]
    return found


def only_problem(draft, folder, **settings):
    found = problems(draft.write(folder), **settings)
    assert len(found) == 1, found
    return found[0]


def test_the_installed_package_is_in_order(draft, tmp_path):
    assert problems(draft.write(tmp_path)) == []


def test_a_python_of_its_own(draft, tmp_path):
    draft.retag(draft.tag.replace("py3-none", "cp311-cp311"))
    assert "the tag must be py3-none-<platform>, got cp311-cp311-" in only_problem(draft, tmp_path)


def test_a_tag_for_any_platform(draft, tmp_path):
    draft.retag("py3-none-any")
    found = problems(draft.write(tmp_path))
    assert any("the tag says any platform, yet the wheel holds native code" in p for p in found)


def test_a_tag_changed_by_renaming(draft, tmp_path):
    draft.tag = re.sub("none-[a-z]+", "none-other", draft.tag)
    assert "the file name says py3-none-other" in only_problem(draft, tmp_path)


def test_a_platform_of_another_machine(draft, tmp_path):
    draft.retag(draft.tag.replace(draft.machine, "riscv64"))
    found = problems(draft.write(tmp_path))
    assert found
    assert all(re.search("it is for (x86_64|aarch64), while the tag says", p) for p in found)


def test_a_platform_older_than_what_it_needs(draft, tmp_path):
    draft.retag(f"py3-none-manylinux_2_5_{draft.machine}")
    found = problems(draft.write(tmp_path))
    assert found
    assert all("newer than the GLIBC_2.5 that manylinux_2_5_" in problem for problem in found)


def test_symbols_newer_than_libstdcxx_of_the_platform(draft):
    library = wheel_libraries.read_library(draft.files[CPU])
    newer = wheel_libraries.Symbol("_ZSt9new_thing", "GLIBCXX_3.4.99", defined=False)
    changed = dataclasses.replace(library, symbols=[newer])
    (problem,) = wheel_libraries.age_problems(changed, "manylinux_2_28_x86_64")
    assert problem.startswith("it wants GLIBCXX_3.4.99, newer than the GLIBCXX_3.4.24 that")


def test_a_name_that_is_no_wheels(draft, tmp_path):
    wheel = draft.write(tmp_path)
    renamed = wheel.rename(wheel.with_name("convt_reduce-1-py3.whl"))
    assert any("is not that of a wheel" in problem for problem in problems(renamed))


def test_another_version_in_the_build_info(draft, tmp_path):
    draft.change_info(version="9.9.9")
    assert f"says version {draft.version}, the build info 9.9.9" in only_problem(draft, tmp_path)


def test_another_version_in_the_metadata(draft, tmp_path):
    told = draft.version
    draft.reversion("9.9.9")
    draft.version = told
    assert f"the file name says version {told}, METADATA 9.9.9" in only_problem(draft, tmp_path)


def test_a_suffix_of_another_cuda(cuda_draft, tmp_path):
    cuda_draft.reversion(f"{cuda_draft.version.partition('+')[0]}+cu11")
    cuda_draft.change_info(version=cuda_draft.version)
    assert "ends in +cu11, while the build info says CUDA" in only_problem(cuda_draft, tmp_path)


def test_the_suffix_of_this_cuda(cuda_draft, tmp_path):
    major = cuda_draft.info["cuda"].split(".")[0]
    cuda_draft.reversion(f"{cuda_draft.version.partition('+')[0]}+cu{major}")
    cuda_draft.change_info(version=cuda_draft.version)
    assert problems(cuda_draft.write(tmp_path)) == []


def test_metadata_that_calls_it_pure(draft, tmp_path):
    draft.replace(draft.wheel_file, b"Root-Is-Purelib: false", b"Root-Is-Purelib: true")
    assert "calls it pure Python" in only_problem(draft, tmp_path)


def test_metadata_without_its_wheel_file(draft, tmp_path):
    del draft.files[draft.wheel_file]
    assert "its metadata lacks WHEEL" in only_problem(draft, tmp_path)


@pytest.mark.parametrize(
    "name", ["convt_reduce.libs/libcudart-6f2c.so.13", "convt_reduce/lib/libc10.so"]
)
def test_a_grafted_library(draft, tmp_path, name):
    draft.files[name] = draft.files[CPU]
    assert f"{name} has no place in the wheel" in only_problem(draft, tmp_path)


def test_no_cpu_half(draft, tmp_path):
    del draft.files[CPU]
    assert f"{CPU} is missing" in only_problem(draft, tmp_path)


def test_no_build_info(draft, tmp_path):
    del draft.files[INFO]
    assert f"{INFO} is missing." in problems(draft.write(tmp_path))


def test_no_cuda_half_where_one_is_required(draft, tmp_path):
    draft.files.pop(CUDA, None)
    draft.change_info(cuda_half=False, cuda=None, archs=[], cuda_half_reason="no nvcc was found.")
    assert problems(draft.write(tmp_path)) == []
    problem = only_problem(draft, tmp_path, require_cuda=True)
    assert "the CUDA half is required but was left out: no nvcc was found." in problem


def test_a_cuda_half_that_is_only_promised(cuda_draft, tmp_path):
    del cuda_draft.files[CUDA]
    assert f"{CUDA} is missing, while the build info" in problems(cuda_draft.write(tmp_path))[0]


def test_a_cuda_half_that_is_denied(cuda_draft, tmp_path):
    cuda_draft.change_info(cuda_half=False)
    assert f"{CUDA} is there, while the build info" in only_problem(cuda_draft, tmp_path)


def test_an_abi_target_that_the_flags_deny(draft, tmp_path):
    flags = [flag.replace("=0x020a", "=0x020d") for flag in draft.info["cxx_flags"]]
    draft.change_info(cxx_flags=flags)
    assert "promises torch 2.10, its flags say 2.13" in only_problem(draft, tmp_path)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="torch-abi-audit wants Python 3.11")
def test_an_oldest_torch_that_the_symbols_deny(draft, tmp_path):
    flags = [flag.replace("=0x020a", "=0x0209") for flag in draft.info["cxx_flags"]]
    draft.change_info(cxx_flags=flags, abi_target="2.9")
    found = problems(draft.write(tmp_path))
    assert found
    assert all("it needs torch 2.10.0, not the 2.9 promised" in problem for problem in found)


def test_too_large(draft, tmp_path, monkeypatch):
    monkeypatch.setattr(check_wheel, "MAX_WHEEL_BYTES", 1000)
    assert "at most 1,000 are expected" in only_problem(draft, tmp_path)


@pytest.mark.parametrize(
    ("symbol", "sentence"),
    [
        (b"_ZN3c105Error4whatEv", "C++ of torch, which changes from one torch to the next"),
        (b"_ZN2at6Tensor4dataEv", "C++ of torch, which changes from one torch to the next"),
        (b"PyObject_GetAttr", "which ties it to one Python"),
        (b"cudaMalloc", "which a static cudart should have given"),
        (b"fftw_plan_dft", "neither torch's C interface nor the system's"),
    ],
)
def test_a_symbol_from_elsewhere(draft, tmp_path, symbol, sentence):
    """A mangled name among them; torch-abi-audit may have its own word to say."""
    usual = b"torch_get_mutable_data_ptr"
    draft.rename_symbol(CPU, usual, symbol)
    name = symbol.decode().ljust(len(usual), "x")
    found = problems(draft.write(tmp_path))
    assert f"{CPU}: it wants the symbol {name}, {sentence}." in found


def test_a_library_that_no_user_has(draft, tmp_path):
    draft.rename_symbol(CPU, b"libtorch_cpu.so", b"libcudart.so.13")
    found = only_problem(draft, tmp_path)
    assert f"{CPU}: it needs libcudart.so.13, which a user's machine may lack" in found


def test_a_run_path_of_the_builder_and_an_export_of_cudart(draft):
    library = wheel_libraries.read_library(draft.files[CPU])
    export = wheel_libraries.Symbol("cudaMalloc", "", defined=True)
    changed = dataclasses.replace(
        library, run_paths=["$ORIGIN/lib", "/usr/local/cuda/lib64"], symbols=[export]
    )
    found = list(wheel_libraries.library_problems(changed, []))
    assert found == [
        "its run path '/usr/local/cuda/lib64' points outside the wheel.",
        "it exports cudaMalloc, which hides that of torch's cudart.",
    ]


def test_an_architecture_that_is_only_promised(cuda_draft, tmp_path):
    cuda_draft.change_info(archs=["5.0", *cuda_draft.info["archs"]])
    problem = only_problem(cuda_draft, tmp_path)
    assert "promises 5.0, but there is no native code for sm_50" in problem


def test_ptx_that_is_only_promised(cuda_draft, tmp_path):
    archs = [arch.removesuffix("+PTX") for arch in cuda_draft.info["archs"]]
    archs[archs.index("9.0")] = "9.0+PTX"
    cuda_draft.change_info(archs=archs)
    if "9.0+PTX" in Draft().info["archs"]:
        pytest.skip("this build has PTX for 9.0")
    problem = only_problem(cuda_draft, tmp_path)
    assert "promises 9.0+PTX, but there is no PTX for compute_90" in problem


def test_an_architecture_that_is_kept_quiet(cuda_draft, tmp_path):
    cuda_draft.change_info(archs=[])
    found = problems(cuda_draft.write(tmp_path))
    assert any(
        "it holds native code for sm_90a, which the build info does not name" in p for p in found
    )


def test_no_code_for_the_tuned_architecture(cuda_draft, tmp_path):
    library = tmp_path / "_C_cuda.so"
    library.write_bytes(cuda_draft.files[CUDA])
    found = wheel_libraries.fatbin_problems(library, cuda_draft.info["archs"], "5.0")
    assert any("it holds no native code for sm_50; found ['" in problem for problem in found)


def test_kernels_of_other_names_than_the_host_asks_for(cuda_draft, tmp_path):
    """As if the build had changed names on the host's side alone."""
    data = cuda_draft.files[CUDA]
    rodata = ELFFile(io.BytesIO(data)).get_section_by_name(".rodata")
    begin, end = rodata["sh_offset"], rodata["sh_offset"] + rodata["sh_size"]
    changed = re.sub(rb"_GLOBAL__N__[0-9a-f]{8}_", b"_GLOBAL__N__00000000_", data[begin:end])
    assert changed != data[begin:end]
    cuda_draft.files[CUDA] = data[:begin] + changed + data[end:]
    problem = only_problem(cuda_draft, tmp_path)
    assert f"{CUDA}: the host asks for no kernel named _ZN12convt_reduce" in problem


def test_a_library_without_any_gpu_code(cuda_draft, tmp_path):
    library = tmp_path / "_C_cuda.so"
    library.write_bytes(cuda_draft.files[CPU])
    found = list(wheel_libraries.kernel_problems(library))
    assert found == ["no GPU code could be taken out of it."]


def test_what_only_a_release_must_have(cuda_draft, tmp_path):
    cuda_draft.change_info(archs=["9.0"])
    cuda_draft.retag(f"py3-none-linux_{cuda_draft.machine}")
    found = problems(cuda_draft.write(tmp_path), release_platform="manylinux_2_28")
    assert any("a release must be for manylinux_2_28, got linux_" in p for p in found)
    assert any("a release must have code for 7." in p and p.endswith("got 9.0.") for p in found)


def test_the_command_says_everything_and_fails(draft, tmp_path):
    good = draft.write(tmp_path)
    draft.files["convt_reduce.libs/libc10.so"] = b""
    draft.change_info(version="9.9.9")
    (tmp_path / "bad").mkdir()
    bad = draft.write(tmp_path / "bad")
    command = [sys.executable, str(TOOLS / "check_wheel.py")]
    run = subprocess.run([*command, good, bad], capture_output=True, text=True)
    assert run.returncode == 1, run.stderr
    assert "the build info 9.9.9" in run.stdout
    assert "libc10.so has no place in the wheel" in run.stdout
    if sys.version_info >= (3, 11):
        assert f"{good.name}: in order, " in run.stdout
        assert subprocess.run([*command, good], capture_output=True).returncode == 0


def test_the_description_needs_only_the_standard_library(draft, tmp_path):
    wheel = draft.write(tmp_path)
    command = [sys.executable, "-S", "-I", str(TOOLS / "check_wheel.py"), "--describe", wheel]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert draft.info["cuda_half_reason"] in run.stdout
