"""A Debian with its own systemd in a container of this machine, as root; nothing of it is left afterwards.

The outer `unshare` is process 1 of a namespace: when it is killed, everything in it is.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

SUITE = "bookworm"
PACKAGES = "systemd,systemd-sysv,dbus,python3"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
REPOSITORY = Path(__file__).parents[2]
SITE_PACKAGES = Path(next(path for path in sys.path if path.endswith("site-packages")))
# Where the container has them. Not below /root or /home, which the unit hides.
SOURCE, PYTHON, PACKAGES_AT = "/opt/kvstored", "/opt/python", "/opt/site-packages"
PYTHONPATH = f"{SOURCE}:{SOURCE}/client:{SOURCE}/proto:{PACKAGES_AT}"
SYSTEM_PYTHON = sys.base_prefix == "/usr"
INTERPRETER = "/usr/bin/python3" if SYSTEM_PYTHON else f"{PYTHON}/bin/python{sys.version_info[0]}.{sys.version_info[1]}"
PYTHON_ENVIRONMENT = {"PYTHONPATH": PYTHONPATH, "LD_LIBRARY_PATH": f"{PYTHON}/lib", "PYTHONDONTWRITEBYTECODE": "1"}

# A process whose end is the end of all that it started and mounted.
OUTER = ["setpriv", "--pdeathsig", "KILL", "unshare", "-m", "-p", "-f", "--mount-proc", "--kill-child"]
RUN_S = 600
MAKE_S, TRIES = 900, 2  # by the network; who gives up skips


def missing():
    """Why no container can be had here; empty: one can."""
    if os.geteuid() != 0:
        return "not root"
    absent = [
        tool
        for tool in ("debootstrap", "systemd-nspawn", "setpriv", "unshare", "nsenter")
        if shutil.which(tool) is None
    ]
    return f"not installed: {', '.join(absent)}" if absent else ""


def make_root(root):
    """Install a minimal Debian into `root`, unless there is one already. Raises SubprocessError: no network?"""
    done = root / "etc" / "kvstored-root"
    tries = 0
    while not done.exists():
        shutil.rmtree(root, ignore_errors=True)
        command = ["debootstrap", "--variant=minbase", f"--include={PACKAGES}", SUITE, str(root)]
        try:
            subprocess.run([*OUTER, *command], check=True, stdout=subprocess.DEVNULL, timeout=MAKE_S)
        except subprocess.CalledProcessError:
            tries += 1
            if tries == TRIES:
                raise
        else:
            done.touch()


class Container:
    """A running one, inside `with`."""

    def __init__(self, root, log):
        self._root = root
        self._log = log
        self._init = 0

    def __enter__(self):
        binds = {REPOSITORY: SOURCE, SITE_PACKAGES: PACKAGES_AT}
        if not SYSTEM_PYTHON:
            binds[Path(sys.base_prefix)] = PYTHON
        nspawn = ["systemd-nspawn", "-q", "-D", str(self._root), "--boot", "--register=no", "--keep-unit"]
        nspawn += [
            "--console=pipe",
            "--volatile=overlay",
            *(f"--bind-ro={here}:{there}" for here, there in binds.items()),
        ]
        script = 'mount --make-rprivate / && exec "$@"'
        self._process = subprocess.Popen(
            [*OUTER, "sh", "-c", script, "sh", *nspawn], stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log
        )
        try:
            self._init = self._wait(self._find_init, "systemd starts")
            self._wait(lambda: self._booted() in ("running", "degraded"), "it has booted")
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind, error, trace):
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def run(self, *command, check=True, user_input=None, environ=None):
        """Run a command in it, as root; returns what it wrote."""
        assignments = [f"{name}={value}" for name, value in {"PATH": PATH, **(environ or {})}.items()]
        inside = ["nsenter", "-t", str(self._init), "-a", "env", "-i", *assignments, *command]
        try:
            done = subprocess.run(inside, capture_output=True, text=True, input=user_input, timeout=RUN_S)
        except subprocess.TimeoutExpired as error:
            raise RuntimeError(f"{' '.join(command)}: {error}") from None
        if check and done.returncode:
            raise RuntimeError(f"{' '.join(command)}: exit status {done.returncode}\n{done.stdout}{done.stderr}")
        return done.stdout.strip()

    def python(self, program, *arguments):
        """Run a program with the daemon's own interpreter and packages, as root."""
        return self.run(INTERPRETER, "-c", program, *arguments, environ=PYTHON_ENVIRONMENT)

    def write(self, path, text):
        """Write a file in it."""
        self.run("mkdir", "-p", str(Path(path).parent))
        self.run("tee", path, user_input=text)

    def _booted(self):
        return self.run("systemctl", "is-system-running", check=False)

    def _find_init(self):
        """The systemd among the descendants of our process."""
        parents, names = {}, {}
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                head, _, rest = (entry / "stat").read_text(errors="replace").rpartition(")")
                pid = int(entry.name)
                names[pid] = head.partition("(")[2]
                parents[pid] = int(rest.split()[1])
        for pid, name in names.items():
            above = pid
            while above and above != self._process.pid:
                above = parents.get(above, 0)
            if above and name == "systemd":
                return pid
        return 0

    def _wait(self, condition, what, timeout_s=300.0):
        deadline = time.monotonic() + timeout_s
        while not (found := condition()):
            if time.monotonic() > deadline or self._process.poll() is not None:
                raise RuntimeError(f"not within {timeout_s:g} s: {what}")
            time.sleep(0.1)
        return found
