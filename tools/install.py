"""Make the virtual environment `.venv` and install the pinned requirements into it; standard library only.

    python3.11 tools/install.py [--test]

Done once: a stamp in `.venv` holds the hash of the requirements and is written last. An install that was
killed is begun again; a finished one is repeated only when the requirements change.
"""

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
VENV = os.path.join(ROOT, ".venv")
PYTHON = os.path.join(VENV, "bin", "python")
UNFINISHED = os.path.join(VENV, ".installing")
STAMPS = {"book": os.path.join(VENV, ".installed"), "test": os.path.join(VENV, ".installed-test")}
FILES = {"book": ["requirements.txt"], "test": ["requirements.txt", "requirements-test.txt"]}
INCLUDED = {"book": [], "test": ["requirements-ray.txt"]}  # by a line of one of these
OLDEST, NEWEST = (3, 11), (3, 13)  # what all of the pinned packages offer wheels for
VERSION = ".".join(str(part) for part in sys.version_info[:2])
SAY_EVERY_S = 15
PACKAGES, TYPICAL_S = 140, 240  # about what an installation takes, for the time left


def main():
    check_python()
    what = "test" if "--test" in sys.argv[1:] else "book"
    # pip inherits the lock: one whose command was killed is waited for, and so is another command's.
    with open(os.path.join(ROOT, ".venv.lock"), "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another installation into .venv is still running: waiting for it to end")
            fcntl.flock(lock, fcntl.LOCK_EX)
        prepare(what, lock)


def prepare(what, lock):
    if os.path.exists(UNFINISHED):
        say("an earlier installation was interrupted: beginning it again")
        shutil.rmtree(VENV)
    elif os.path.exists(PYTHON) and read(STAMPS[what]) == fingerprint(what):
        return
    fresh = not os.path.exists(PYTHON)
    os.makedirs(VENV, exist_ok=True)
    write(UNFINISHED, "")
    for stamp in STAMPS.values():
        if os.path.exists(stamp):
            os.remove(stamp)
    if fresh:
        say("making the virtual environment .venv and installing the pinned requirements into it:")
        say("  about 0.4 GB to download with a CPU build of torch, 2.5 GB with a CUDA build (README.md says")
        say("  how to choose), 2.5 GB on disk (7 GB), 2 to 10 minutes")
        make_venv(lock)
    else:
        say("the requirements have changed, or the tests' are missing: installing what differs")
    install(FILES[what], lock)
    write(STAMPS["book"], fingerprint("book"))
    if what == "test":
        write(STAMPS["test"], fingerprint("test"))
    os.remove(UNFINISHED)
    say("requirements installed")


def check_python():
    if not OLDEST <= sys.version_info[:2] <= NEWEST:
        stop(
            f"Python {VERSION} given, expected 3.11, 3.12 or 3.13, for which the pinned packages are built: "
            "install python3.11, or name one with `make PYTHON=/path/to/python3.11 …`"
        )
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError:
        stop(
            f"{sys.executable} has no venv module, expected a Python that makes virtual environments: "
            f"on Debian and Ubuntu install python{VERSION}-venv"
        )


def make_venv(lock):
    command = [sys.executable, "-m", "venv", VENV]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, pass_fds=(lock.fileno(),)
    )
    if done.returncode:
        lines = done.stdout.decode(errors="replace").strip().splitlines() or ["no output"]
        stop(f"the virtual environment could not be made ({lines[-1]}): put that right and run again")


def install(files, lock):
    """pip, quiet, with a line now and then that says how far it is."""
    log = os.path.join(VENV, "pip.log")
    pip = [
        PYTHON,
        "-m",
        "pip",
        "install",
        "--disable-pip-version-check",
        "--no-input",
        "--progress-bar",
        "off",
    ]
    requirements = [part for name in files for part in ("-r", name)]
    with open(log, "wb") as stream:
        options = {"cwd": ROOT, "stdout": stream, "stderr": subprocess.STDOUT, "pass_fds": (lock.fileno(),)}
        process = subprocess.Popen([*pip, *requirements, "-c", "requirements.lock"], **options)
        watch(process, log)
        if process.returncode == 0:
            own = ["--no-deps", "--no-build-isolation", "--quiet", "--editable", "."]
            process = subprocess.Popen([*pip, *own], **options)
            process.wait()
    if process.returncode:
        reasons = [line.strip() for line in lines_of(log) if "ERROR" in line]
        stop(
            f"the requirements could not be installed ({(reasons or ['no reason given'])[-1]}): check the "
            f"network and the free space, then run the same command again; all that pip said is in {log}"
        )


def watch(process, log):
    started = said = time.time()
    try:
        while process.poll() is None:
            time.sleep(0.5)
            if time.time() - said < SAY_EVERY_S:
                continue
            said = time.time()
            lines = lines_of(log)
            if any(line.startswith("Installing collected packages") for line in lines):
                say(f"{said - started:.0f} s: everything is downloaded; unpacking, about a minute left")
            else:
                found = sum(bool(re.match("(Collecting|Processing) ", line)) for line in lines)
                left = max(TYPICAL_S - (said - started), 60) / 60
                say(
                    f"{said - started:.0f} s: {found} of about {PACKAGES} packages; about {left:.0f} min left"
                )
    except BaseException:
        process.terminate()
        process.wait()
        raise


def lines_of(path):
    with open(path, encoding="utf-8", errors="replace") as stream:
        return stream.read().splitlines()


def fingerprint(what):
    """Hash of the requirements and of the Python that they are for."""
    digest = hashlib.sha256(VERSION.encode())
    for name in [*FILES[what], *INCLUDED[what], "requirements.lock", "pyproject.toml"]:
        with open(os.path.join(ROOT, name), "rb") as stream:
            digest.update(stream.read())
    return digest.hexdigest()


def read(path):
    try:
        with open(path) as stream:
            return stream.read()
    except OSError:
        return None


def write(path, text):
    with open(path + ".new", "w") as stream:
        stream.write(text)
    os.replace(path + ".new", path)


def say(sentence):
    print(f"[setup] {sentence}", file=sys.stderr, flush=True)


def stop(sentence):
    say(sentence)
    sys.exit(2)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        say("interrupted: run the same command again, and the installation is begun anew")
        sys.exit(130)
    except OSError as error:
        stop(f"the environment could not be written ({error}): free some space, or fix the permissions")
