"""grpclib's server with what it lacks: bounds, drain, and windows and memory that come back.

The classes reach into private parts of grpclib 0.4.9: its version is pinned, and tests check each part.
"""

from pykv.service.transport.handshake import HandshakeFailure
from pykv.service.transport.limits import MethodLimits, TransportLimits
from pykv.service.transport.offence import Offence
from pykv.service.transport.server import CallServer

__all__ = ["CallServer", "HandshakeFailure", "MethodLimits", "Offence", "TransportLimits"]
