"""Who is connected: how many connections there are, how many are one peer's, and how fast it makes them."""

import ipaddress
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pykv.service.transport.handshake import HandshakeFailure
from pykv.service.transport.limits import TransportLimits
from pykv.service.transport.offence import Offence

__all__ = ["Peers", "peer_of"]

REMEMBERED_PEERS = 4096
IPV6_SITE_BITS = 64


@dataclass(slots=True)
class Peer:
    """One peer's connections, and its allowance of further ones, which fills with time."""

    allowance: float
    filled_at: float
    num_open: int = 0


class Peers:
    """Admits connections within the limits."""

    def __init__(self, limits: TransportLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits
        self._clock = clock
        self._peers: OrderedDict[str, Peer] = OrderedDict()
        self._num_open = 0
        self._refused: Counter[str] = Counter()
        self._closed: Counter[Offence] = Counter()
        self._failed: Counter[HandshakeFailure] = Counter()

    @property
    def num_open(self) -> int:
        """Connections that were admitted and have not left."""
        return self._num_open

    @property
    def num_refused(self) -> Mapping[str, int]:
        """Connections that were refused, by the name of the limit."""
        return self._refused

    @property
    def num_closed(self) -> Mapping[Offence, int]:
        """Connections that were closed because of what their clients did."""
        return self._closed

    @property
    def num_failed(self) -> Mapping[HandshakeFailure, int]:
        """Connections that were admitted and whose TLS did not begin."""
        return self._failed

    def count_failed(self, failure: HandshakeFailure) -> None:
        """Counts one of those; it is open until it leaves."""
        self._failed[failure] += 1

    def count_closed(self, offence: Offence) -> None:
        """Counts one of those; it is open until it leaves."""
        self._closed[offence] += 1

    def admit(self, name: str) -> str | None:
        """Counts a new connection of a peer; where a limit forbids it, nothing but the limit's name is counted.

        Returns:
            The name of the limit; None = it is admitted, and is counted until `leave`.
        """
        peer = self._peer(name)
        limit = self._forbidden_by(peer)
        if limit is not None:
            self._refused[limit] += 1
            return limit
        peer.allowance -= 1.0
        peer.num_open += 1
        self._num_open += 1
        return None

    def leave(self, name: str) -> None:
        """An admitted connection has ended."""
        self._peers[name].num_open -= 1
        self._num_open -= 1

    def _forbidden_by(self, peer: Peer) -> str | None:
        if self._num_open >= self._limits.max_connections:
            return "max_connections"
        if peer.num_open >= self._limits.max_connections_per_peer:
            return "max_connections_per_peer"
        return None if peer.allowance >= 1.0 else "connections_per_second"

    def _peer(self, name: str) -> Peer:
        """A peer with its allowance as it is now; it may make all its connections at once."""
        now, most = self._clock(), float(self._limits.max_connections_per_peer)
        peer = self._peers.setdefault(name, Peer(most, now))
        gained = (now - peer.filled_at) * self._limits.connections_per_second
        peer.allowance, peer.filled_at = min(peer.allowance + gained, most), now
        self._peers.move_to_end(name)
        self._forget()
        return peer

    def _forget(self) -> None:
        """Bounds what is remembered of peers that have left, the longest gone first."""
        if len(self._peers) > REMEMBERED_PEERS + self._num_open:
            gone = next(name for name, peer in self._peers.items() if not peer.num_open)
            del self._peers[gone]


def peer_of(address: object) -> str:
    """Who stands behind a socket's address: one IPv4 address, or one network of 64 bits of IPv6; "" = not known."""
    host = address[0] if isinstance(address, tuple) and address else ""
    try:
        ip = ipaddress.ip_address(str(host).partition("%")[0])
    except ValueError:
        return ""
    if isinstance(ip, ipaddress.IPv4Address):
        return str(ip)
    if ip.ipv4_mapped is not None:
        return str(ip.ipv4_mapped)
    return str(ipaddress.ip_network((int(ip), IPV6_SITE_BITS), strict=False))
