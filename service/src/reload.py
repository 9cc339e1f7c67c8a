"""SIGHUP: the files of credentials are read again, while all calls go on."""

import signal

import anyio
import structlog
from anyio.abc import TaskStatus

from pykv.errors import ConfigError
from pykv.service.access import CacheShares, Gate, read_tenants
from pykv.service.options import ServeOptions
from pykv.service.transport import CallServer

__all__ = ["Credentials"]

log = structlog.get_logger("pykv.service")


class Credentials:
    """The certificate and the tenants as the files say now.

    Args:
        options: name the files.

    Raises:
        ConfigError: a file is not as it must be.
    """

    def __init__(self, options: ServeOptions) -> None:
        self._options = options
        tenants = () if options.tenants_path is None else read_tenants(options.tenants_path)
        self.gate = Gate(tenants)
        self.shares = CacheShares(tenants, options.tenant_cache_share)
        self.tls = None if options.tls_files is None else options.tls_files.context()

    async def watch(
        self, server: CallServer, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED
    ) -> None:
        """Reads the files again at each SIGHUP, for new connections and new calls; runs until it is cancelled."""
        with anyio.open_signal_receiver(signal.SIGHUP) as signals:
            task_status.started()
            async for _ in signals:
                await self.reload(server)

    async def reload(self, server: CallServer) -> None:
        """Reads the files again; where one is not as it must be, all stays as it was and the log says so."""
        options = self._options
        try:
            tenants = None if options.tenants_path is None else read_tenants(options.tenants_path)
            tls = None if options.tls_files is None else options.tls_files.context()
        except ConfigError as error:
            log.error("reload refused", error=str(error))
            return
        if tenants is not None:
            self.gate.change(tenants)
            self.shares.change(tenants)
        if tls is not None:
            await server.renew(tls)
        log.info("reloaded", tenants=0 if tenants is None else len(tenants), tls=tls is not None)
