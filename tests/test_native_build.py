"""Compiling a C file: once, in a cache that nobody else can write to, and in one line why not."""

from __future__ import annotations

import ctypes
import errno
import json
import math
import os
import stat
import tempfile
from pathlib import Path

import pytest
import torch

from tests.conftest import make_checkpoint
from tests.helpers import CPU, needs_program, refused
from tests.rows import every_row
from tswift import native_build
from tswift.attention import native
from tswift.attention.backends import choose, why_not
from tswift.errors import SlowWarning
from tswift.files import cache_folder
from tswift.loading import model as loading
from tswift.loading.model import load
from tswift.native_build import Unbuilt, build

pytestmark = needs_program


@pytest.fixture(autouse=True)
def _fresh(monkeypatch, tmp_path):
    """An empty cache, none in its place, and nothing loaded before."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    native_build._attempted.cache_clear()
    yield
    native_build._attempted.cache_clear()


@pytest.fixture
def source(tmp_path) -> Path:
    path = tmp_path / "answer.c"
    path.write_text("int answer(void) { return ANSWER; }\n")
    return path


def kept(tmp_path) -> list[Path]:
    """The libraries in the cache, each of which has its hash beside it, and nothing else."""
    libraries = sorted((tmp_path / "cache" / "tswift").glob("*.so"))
    hashes = [library.with_suffix(".sha256") for library in libraries]
    assert sorted((tmp_path / "cache" / "tswift").iterdir()) == sorted([*libraries, *hashes])
    return libraries


def in_its_place(tmp_path) -> Path:
    """Where what is compiled is kept if the user's cache folder does not serve."""
    return tmp_path / "temporary" / f"tswift-{os.geteuid()}"


def again(source: Path, *defined: str) -> int:
    """As another process would."""
    native_build._attempted.cache_clear()
    return build(source, *defined).answer()


def no_compiler(monkeypatch):
    def refuse(command: list[str]):
        raise AssertionError(f"compiled again: {command}")

    monkeypatch.setattr(native_build, "_compile", refuse)


def test_it_is_compiled_once(monkeypatch, tmp_path, source):
    assert again(source, "ANSWER=42") == 42
    assert [path.name.split("-")[0] for path in kept(tmp_path)] == ["answer"]
    no_compiler(monkeypatch)
    assert again(source, "ANSWER=42") == 42


def test_another_macro_or_text_is_another_library(tmp_path, source):
    assert [again(source, "ANSWER=42"), again(source, "ANSWER=43")] == [42, 43]
    source.write_text("int answer(void) { return ANSWER + 1; }\n")
    assert again(source, "ANSWER=42") == 43
    assert len(kept(tmp_path)) == 3


