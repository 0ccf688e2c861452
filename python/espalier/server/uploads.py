# SPDX-License-Identifier: Apache-2.0
"""Adapters that clients bring: files of PEFT, which become a checkpoint once the engine has read them.

A client asks for an upload, sends each file to its URL, and finishes the upload. The URLs need no key, as those of the hosted
service: whoever has one may send that file until the upload expires.
"""

import asyncio
import json
import secrets
import shutil
import time
from collections.abc import AsyncIterable, AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import safetensors
from starlette.types import Scope

from ..errors import InputError
from . import requests
from .access import UPLOADS_PATH
from .base import Base, linear_groups
from .errors import Refused
from .store import CheckpointPath, Store
from .worker import LoraSettings

FILES = {"adapter_config.json": 1 << 20, "adapter_model.safetensors": 4 << 30}  # bytes at most
MAX_UPLOADS = 64         # that are not finished
UPLOAD_BYTES = 16 << 30  # of their files
UPLOAD_SECONDS = 1800.0
WRITE_BYTES = 1 << 20  # of a file that comes, at a time


@dataclass
class _Upload:
    """One adapter that is on its way."""

    upload_id: str
    base: Base
    lora: LoraSettings
    folder: Path
    expires: float = field(default_factory=lambda: time.time() + UPLOAD_SECONDS)
    coming: set[str] = field(default_factory=set)  # files
    sizes: dict[str, int] = field(default_factory=dict)  # of files, also of those that are coming
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    tinker_path: str | None = None  # once it is a checkpoint


