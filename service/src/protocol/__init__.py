"""The messages of `pykv.v1`, generated from `service/proto/pykv/v1/engine.proto` by `make proto`."""
