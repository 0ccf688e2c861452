# SPDX-License-Identifier: Apache-2.0
"""Files of the state folder: for its owner alone, durable once a function has returned, and never reached over a link."""

import contextlib
import errno
import json
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

from .errors import Refused

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_HARD_LINKS = (errno.EPERM, errno.EXDEV, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EACCES)
_RECORD_BYTES = 64 << 20  # of a JSON file


@contextlib.contextmanager
def naming_full_disk(subject: object) -> Iterator[None]:
    """Raises Refused (507) in place of the OSError of a full disk. subject: what could not be written."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            reason = os.strerror(error.errno or 0)
            raise Refused(f"{subject}: the disk of --state is full ({reason}); nothing was changed: make room, then try again",
                          507) from error  # fmt: skip
        raise


def sync(path: Path) -> None:
    """Makes a file, or the names in a folder, durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems cannot sync a folder.
        if error.errno != errno.EINVAL or not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise
    finally:
        os.close(descriptor)


def make_folder(path: Path) -> None:
    """Makes a folder and its parents where they are missing."""
    if is_folder(path):
        return
    if path.parent != path:
        make_folder(path.parent)
    with contextlib.suppress(FileExistsError):  # another thread was faster
        path.mkdir(mode=0o700)
    if not is_folder(path):
        raise NotADirectoryError(errno.ENOTDIR, "expected a folder, received a file or a link", str(path))
    with contextlib.suppress(PermissionError):  # a folder above --state that cannot be opened
        sync(path.parent)


def is_folder(path: Path) -> bool:
    """Whether there is a folder, not a link to one."""
    try:
        return stat.S_ISDIR(path.lstat().st_mode)
    except OSError:
        return False


def write_json(path: Path, value: object) -> None:
    """Gives a file new content. Whatever happens, it has the old one or the new one."""
    new = path.with_name(f"{path.name}.new")
    try:
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with open(descriptor, "w", encoding="utf-8") as file:
            json.dump(value, file)
            file.flush()
            os.fsync(file.fileno())
        new.rename(path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise
    sync(path.parent)


def read_record(path: Path, limit: int = _RECORD_BYTES) -> bytes:
    """The content of a file, by default of JSON. Raises OSError where it is no plain file, or too large."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode) or about.st_size > limit:
            raise OSError(errno.EINVAL, f"expected a file of at most {limit} bytes", str(path))
        return file.read(limit)


def entries(folder: Path) -> list[os.DirEntry[str]]:
    """What is in a folder, sorted; nothing where there is no folder, or a link."""
    if not is_folder(folder):
        return []
    with os.scandir(folder) as found:
        return sorted(found, key=lambda entry: entry.name)


def plain_files(folder: Path) -> dict[str, Path]:
    """All files below a folder, by their paths from there. Raises Refused (422) where there is a link, or anything but files and
    folders."""
    found = {}
    for entry in entries(folder):
        path = folder / entry.name
        if entry.is_dir(follow_symlinks=False):
            found.update({f"{entry.name}/{name}": file for name, file in plain_files(path).items()})
        elif entry.is_file(follow_symlinks=False):
            found[entry.name] = path
        else:
            raise Refused(f"the checkpoint is damaged: {entry.name} is a link or a device, which is not followed", 422)
    return found


def sync_tree(folder: Path) -> int:
    """Makes durable all that is below a folder. Returns the bytes of its files."""
    files = plain_files(folder)
    for file in files.values():
        sync(file)
    for parent in {parent for file in files.values() for parent in file.parents if parent.is_relative_to(folder)} | {folder}:
        sync(parent)
    return sum(file.stat().st_size for file in files.values())


def link_tree(source: Path, target: Path) -> None:
    """Gives the files below `source` second names below `target`, which keep their content whatever happens to the first. They
    are copies where the file system has no second names."""
    _each_file(source, target, _link)


def copy_tree(source: Path, target: Path) -> None:
    """Copies the files below `source`."""
    _each_file(source, target, shutil.copyfile)


def _each_file(source: Path, target: Path, put: Callable[[Path, Path], object]) -> None:
    target.mkdir(mode=0o700)
    for name, file in plain_files(source).items():
        place = target / name
        if place.parent != target:
            place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        put(file, place)


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError as error:
        if error.errno not in _NO_HARD_LINKS:
            raise
        shutil.copyfile(source, target, follow_symlinks=False)


def remove_tree(folder: Path) -> None:
    """Removes a folder with all that is in it, as far as that is possible."""
    shutil.rmtree(folder, ignore_errors=True)