class Uploads:
    """All uploads of a server. Used on the thread of the event loop."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._uploads: dict[str, _Upload] = {}

    def start(self, base: Base, request: requests.StartUpload) -> tuple[str, float]:
        """Returns the id of a new upload, and when it expires, in seconds since 1970. Raises Refused."""
        self._expire()
        if sum(upload.tinker_path is None for upload in self._uploads.values()) >= MAX_UPLOADS:
            raise Refused(f"expected at most {MAX_UPLOADS} uploads at a time, received one more", 429)
        lora = request.lora_config
        if lora.rank == 0:
            raise Refused("lora_config: expected a rank of at least 1: whole weights are not uploaded")
        settings = LoraSettings(lora.rank, lora.seed or 0, lora.train_mlp, lora.train_attn, lora.train_unembed)
        upload = _Upload(secrets.token_urlsafe(32), base, settings, self._store.parked())
        upload.folder.mkdir()
        self._uploads[upload.upload_id] = upload
        return upload.upload_id, upload.expires

    def _upload(self, upload_id: str) -> _Upload:
        self._expire()
        if upload_id not in self._uploads:
            raise Refused("upload_id: expected one of external_weights_upload_start; it may have expired", 404)
        return self._uploads[upload_id]

    def has_secret(self, scope: Scope) -> bool:
        """Whether a request sends a file to the URL of an upload, whose id is a secret."""
        upload_id, _, name = scope["path"].removeprefix(UPLOADS_PATH).partition("/")
        return scope["method"] == "PUT" and scope["path"].startswith(UPLOADS_PATH) and upload_id in self._uploads and bool(name)

    async def write(self, upload_id: str, name: str, parts: AsyncIterable[bytes]) -> None:
        """Writes one file, in place of what came before. Raises Refused where it is too long, or unknown."""
        upload = self._upload(upload_id)
        if name not in FILES:
            raise Refused(f"file: expected one of {', '.join(FILES)}, received {name[:100]!r}; a pickle can run programs and is "
                          "never read", 404)  # fmt: skip
        if upload.tinker_path is not None or upload.lock.locked() or name in upload.coming:
            raise Refused(f"{name}: the upload is finished, or the file is being sent; start another upload", 409)
        upload.coming.add(name)
        part = upload.folder / f"{name}.part"
        try:
            with part.open("wb") as file:
                async for data in _pieces(parts):
                    upload.sizes[name] = file.tell() + len(data)
                    self._check_size(upload, name)
                    await asyncio.to_thread(file.write, data)
            part.rename(upload.folder / name)
        except BaseException:
            upload.sizes.pop(name, None)
            (upload.folder / name).unlink(missing_ok=True)
            raise
        finally:
            part.unlink(missing_ok=True)
            upload.coming.discard(name)

    def _check_size(self, upload: _Upload, name: str) -> None:
        if upload.sizes[name] > FILES[name]:
            raise Refused(f"{name}: expected at most {FILES[name]} bytes, received more", 413)
        if sum(sum(each.sizes.values()) for each in self._uploads.values()) > UPLOAD_BYTES:
            raise Refused(f"expected at most {UPLOAD_BYTES} bytes of uploads that are not finished, received more", 429)

    async def finish(self, upload_id: str) -> str:
        """Makes the checkpoint. Returns its path. Raises Refused or InputError where the files are no adapter of the base; then
        they can be sent again."""
        upload = self._upload(upload_id)
        async with upload.lock:
            missing = [name for name in FILES if name in upload.coming or not (upload.folder / name).is_file()]
            if upload.tinker_path is None and missing:
                raise Refused(f"upload_id: {missing[0]} has not come; send it to its URL, then finish again", 409)
            if upload.tinker_path is None:
                upload.tinker_path = await upload.base.do(lambda: _checkpoint(self._store, upload))
                upload.sizes.clear()
                await asyncio.to_thread(shutil.rmtree, upload.folder, ignore_errors=True)
            return upload.tinker_path

    def _expire(self) -> None:
        for upload in list(self._uploads.values()):
            if upload.expires <= time.time() and not upload.lock.locked() and not upload.coming:
                del self._uploads[upload.upload_id]
                shutil.rmtree(upload.folder, ignore_errors=True)


async def _pieces(parts: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
    """The parts of a file in pieces that are worth a write."""
    waiting = bytearray()
    async for part in parts:
        waiting += part
        if len(waiting) >= WRITE_BYTES:
            yield bytes(waiting)
            waiting.clear()
    yield bytes(waiting)


def _checkpoint(store: Store, upload: _Upload) -> str:
    """Reads the adapter as any other and writes it as a checkpoint. On the thread of the base."""
    engine = upload.base.engine
    try:
        adapter = engine.new_adapter(adapter=upload.folder)
    except InputError as error:
        raise Refused(str(error).replace(f"{upload.folder}/", "").replace(str(upload.folder), "the upload")) from None
    _check_settings(upload)
    path = CheckpointPath(f"upload-{secrets.token_hex(8)}:train:0", "external_weights", "uploaded")
    try:
        engine.use(adapter)
        store.add_run(path.run, {"base_model": upload.base.name, "lora": vars(upload.lora), "user_metadata": None})
        try:
            with store.writing(path) as folder:
                engine.save(folder)
        except BaseException:
            store.remove_run(path.run)
            raise
    finally:
        engine.use(None)
    return str(path)


def _check_settings(upload: _Upload) -> None:
    """Raises Refused where the adapter is not as the client says."""
    rank = json.loads((upload.folder / "adapter_config.json").read_text(encoding="utf-8")).get("r", 8)  # PEFT's default
    if rank != upload.lora.rank:
        raise Refused(f"lora_config: expected rank {rank}, that of adapter_config.json, received {upload.lora.rank}")
    with safetensors.safe_open(upload.folder / "adapter_model.safetensors", "numpy") as file:
        paths = {key.rpartition(".lora_")[0] for key in file.keys() if ".lora_" in key}  # noqa: SIM118
    present = linear_groups(sorted(paths))
    for group, names in upload.base.groups.items():
        flag = getattr(upload.lora, f"train_{group}")
        if names and flag != bool(present[group]):
            raise Refused(f"lora_config: expected train_{group}={bool(present[group])}, as the adapter has "
                          f"{', '.join(present[group]) or 'none'} there, received {flag}")  # fmt: skip
