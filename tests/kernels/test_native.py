"""The cache of native builds: what is not as it was built is built again, and what cannot be built says why."""

import ctypes
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from kernels.native import build, load
from labkit.session.catalogue import ROOT
from labkit.session.device import Device
from whywrong.errors import UsageError

CPU = Device("cpu", "X")


@pytest.fixture
def source(tmp_path, monkeypatch):
    """A source of one function that gives 7; `log` has a line a build."""
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "seven.cu").write_text('extern "C" int seven() { return 7; }\n')
    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path / "cache"))
    compiler(tmp_path, monkeypatch, f'case "$*" in *--version*) ;; *) echo x >> {tmp_path}/log;; esac; exec c++ "$@"')
    return folder / "seven.cu"


def compiler(tmp_path, monkeypatch, script):
    path = tmp_path / "compiler"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setenv("CXX", str(path))


def seven(path):
    return load(path, {"seven": (ctypes.c_int, [])}).seven()


def test_a_library_is_built_once_and_again_where_it_is_not_as_it_was_built(source, tmp_path):
    whole = build(source, source.parent, CPU).read_bytes()
    other = source.with_name("eight.cu")
    other.write_text('extern "C" int seven() { return 8; }\n')
    foreign = build(other, source.parent, CPU).read_bytes()
    other.unlink()
    for builds, held in enumerate((whole, b"", b"garbage", foreign, whole[: len(whole) // 2]), start=2):
        path = build(source, source.parent, CPU)
        path.unlink()  # another process may have it mapped
        path.write_bytes(held)
        build(source, source.parent, CPU)
        assert (tmp_path / "log").read_text().count("x") == builds
    code = f"import ctypes; print(ctypes.CDLL({str(build(source, source.parent, CPU))!r}).seven())"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "7\n"
    assert len(list((tmp_path / "cache" / "built").glob("*.so"))) == 2


def test_who_asks_while_it_is_built_waits_for_it(source, tmp_path):
    code = (
        "import sys; from pathlib import Path; from kernels.native import build; from labkit.session.device "
        "import Device; at = Path(sys.argv[1]); print(build(at, at.parent, Device('cpu', 'X')))"
    )
    other = subprocess.Popen([sys.executable, "-c", code, str(source)], stdout=subprocess.PIPE, text=True)
    with ThreadPoolExecutor(3) as pool:
        built = set(pool.map(lambda _: str(build(source, source.parent, CPU)), range(3)))
    assert {other.communicate()[0].strip()} == built
    assert (tmp_path / "log").read_text() == "x\n"


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (
            "echo 'ld: final link failed: No space left on device\ncollect2: error: ld returned 1' >&2; exit 1",
            "No space",
        ),
        ("echo 'a note\nx.cu:1: error: no such thing' >&2; exit 1", "could not build it: x.cu:1: error: no such thing"),
        ("exit 1", "no message"),
        ("exit 0", "No such file or directory"),
        ("kill -9 $$", "no message"),
    ],
    ids=["full disk", "error", "silent", "writes nothing", "killed"],
)
def test_a_compiler_that_fails_is_one_line_that_names_the_cause(source, tmp_path, monkeypatch, script, message):
    compiler(tmp_path, monkeypatch, script)
    with pytest.raises(UsageError, match=f"seven.cu: .*{message}") as error:
        build(source, source.parent, CPU)
    assert "\n" not in str(error.value)
    assert [path.name for path in (tmp_path / "cache" / "built").iterdir()] == ["seven.lock"]


def test_a_compiler_that_cannot_be_run_is_one_line(source, tmp_path, monkeypatch):
    compiler(tmp_path, monkeypatch, "")
    (tmp_path / "compiler").write_bytes(b"\x7fELF garbage")
    with pytest.raises(UsageError, match=r"seven\.cu: .*compiler cannot be run \(Exec format error\)"):
        build(source, source.parent, CPU)


@pytest.mark.parametrize("path", ["file", "file/below", "x" * 300])
def test_a_cache_that_cannot_be_written_is_one_line(source, tmp_path, monkeypatch, path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path / path))
    with pytest.raises(UsageError, match=r"LABKIT_CACHE: .* cannot be written"):
        build(source, source.parent, CPU)


@pytest.mark.parametrize("kind", ["open to others", "a link", "another's", "exchangeable"])
def test_a_cache_that_others_can_write_is_refused(source, tmp_path, monkeypatch, kind):
    path = build(source, source.parent, CPU)
    assert path.parent.stat().st_mode & 0o7777 == 0o700
    if kind == "open to others":
        path.parent.chmod(0o770)
    elif kind == "a link":
        path.parent.symlink_to(path.parent.rename(tmp_path / "elsewhere"))
    elif kind == "another's":
        monkeypatch.setattr("os.geteuid", lambda: path.stat().st_uid + 1)
    else:
        tmp_path.chmod(0o777)
    with pytest.raises(UsageError, match=r"LABKIT_CACHE: expected .*, got ") as error:
        build(source, source.parent, CPU)
    assert "\n" not in str(error.value)


def test_a_lock_that_is_a_link_is_one_line_and_its_target_stays(source, tmp_path):
    lock, target = build(source, source.parent, CPU).with_name("seven.lock"), tmp_path / "target"
    target.write_text("precious")
    lock.unlink()
    lock.symlink_to(target)
    with pytest.raises(UsageError, match=r"LABKIT_CACHE: .* cannot be written \(Too many levels of symbolic links\)"):
        build(source, source.parent, CPU)
    assert target.read_text() == "precious"


def test_another_compiler_of_the_same_version_builds_again(source, tmp_path, monkeypatch):
    before = build(source, source.parent, CPU)
    compiler(tmp_path / "source", monkeypatch, 'exec c++ "$@"')
    assert build(source, source.parent, CPU).name.split("-")[1] != before.name.split("-")[1]


def test_the_sources_of_a_kernel_build_into_such_a_cache(source):
    host = ROOT / "kernels" / "cuda_host"
    assert seven(build(source, host, CPU)) == 7
