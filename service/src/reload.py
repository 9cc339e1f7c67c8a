"""SIGHUP: the files of credentials are read again, while all calls go on."""

import signal
from collections.abc import Sequence

import anyio
import structlog
from anyio.abc import TaskStatus

from pykv.errors import ConfigError
from pykv.service.access import CacheShares, Gate, Tenant, read_tenants
from pykv.service.files import shortened
from pykv.service.options import ServeOptions
from pykv.service.threads import run_in_daemon_thread
from pykv.service.tls import ServerTls
from pykv.service.transport import CallServer

__all__ = ["RELOAD_THREAD", "Credentials"]

RELOAD_THREAD = "pykv-reload"
READ_SECONDS = 10.0
MOST_CHARACTERS = 500

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
        tenants, self.tls = self._read()
        self.gate = Gate(tenants or ())
        self.shares = CacheShares(tenants or (), options.tenant_cache_share)

    async def watch(
        self, server: CallServer, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED
    ) -> None:
        """Reads the files again at each SIGHUP, for new connections and new calls; runs until it is cancelled."""
        with anyio.open_signal_receiver(signal.SIGHUP) as signals:
            task_status.started()
            async for _ in signals:
                await self.reload(server)

    async def reload(self, server: CallServer) -> None:
        """Reads the files again; where one is not as it must be, all stays as it was and the log says so.

        They are read on a thread: a mount that hangs holds nobody up, and is given up after READ_SECONDS. No error
        gets out of here, since it would end the daemon.
        """
        try:
            with anyio.fail_after(READ_SECONDS):
                tenants, tls = await run_in_daemon_thread(self._read, RELOAD_THREAD)
            if tls is not None:
                server.renew(tls.context)
                if self._are_distrusted(tls):
                    server.send_certified_clients_away()
                self.tls = tls
            if tenants is not None:
                self.gate.change(tenants)
                self.shares.change(tenants)
        except TimeoutError:
            log.error("reload refused", error=f"the files could not be read within {READ_SECONDS:g} s")
        except ConfigError as error:
            log.error("reload refused", error=shortened(str(error), MOST_CHARACTERS))
        except Exception as error:
            log.error("reload refused", error=shortened(repr(error), MOST_CHARACTERS), exc_info=True)
        else:
            log.info("reloaded", tenants=0 if tenants is None else len(tenants), tls=tls is not None)

    def certificate_end(self) -> float | None:
        """When the certificate in use ends, in seconds since 1970; None = there is none."""
        return None if self.tls is None else self.tls.expires_at

    def _are_distrusted(self, tls: ServerTls) -> bool:
        """Whether an authority of clients is gone: whose certificate it signed must show another one."""
        return self.tls is not None and not self.tls.client_authorities <= tls.client_authorities

    def _read(self) -> tuple[Sequence[Tenant] | None, ServerTls | None]:
        options = self._options
        tenants = None if options.tenants_path is None else read_tenants(options.tenants_path)
        return tenants, None if options.tls_files is None else options.tls_files.read()
