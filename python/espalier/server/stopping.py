# SPDX-License-Identifier: Apache-2.0
"""How a server stops in order: what has begun is done, and the rest is kept for the next start."""

import asyncio
from typing import TYPE_CHECKING

from ..commands.console import say
from . import restart
from .futures import Failure

if TYPE_CHECKING:
    from .service import Service

STOP_SECONDS = 3.0  # for what fails as the server stops, such as samples, to end


async def stop(service: "Service", seconds: float | None, *, keeps: bool) -> None:
    """As Service.stop."""
    futures = service.futures
    if futures.is_closed:
        return
    futures.close()
    stopping = asyncio.ensure_future(_stop_work(service))
    unsure: set[str] = set()
    if not (await asyncio.wait({stopping}, timeout=seconds))[0]:
        why = f"the server stops, and this request was not done within {seconds:g} s; send it again once the server is back"
        waiting = {each.future.request_id for model in service.models() for each in model.waiting.values()} if keeps else set()
        unsure = {request_id.rpartition(":")[0] for request_id in futures.fail_pending(Failure(why), waiting)}
        service.cancel("")  # of all that nobody waits for any more, samplers let go
        await asyncio.wait({stopping}, timeout=STOP_SECONDS)
    if keeps and stopping.done():
        await restart.keep(service.services, unsure)
    elif keeps and any(each.sessions for each in service.services):
        say("espalier serve: kept nothing for the next start: what runs could not be ended")
    futures.release()


async def _stop_work(service: "Service") -> None:
    """After what has begun, and what is being made."""
    workers = service.workers()
    for worker in workers:
        worker.is_stopped = True
    if service.beside:
        await asyncio.wait(service.beside)
    await asyncio.gather(*(worker.stop() for worker in {*workers, *service.workers()}))
