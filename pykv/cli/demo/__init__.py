"""The demo: four chats at once with the bundled model, over gRPC; run it with `python -m pykv.cli.demo`."""
