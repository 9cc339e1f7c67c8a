"""What the engine does on a GPU beyond the model: streams, graphs, host arrays that are read late, the pool's size.

`interface` says what it needs of a device; `host` gives that on a CPU, where everything is done at once, and `cuda` on
a GPU. The rest is written against the interface, so that tests run it on devices that delay and reorder what they may.
"""
