"""The system's C compiler: whether it is there, and a source file through it into a library that is loaded.

What was compiled is kept in a folder of the user's own, under a name that says what it was made from and what is in
it, so that another compiler, processor or source makes another file, and a file that is not whole is not loaded.
"""

import contextlib
import ctypes
import functools
import hashlib
import os
import shlex
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path

from kvlib.errors import KvlibError

# Without -ffast-math: NaN must reach the checks. Contraction into fused products is what gcc does by default.
FLAGS = ("-std=gnu11", "-O3", "-march=native", "-fno-math-errno", "-ffp-contract=fast", "-fopenmp")
LINKING = ("-shared", "-fPIC", "-lm")
LIMIT_S = 120


def command() -> list[str]:
    """The compiler as it is called: $CC, which may carry options, else `cc`."""
    return shlex.split(os.environ.get("CC", "")) or ["cc"]


def why_not() -> str | None:
    """None when there is a C compiler that knows OpenMP and this processor, else the reason in a few words."""
    return _why_not(tuple(command()), os.environ.get("PATH"))


@functools.cache  # every handoff asks, and the answer may need a run of the compiler
def _why_not(compiler: tuple[str, ...], path: str | None) -> str | None:
    try:
        _described(compiler)
    except KvlibError as error:
        return str(error).partition(", expected")[0]
    return None


def library(source: Path, defines: dict[str, object]) -> ctypes.CDLL:
    """The library that a C file makes with these macros: found where it was kept, else compiled. Once per process.

    Raises: KvlibError when there is no compiler, or it refuses.
    """
    macros = tuple(f"-D{name}={value}" for name, value in defines.items())
    return _library(Path(source), macros, tuple(command()))


def library_or_none(source: Path, defines: dict[str, object]) -> ctypes.CDLL | None:
    """As `library`; None where there is none to be had, which is found out once."""
    return _library_or_none(Path(source), tuple(defines.items()), tuple(command()))


@functools.cache
def _library_or_none(source: Path, defines: tuple, _compiler: tuple[str, ...]) -> ctypes.CDLL | None:
    try:
        return library(source, dict(defines))
    except KvlibError:
        return None


@functools.cache
def _library(source: Path, macros: tuple[str, ...], compiler: tuple[str, ...]) -> ctypes.CDLL:
    text = source.read_bytes()
    headers = [path.read_bytes() for path in sorted(source.parent.glob("*.h"))]  # any of which it may include
    parts = [text, *headers, "\0".join((*FLAGS, *LINKING, *macros)).encode(), _described(compiler)]
    made_from = hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()[:32]
    with tempfile.TemporaryDirectory(prefix="kvlib-") as scratch:
        kept = private_folder()
        if kept is not None and (found := _kept(kept, made_from)) is not None:
            with contextlib.suppress(OSError):  # compiled again below
                return ctypes.CDLL(str(found))
        made = Path(scratch) / "made.so"
        _run([*compiler, *FLAGS, *macros, str(source), "-o", str(made), *LINKING])
        try:
            return ctypes.CDLL(str(_keep(made, kept, made_from)))
        except OSError as error:
            raise KvlibError(
                f"what the C compiler {compiler[0]} made cannot be loaded ({error}), expected a library for this machine: name another "
                "compiler in the variable CC"
            ) from error


@functools.cache
def _described(compiler: tuple[str, ...]) -> bytes:
    """All that the compiler defines by itself: its version, and what `native` stands for on this processor."""
    if shutil.which(compiler[0]) is None:
        raise KvlibError(
            f"no C compiler ({compiler[0]}) here, expected one: install it, or name one in the variable CC"
        )
    described = _run([*compiler, *FLAGS, "-dM", "-E", "-x", "c", os.devnull])
    if b"_OPENMP" not in described:
        raise KvlibError(
            f"a C compiler ({compiler[0]}) without OpenMP here, expected one with it: name another in the variable CC"
        )
    return described


def _run(arguments: list[str]) -> bytes:
    try:
        done = subprocess.run(arguments, capture_output=True, timeout=LIMIT_S, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KvlibError(
            f"the C compiler {arguments[0]} does not run ({error}), expected one that does: name another in the variable CC"
        ) from error
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines() or [f"status {done.returncode}"]
        # a linker says what it lacks and is then said to have failed
        reason = next((line for line in said if "error" in line and not line.startswith("collect2")), said[0])
        raise KvlibError(
            f"the C compiler {arguments[0]} refuses ({reason.strip()[:200]}), expected gcc or clang with OpenMP: name another in the "
            "variable CC"
        )
    return done.stdout


def private_folder() -> Path | None:
    """Where compiled code is kept, made if need be: nobody else may write there. None where that cannot be had."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        folder = (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "kvlib" / "compiled"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        found = folder.lstat()
    except (OSError, RuntimeError):  # RuntimeError: no home
        return None
    private = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022
    return folder if private else None


def _name(made_from: str, library: Path) -> str:
    return f"{made_from}-{hashlib.sha256(library.read_bytes()).hexdigest()[:32]}.so"


def _kept(folder: Path, made_from: str) -> Path | None:
    """The file that was made from this, if it is there and whole."""
    for path in sorted(folder.glob(f"{made_from}-*.so")):
        try:
            if path.name == _name(made_from, path):
                return path
            path.unlink()
        except OSError:
            continue
    return None


def _keep(made: Path, folder: Path | None, made_from: str) -> Path:
    """Put a fresh library where it is found again, whole or not at all; its place. Where that fails it stays where it is."""
    if folder is None:
        return made
    try:
        handle, partial = tempfile.mkstemp(dir=folder, prefix=".partial-")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(made.read_bytes())
                file.flush()
                os.fsync(file.fileno())
            place = folder / _name(made_from, made)
            os.replace(partial, place)
        finally:
            Path(partial).unlink(missing_ok=True)
    except OSError:
        return made
    return place
