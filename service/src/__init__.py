"""The daemon: one engine's tokens, streamed over gRPC."""