ANSWER = b"\x06\x00\x00\x00\xc3"  # the end of `mov eax, 6; ret`
DAMAGES = {  # half of a library comes last: who loads it crashes
    "another answer": lambda content: content.replace(ANSWER, b"\x07" + ANSWER[1:]),
    "nothing": lambda content: b"",
    "half of it": lambda content: content[: len(content) // 2],
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_library_that_does_not_fit_its_hash_is_not_loaded(tmp_path, source, damage):
    assert again(source, "ANSWER=6") == 6
    (path,) = kept(tmp_path)
    sound = path.read_bytes()
    assert DAMAGES[damage](sound) != sound
    path.unlink()  # the library is loaded, and would be loaded by its name
    path.write_bytes(DAMAGES[damage](sound))
    assert again(source, "ANSWER=6") == 6
    assert kept(tmp_path) == [path]
    assert path.read_bytes() == sound


@pytest.mark.parametrize("left", [None, b"", b"\xff"])
def test_a_library_without_a_sound_hash_is_made_anew(tmp_path, source, left):
    """As after a power cut between the two."""
    assert again(source, "ANSWER=6") == 6
    (path,) = kept(tmp_path)
    digest = path.with_suffix(".sha256")
    sound = digest.read_bytes()
    digest.unlink() if left is None else digest.write_bytes(left)
    assert again(source, "ANSWER=6") == 6
    assert kept(tmp_path) == [path]
    assert digest.read_bytes() == sound


def test_content_is_on_the_disk_before_it_has_its_name(monkeypatch, tmp_path, source):
    """Otherwise a power cut leaves the name with half a library, which crashes who runs it."""
    synced: set[int] = set()
    sync = os.fsync
    replace = Path.replace

    def noted(descriptor):
        synced.add(os.fstat(descriptor).st_ino)
        sync(descriptor)

    def checked(self, target):
        assert self.stat().st_ino in synced, f"{target.name} was not written through"
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(Path, "replace", checked)
    assert again(source, "ANSWER=6") == 6
    assert len(kept(tmp_path)) == 1


def test_the_cache_folder_is_private(tmp_path):
    assert cache_folder() == tmp_path / "cache" / "tswift"
    assert stat.S_IMODE((tmp_path / "cache" / "tswift").stat().st_mode) == 0o700


@pytest.mark.parametrize("given", ["", "cache", "./cache", "~/cache"])
def test_the_cache_folder_of_an_environment_that_names_none(monkeypatch, tmp_path, given):
    """By the specification of base directories a path that is not absolute is no path."""
    monkeypatch.setenv("XDG_CACHE_HOME", given)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    assert cache_folder() == tmp_path / "home" / ".cache" / "tswift"
    assert not (tmp_path / "cache").exists()


def writable_by_others(cache: Path):
    (cache / "tswift").mkdir(parents=True)
    (cache / "tswift").chmod(0o777)


def in_a_folder_where_others_rename(cache: Path):
    cache.mkdir()
    cache.chmod(0o777)


def a_link(cache: Path):
    (cache / "elsewhere").mkdir(parents=True)
    (cache / "tswift").symlink_to(cache / "elsewhere")


def anothers(cache: Path):
    if os.geteuid():
        pytest.skip("only root can give a folder away")
    (cache / "tswift").mkdir(parents=True)
    os.chown(cache / "tswift", 12_345, -1)


@pytest.mark.parametrize(
    "unsafe", [writable_by_others, in_a_folder_where_others_rename, a_link, anothers]
)
def test_code_that_others_could_plant_is_not_loaded(monkeypatch, tmp_path, source, unsafe):
    unsafe(tmp_path / "cache")
    assert cache_folder() == in_its_place(tmp_path)
    assert stat.S_IMODE(in_its_place(tmp_path).stat().st_mode) == 0o700
    assert again(source, "ANSWER=6") == 6
    no_compiler(monkeypatch)  # the second time, it is found in the folder of our own
    assert again(source, "ANSWER=6") == 6


def test_where_neither_folder_is_the_users_nothing_is_kept(monkeypatch, tmp_path, source):
    for unsafe in (tmp_path / "cache" / "tswift", in_its_place(tmp_path)):
        unsafe.mkdir(parents=True)
        unsafe.chmod(0o777)
    assert cache_folder() is None
    assert again(source, "ANSWER=6") == 6


@pytest.mark.parametrize("blocked", ["a file", "no permission"])
def test_a_cache_that_cannot_be_written(tmp_path, source, blocked):
    if blocked == "a file":
        (tmp_path / "cache").write_text("")
    else:
        if os.geteuid() == 0:
            pytest.skip("root may write anywhere")
        (tmp_path / "cache").mkdir(mode=stat.S_IRUSR | stat.S_IXUSR)
    assert again(source, "ANSWER=5") == 5
    assert not (tmp_path / "cache" / "tswift").exists()
    assert cache_folder() == in_its_place(tmp_path)


@pytest.mark.parametrize(
    ("compiler", "line"),
    [
        ("no-such-compiler -x", "needs a C compiler: no-such-compiler (CC) is not there"),
        ("cc '", "needs a C compiler: CC cannot be read: No closing quotation"),
        ("false", "needs another C compiler: it says nothing"),
        ("true", "fails: what the C compiler made does not load"),
        ("sh -c 'echo broken >&2; echo more >&2; exit 3'", "needs another C compiler: broken"),
    ],
)
def test_compilers_that_do_not_serve(monkeypatch, source, compiler, line):
    monkeypatch.setenv("CC", compiler)
    with pytest.raises(Unbuilt) as caught:
        build(source, "ANSWER=1")
    assert str(caught.value).startswith(line)
    assert "\n" not in str(caught.value)


@every_row(
    ("tool", "how"),
    [
        ("apt-get", " or by apt-get install build-essential"),
        ("apk", " or by apk add build-base"),
        ("dnf", " or by dnf install gcc"),
        ("xcode-select", " or by xcode-select --install"),
        ("nothing", ""),
    ],
)
def test_where_there_is_none_the_command_that_mends_it_is_told(
    monkeypatch, tmp_path, source, tool, how
):
    (tmp_path / tool).mkdir()
    (tmp_path / tool / tool).touch(0o700)
    monkeypatch.setenv("PATH", str(tmp_path / tool))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(native_build, "find_spec", lambda name: None)
    native_build._attempted.cache_clear()
    with pytest.raises(Unbuilt) as caught:
        build(source, "ANSWER=1")
    assert str(caught.value) == (
        f"needs a C compiler: get one by pip install 'tswift[compiler]'{how}, or name one by CC"
    )


ZIGLANG = """
import json, os, sys
os.environ["PATH"] = {path!r}
kept = os.environ["ZIG_GLOBAL_CACHE_DIR"], os.environ["ZIG_LOCAL_CACHE_DIR"]
given = sys.argv[1:]
with open({log!r}, "a") as log:
    print(json.dumps([given, kept, os.path.realpath(".") in sys.path]), file=log)
own = "cc", "-Xclang", "-O3", "-target", "x86_64-linux-gnu"
assert given[:5] == [*own]
os.execvp("cc", ["cc", *given[5:]])
"""


def test_where_there_is_none_that_of_a_package_serves(monkeypatch, tmp_path, source):
    """It keeps what it makes where nobody else can write, and nothing of that stays."""
    log = tmp_path / "log"
    (tmp_path / "site" / "ziglang").mkdir(parents=True)
    (tmp_path / "site" / "ziglang" / "__init__.py").touch()
    program = ZIGLANG.format(path=os.environ["PATH"], log=str(log))
    (tmp_path / "site" / "ziglang" / "__main__.py").write_text(program)
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    monkeypatch.setenv("ZIG_GLOBAL_CACHE_DIR", str(tmp_path / "everybodys"))
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ziglang.py").write_text("raise SystemExit('another')")
    assert again(source, "ANSWER=42") == 42
    folder = tmp_path / "cache" / "tswift"
    compiled, linked = map(json.loads, log.read_text().splitlines())
    assert "-c" in compiled[0]
    assert "-nostdlib" in linked[0]
    for _, caches, here in (compiled, linked):
        assert {Path(each).parent for each in caches} == {folder}
        assert not here
    assert len(kept(tmp_path)) == 1


@pytest.mark.slow
def test_zigs_compiler_makes_what_loads(monkeypatch, source):
    pytest.importorskip("ziglang")
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    source.write_text("#include <math.h>\nfloat answer(float x) { return sinf(x); }\n")
    answer = build(source, options=native_build.widest_vectors()).answer
    answer.argtypes, answer.restype = (ctypes.c_float,), ctypes.c_float
    assert answer(0.5) == pytest.approx(math.sin(0.5))


@needs_program
@pytest.mark.filterwarnings("ignore::tswift.errors.SlowWarning")
def test_a_compiler_that_takes_its_time_is_waited_for_and_then_done_without(monkeypatch, source):
    monkeypatch.setattr(native_build, "_QUIET", 0.05)
    monkeypatch.setenv("CC", "sh -c 'sleep 0.3; exec cc \"$@\"' cc")
    with pytest.warns(SlowWarning, match=r"^a C program is compiled, once; after 0.05 s"):
        assert build(source, "ANSWER=42").answer() == 42
    monkeypatch.setattr(native_build, "_PATIENCE", 0.1)
    monkeypatch.setenv("CC", "sh -c 'echo >> tries; exec sleep 60'")
    monkeypatch.chdir(source.parent)
    with pytest.raises(Unbuilt, match=r"^was not compiled within .* a machine that is busy$"):
        build(source, "ANSWER=43", options=("-O1",))
    assert (source.parent / "tries").read_text() == "\n"  # not again without the options


# a compiler whose assembler finds the disk of some folder full
FULL = """sh -c 'case "$*" in *{}*)
  echo "cc7.s: Assembler messages:" >&2
  echo "cc7.s: Fatal error: made.o: No space left on device" >&2
  echo >> tries; exit 1
esac; exec cc "$@"' cc"""


def test_where_the_disk_of_the_cache_is_full_temporary_files_serve(monkeypatch, tmp_path, source):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CC", FULL.format("cache/tswift"))
    assert again(source, "ANSWER=42") == 42
    assert not [*(tmp_path / "temporary").iterdir()]
    assert (tmp_path / "tries").read_text() == "\n"
    monkeypatch.setenv("CC", FULL.format("made.o"))
    native_build._attempted.cache_clear()
    with pytest.raises(Unbuilt) as caught:
        build(source, "ANSWER=42", options=("-O1",))
    folder = tmp_path / "cache" / "tswift"
    assert str(caught.value) == f"cannot be compiled: No space left on device ({folder})"
    assert (tmp_path / "tries").read_text() == 3 * "\n"  # not again without the options


def test_where_no_file_can_be_made_it_is_told_why(monkeypatch, source):
    def full(**named):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tempfile, "TemporaryDirectory", full)
    with pytest.raises(Unbuilt, match=r"^cannot be compiled: No space left on device \("):
        build(source, "ANSWER=42")


def test_options_that_the_compiler_refuses_are_left_out(source):
    assert build(source, "ANSWER=7", options=("-mno-such-vectors",)).answer() == 7


def test_without_a_compiler_the_stock_operators_serve(monkeypatch):
    monkeypatch.setenv("CC", "no-such-compiler")
    assert choose("auto", torch.float32, CPU) == "sdpa"
    assert why_not("native", torch.float32, CPU) == (
        "native attention needs a C compiler: no-such-compiler (CC) is not there"
    )


@pytest.mark.slow
@pytest.mark.parametrize("broken", [False, True])
def test_a_models_own_head_size_is_built_before_it_is_loaded(monkeypatch, tmp_path, broken):
    """And no other; where that fails it is told, and not found out in a pass."""
    built = []
    compiled = native_build._compile

    def noted(command):
        built.extend(word for word in command if "WIDTH" in word)
        if broken:
            raise Unbuilt("needs another C compiler: broken")
        compiled(command)

    monkeypatch.setattr(native_build, "_compile", noted)
    native._kernel.cache_clear()
    model = str(make_checkpoint(tmp_path / "m", head_dim=16))
    assert load(model, device="cpu", dtype="float32").attention == ("sdpa" if broken else "native")
    if broken:
        with refused("attention: native attention needs another C compiler: broken"):
            load(model, device="cpu", dtype="float32", attention="native")
    assert set(built) == {"-DWIDTH=16"}


@every_row(("machine", "capability"), [("riscv64", "DEFAULT"), ("x86_64", "DEFAULT")])
def test_other_processors(monkeypatch, source, machine, capability):
    monkeypatch.setattr(native_build, "architecture", lambda: machine)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    with pytest.raises(Unbuilt, match="needs an x86 processor with AVX2 or a 64-bit ARM processor"):
        build(source, "ANSWER=1")


@pytest.mark.parametrize("compiler", ["cc", "ziglang"])
@pytest.mark.parametrize(
    ("features", "dots"),
    [
        ({"asimd"}, {"cc": [], "ziglang": []}),
        (
            {"asimd", "asimddp"},
            {"cc": ["-march=armv8.2-a+dotprod"], "ziglang": ["-mcpu=generic+dotprod"]},
        ),
    ],
)
def test_an_arm_processor_has_flags_of_its_own(monkeypatch, source, compiler, features, dots):
    given = []

    def noted(command):
        given.extend(command)
        raise Unbuilt("no more")

    monkeypatch.setattr(native_build, "architecture", lambda: "aarch64")
    monkeypatch.setattr(native_build, "processor_features", lambda: features)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    monkeypatch.setattr(native_build, "_compiler", lambda: [compiler])
    monkeypatch.setattr(native_build, "_compile", noted)
    with pytest.raises(Unbuilt, match="no more"):
        native_build._built(source, options=native_build.widest_vectors.__wrapped__())
    assert [word for word in given if word.startswith("-m")] == [
        "-mno-outline-atomics",
        *dots[compiler],
    ]


@pytest.mark.parametrize("weights", [None, "int4"])
def test_a_missing_compiler_is_told_once_where_it_costs_much(monkeypatch, tmp_path, weights):
    monkeypatch.setenv("CC", "no-such-compiler")
    checkpoint = make_checkpoint(tmp_path / "m", head_dim=16)
    with pytest.warns(SlowWarning, match="needs a C compiler") as told:
        load(str(checkpoint), device="cpu", dtype="float32", weights=weights)
    assert [str(each.message) for each in told] == [
        f"the C program that computes {checkpoint} needs a C compiler: no-such-compiler (CC) is "
        "not there; without it every token takes "
        f"{'many' if weights else 'several'} times as long"
    ]


def test_it_is_told_before_anything_is_loaded(monkeypatch, tmp_path):
    class Opened(BaseException): ...

    def opened(*given):
        raise Opened

    monkeypatch.setenv("CC", "no-such-compiler")
    monkeypatch.setattr(loading, "_load_network", opened)
    checkpoint = make_checkpoint(tmp_path / "m", head_dim=16)
    with pytest.warns(SlowWarning, match="needs a C compiler"), pytest.raises(Opened):
        load(str(checkpoint), device="cpu", dtype="float32")


@pytest.mark.parametrize("asked", [{"attention": "sdpa"}, {"dtype": "float64"}])
def test_where_a_compiler_changes_little_nothing_is_told(monkeypatch, recwarn, tmp_path, asked):
    monkeypatch.setenv("CC", "no-such-compiler")
    checkpoint = make_checkpoint(tmp_path / "m", head_dim=16)
    load(str(checkpoint), **{"device": "cpu", "dtype": "float32", **asked})
    assert not [each for each in recwarn if each.category is SlowWarning]
