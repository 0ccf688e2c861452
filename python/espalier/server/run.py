# SPDX-License-Identifier: Apache-2.0
"""Runs the server until a signal ends it."""

import argparse
import contextlib
import logging
import os
import socket
from collections.abc import Generator, Iterator, Mapping
from typing import Any

from ..commands.console import say
from . import restart
from .access import Access
from .app import App
from .base import Base
from .connections import BoundedServer, LogLimit, connection_limit
from .listening import url_of
from .service import Service
from .signals import EndOnSignals
from .store import Store

LAST_SECONDS = 10  # after --stop-seconds, to answer clients


class _Server(BoundedServer):
    """Says where it listens once it does."""

    def __init__(self, app: Access, service: Service, stop_seconds: float) -> None:
        super().__init__(app, connection_limit(), log_level="warning")
        self._service = service
        self._stop_seconds = stop_seconds

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started and sockets:
            say(f"espalier serve: {', '.join(self._service.bases)} on {url_of(sockets[0])}")

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await self._service.stop(self._stop_seconds, keeps=True)  # while clients still wait for the results of what runs
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """EndOnSignals has them."""
        yield


def _engine_options(arguments: argparse.Namespace) -> dict[str, Any]:
    device = arguments.device
    if device == "auto":
        import torch

        device = "cuda" if torch.cuda.is_available() else "cpu"
    given = {"dtype": arguments.dtype, "device": device, "memory_budget": arguments.memory_budget,
             "token_budget": arguments.token_budget, "threads": arguments.threads,
             "strategy": arguments.strategy, "prefix_cache": arguments.prefix_cache}  # fmt: skip
    return {name: value for name, value in given.items() if value is not None}


def _services(service: Service, keys: Mapping[str, str], stack: contextlib.ExitStack) -> Iterator[tuple[str, Service]]:
    """Those of all keys, with their keys; "": the one of all clients, where there are no keys. Raises InputError."""
    for name, key in (keys or {"": ""}).items():
        if not name:
            yield key, service
        else:
            store = Store(service.store.folder / "keys" / name)
            stack.callback(store.close)
            yield key, service.for_key(name, store)


def serve(arguments: argparse.Namespace, listener: socket.socket) -> None:
    """Raises InputError. arguments: of parse_arguments; listener: where clients connect."""
    os.umask(0o077)  # checkpoints are for the user of the server alone
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(contextlib.closing(Store(arguments.state)))
        bases = {name: Base(name, folder, _engine_options(arguments), store, arguments.max_adapters,
                            joins_clients=arguments.join_clients)
                 for name, folder in arguments.model.items()}  # fmt: skip
        service = Service(bases, store, arguments.full_models, arguments.result_seconds)
        hosts = [arguments.host, *arguments.allow_host]
        if arguments.host not in ("localhost", "127.0.0.1", "::1"):
            hosts.append(socket.gethostname())
        app = Access([App(each).door(key) for key, each in _services(service, arguments.api_keys, stack)], hosts)
        for each in service.services:
            restart.check(each)
        server = _Server(app, service, arguments.stop_seconds)
        for name in ("uvicorn.error", "asyncio"):
            logging.getLogger(name).addFilter(LogLimit())
        with EndOnSignals(server, arguments.stop_seconds + LAST_SECONDS):
            server.run([listener])
