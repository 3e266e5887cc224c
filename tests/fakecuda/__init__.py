"""A CUDA driver without a GPU, in C (`fakecuda.c` says what it does), built where it is needed."""

import atexit
import hashlib
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

from kvstored.testing import process_figures

HERE = Path(__file__).parent
KERNEL = HERE.parents[1] / "kvstored" / "device" / "copy_kernel.cu"
SOURCES = [HERE / "fakecuda.c", HERE / "driver_api.h"]
FLAGS = ["-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", "-fvisibility=hidden"]
MISSING = "" if shutil.which("cc") else "there is no C compiler (cc) to build the fake CUDA driver with"


def build() -> Path:
    """The library, made once per source. Raises CalledProcessError."""
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in SOURCES)).hexdigest()[:16]
    library = Path(tempfile.gettempdir()) / f"kvstored-fakecuda-{os.getuid()}" / digest / "libcuda.so.1"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        fresh = library.with_suffix(f".{os.getpid()}")
        command = ["cc", *FLAGS, "-Wl,-soname,libcuda.so.1", "-o", str(fresh), str(SOURCES[0]), "-lpthread", "-ldl"]
        subprocess.run(command, check=True)
        fresh.rename(library)
    return library


def build_kernels(directory: Path, *, on_the_fake: bool) -> Path:
    """The worker's kernel as a library for the CPU; it follows the fake's pointers, or plain ones of the host."""
    made = directory / "kernels.so"
    command = ["c++", "-std=c++17", "-O2", "-Wall", "-Werror", "-fPIC", "-shared", "-fvisibility=hidden"]
    command += ["-include", str(HERE / "kernels_on_cpu.h"), *(["-DON_THE_FAKE"] if on_the_fake else [])]
    command += ["-x", "c++", str(KERNEL), "-o", str(made)]
    subprocess.run([*command, *(["-x", "none", str(build())] if on_the_fake else [])], check=True)
    return made


def with_kernel(directory: Path) -> dict[str, str]:
    """Variables of a process on the fake that has the kernel, made in this directory."""
    image = directory / "image"
    image.write_bytes(b"the fake looks at no image")
    kernels = build_kernels(directory, on_the_fake=True)
    return {"FAKECUDA_KERNELS": str(kernels), "KVSTORED_COPY_KERNEL": str(image)}


def directory() -> Path:
    """A fresh directory for all processes of one run; it goes with this one."""
    made = tempfile.mkdtemp(prefix="fakecuda-")
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return Path(made)


def environment(directory: Path, **settings: object) -> dict[str, str]:
    """Variables of a process that is to find the fake; `settings` are FAKECUDA_ variables. All share `directory`."""
    own = {f"FAKECUDA_{name}": str(value) for name, value in settings.items()}
    return {"KVSTORED_LIBCUDA": str(build()), "FAKECUDA_DIR": str(directory), **own}


class FaultFile:
    """What the driver does wrong in processes that run, those with this file as FAKECUDA_FAULT_FILE."""

    def __init__(self, path: Path) -> None:
        self.path, self.held = path, path.with_name(f"{path.name}.held")
        self.says("")

    def says(self, text: str) -> None:
        """From the next call on; in one step, or a process might read half of it, or read it twice."""
        fresh = self.path.with_name(f"{self.path.name}.fresh")
        fresh.write_text(text)
        os.utime(fresh, ns=(time.time_ns(), time.time_ns()))
        fresh.rename(self.path)

    def holds_copies(self, at: int = 1) -> None:
        """The next transfer stops at its copy with this number, until `says` says something else."""
        self.held.unlink(missing_ok=True)  # of a process that was killed
        self.says(f"copy=hold@{at}")

    def in_mid_copy(self) -> bool:
        """Whether a transfer has stopped there."""
        return self.held.exists()


def workers_of(pid: int) -> list[int]:
    """Process ids of a daemon's device workers."""
    return [child for child in process_figures.children(pid) if is_worker(child)]


def is_worker(pid: int) -> bool:
    """Whether a process is a device worker that runs."""
    return "kvstored.device.worker" in process_figures.arguments(pid) and not process_figures.ended(pid)
