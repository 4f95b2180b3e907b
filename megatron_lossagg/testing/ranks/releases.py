"""The Megatron-Core releases that the plugin is proved on, fetched, and ranks that import one.

    with release_pool(4, "0.19.2", ".releases") as pool:   # under `if __name__ == "__main__":`
        pool.run(work)                                      # every rank has megatron-core 0.19.2

Wheels are unpacked, not installed: the environment keeps the Megatron-Core that it has.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron_lossagg.errors import LossAggError
from megatron_lossagg.testing.ranks.rank_pool import RankPool

# Wheels are made for a few interpreters only. What the bench imports of them is Python, so that one
# for another interpreter does as well.
_OTHER_INTERPRETERS = ("3.12", "3.11")
# What pip says before it gives up to reach the index.
_NOT_REACHED = "Retrying ("
_LINUX = ("manylinux2014_x86_64", "manylinux_2_24_x86_64", "manylinux_2_28_x86_64", "any")


@dataclass(frozen=True)
class Release:
    """One release, and what is special about it on a machine without a GPU.

    Attributes:
        version: of megatron-core.
        needs: packages that it imports and that a torch without CUDA does not bring.
        refuses_r3_with_cp: whether regime R3 under context parallelism must be refused, see
            `refusals`.
    """

    version: str
    needs: tuple[str, ...] = ()
    refuses_r3_with_cp: bool = False


RELEASES = (
    Release("0.12.3", refuses_r3_with_cp=True),
    Release("0.13.1"),
    Release("0.14.0"),
    Release("0.15.3"),
    Release("0.16.1"),
    Release("0.17.1"),
    Release("0.18.2", needs=("triton",)),
    Release("0.19.2", needs=("triton",)),
)


class FetchError(LossAggError):
    """A release could not be downloaded, or is not what its name says."""


def find_release(version: str) -> Release:
    """The release of that version.

    Args:
        version: such as "0.16.1".

    Returns:
        The release.

    Raises:
        ValueError: it is not one of `RELEASES`.
    """
    for release in RELEASES:
        if release.version == version:
            return release
    known = ", ".join(release.version for release in RELEASES)
    raise ValueError(f"megatron-core {version!r} is not one of the proved releases: {known}")


def fetch(version: str, folder: str | os.PathLike[str]) -> Path:
    """Download and unpack a release, unless the folder has it.

    pip of this interpreter downloads from the index that it is configured for.

    Args:
        version: one of `RELEASES`.
        folder: where releases are kept; made if it is not there.

    Returns:
        A folder to put on `sys.path` (`RankPool(megatron_core=...)`); it holds `megatron/core` and
        links to the packages that the release needs.

    Raises:
        ValueError: the version is not one of `RELEASES`.
        FetchError: pip failed, or the wheel holds another version.
    """
    release = find_release(version)
    folder = Path(folder).absolute()
    packages = [
        _fetch_wheel(folder, name, name)
        for name in release.needs
        if importlib.util.find_spec(name) is None
    ]
    target = _fetch_wheel(folder, version, f"megatron-core=={version}", _OTHER_INTERPRETERS)
    if not (target / f"megatron_core-{version}.dist-info").is_dir():
        found = ", ".join(path.name for path in target.glob("*.dist-info")) or "no package"
        raise FetchError(f"{target} should hold megatron-core {version}, but holds {found}")
    for package in packages:
        _link(package, target)
    return target


@contextlib.contextmanager
def release_pool(
    num_ranks: int, version: str, folder: str | os.PathLike[str], timeout_s: float = 120.0
) -> Iterator[RankPool]:
    """Ranks that import this release, fetched if need be, and have been asked which one they got.

    Args:
        num_ranks: as for `RankPool`.
        version: one of `RELEASES`.
        folder: as for `fetch`.
        timeout_s: as for `RankPool`.

    Yields:
        The pool.

    Raises:
        FetchError: see `fetch`.
        LossAggError: a rank cannot import the release, or imports another.
    """
    source = fetch(version, folder)
    with RankPool(num_ranks, timeout_s, megatron_core=source) as pool:
        for rank, (found, file) in enumerate(pool.run(imported_release)):
            if found != version:
                raise LossAggError(
                    f"rank {rank} should import megatron-core {version}, but got {found} ({file})"
                )
        yield pool


def imported_release() -> tuple[str, str]:
    """Version and file of the Megatron-Core that this process imports."""
    import megatron.core

    # From 0.18 on it appends the commit of the git repository in which it lies, whatever that is.
    return megatron.core.__version__.split("+")[0], megatron.core.__file__


def _fetch_wheel(
    folder: Path, name: str, requirement: str, other_interpreters: tuple[str, ...] = ()
) -> Path:
    """`folder/name` with the unpacked wheel; it appears complete or not at all."""
    target = folder / name
    if target.is_dir():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix="fetching_") as scratch:
        wheel = _download(requirement, Path(scratch), other_interpreters)
        unpacked = Path(scratch) / "unpacked"
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(unpacked)
        try:
            unpacked.rename(target)
        except OSError:
            if not target.is_dir():  # it is there if another process was faster
                raise
    return target


def _download(requirement: str, folder: Path, other_interpreters: tuple[str, ...]) -> Path:
    attempts: list[list[str]] = [[]]
    for python in other_interpreters:
        platforms = [option for tag in _LINUX for option in ("--platform", tag)]
        attempts.append(["--python-version", python, *platforms])
    for options in attempts:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
        command += ["--disable-pip-version-check", *options, requirement]
        done = subprocess.run([*command, "--dest", folder], capture_output=True, text=True)
        if done.returncode == 0:
            [wheel] = folder.glob("*.whl")
            return wheel
        if _NOT_REACHED in done.stderr:
            break
    errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR: ")]
    # pip lists all the versions that there are.
    reason = " ".join(line.split(" (from versions:")[0] for line in errors) or done.stderr[-500:]
    if _NOT_REACHED in done.stderr:
        reason = "the index that pip is configured for was not reached."
    raise FetchError(f"cannot download {requirement}: {reason} Tried: {' '.join(command)}")


def _link(package: Path, target: Path) -> None:
    """Make what a wheel holds importable from `target`."""
    for source in package.iterdir():
        link = target / source.name
        if source.suffix != ".dist-info" and not link.exists():
            with contextlib.suppress(FileExistsError):  # another process was faster
                link.symlink_to(os.path.relpath(source, target), source.is_dir())
