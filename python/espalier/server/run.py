# SPDX-License-Identifier: Apache-2.0
"""Runs the server until a signal ends it."""

import argparse
import os
from typing import Any

import uvicorn

from ..commands.console import say
from ..errors import InputError
from .app import App
from .base import Base
from .service import Service
from .store import Store


class _Server(uvicorn.Server):
    """Says where it listens once it does."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        if self.started:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            say(f"espalier serve: {', '.join(self._service.bases)} on http://{host}:{port}")

    async def shutdown(self, sockets: Any = None) -> None:
        await self._service.stop()  # while clients still wait for the results of what runs
        await super().shutdown(sockets)


def _engine_options(arguments: argparse.Namespace) -> dict[str, Any]:
    device = arguments.device
    if device == "auto":
        import torch

        device = "cuda" if torch.cuda.is_available() else "cpu"
    given = {"dtype": arguments.dtype, "device": device, "memory_budget": arguments.memory_budget,
             "token_budget": arguments.token_budget, "threads": arguments.threads,
             "strategy": arguments.strategy, "prefix_cache": arguments.prefix_cache}  # fmt: skip
    return {name: value for name, value in given.items() if value is not None}


def serve(arguments: argparse.Namespace) -> None:
    """Raises InputError. arguments: of parse_arguments."""
    os.umask(0o077)  # checkpoints are for the user of the server alone
    store = Store(arguments.state)
    try:
        bases = {name: Base(name, folder, _engine_options(arguments), store, arguments.max_adapters,
                            joins_clients=arguments.join_clients)
                 for name, folder in arguments.model.items()}  # fmt: skip
        service = Service(bases, store, arguments.full_models)
        app = App(service, arguments.api_key).starlette()
        config = uvicorn.Config(app, host=arguments.host, port=arguments.port, log_level="warning", timeout_graceful_shutdown=5)
        server = _Server(config, service)
        server.run()
    finally:
        store.close()
    if not server.started:
        raise InputError(f"--port: expected a free port of {arguments.host}, received {arguments.port}, which cannot be used")
