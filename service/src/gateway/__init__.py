"""The protocol by which the gateway `smg` speaks to engines: behind it stands an HTTP API as OpenAI's.

Its messages come from the package smg-grpc-proto (extra `smg`); a second copy of them could not be loaded beside it.
"""

from pykv.service.gateway.service import GatewayService, gateway_descriptor

__all__ = ["GatewayService", "gateway_descriptor"]
