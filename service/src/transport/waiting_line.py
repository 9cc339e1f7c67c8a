"""Who waits for something, and whose turn it is."""

from collections import OrderedDict
from typing import Generic, Protocol, TypeVar

from pykv.service.transport.shared_budget import Sharer

__all__ = ["WaitingLine"]


class Waiter(Protocol):
    """What waits, of one connection."""

    @property
    def sharer(self) -> Sharer:
        """The connection."""


WaiterT = TypeVar("WaiterT", bound=Waiter)
Waiters = OrderedDict[WaiterT, None]
Connections = OrderedDict[Sharer, Waiters[WaiterT]]


class WaitingLine(Generic[WaiterT]):
    """Peers have turns, the connections of each have turns, and of one connection who came first is next.

    However many wait of one of them, the others wait for one of these only. What it does takes the same time however
    many wait.
    """

    def __init__(self) -> None:
        self._peers: OrderedDict[str, Connections[WaiterT]] = OrderedDict()
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def add(self, waiter: WaiterT) -> None:
        """Lets one more wait."""
        connections = self._peers.setdefault(waiter.sharer.peer, OrderedDict())
        connections.setdefault(waiter.sharer, OrderedDict())[waiter] = None
        self._length += 1

    def first(self) -> WaiterT:
        """Whose turn it is; somebody must wait."""
        connections = next(iter(self._peers.values()))
        return next(iter(next(iter(connections.values()))))

    def take_first(self) -> WaiterT:
        """The same, who waits no longer; its connection and its peer have their next turns after all others."""
        waiter = self.first()
        self.discard(waiter)
        connections = self._peers.get(waiter.sharer.peer)
        if connections is not None:
            self._peers.move_to_end(waiter.sharer.peer)
            if waiter.sharer in connections:
                connections.move_to_end(waiter.sharer)
        return waiter

    def discard(self, waiter: WaiterT) -> None:
        """Lets it wait no longer, if it does."""
        connections: Connections[WaiterT] = self._peers.get(waiter.sharer.peer, OrderedDict())
        waiters: Waiters[WaiterT] = connections.get(waiter.sharer, OrderedDict())
        if waiter not in waiters:
            return
        del waiters[waiter]
        self._length -= 1
        if not waiters:
            del connections[waiter.sharer]
        if not connections:
            del self._peers[waiter.sharer.peer]
