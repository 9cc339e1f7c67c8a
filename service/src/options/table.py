"""Every option of `pykv-serve`, with its default: command line, variables and file all read this table."""

import ipaddress
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any

from pykv.engine.config import (
    ADMISSIONS,
    ATTENTION_BACKENDS,
    DTYPES,
    EVICTIONS,
    MOST_PENDING_TOKENS,
    PREEMPTIONS,
    QUEUE_ORDERS,
    EngineConfig,
)
from pykv.errors import ConfigError
from pykv.kv_format import kv_format_names
from pykv.service.options.kinds import (
    FILE,
    FLAG,
    HOST,
    SCALES,
    SIZE,
    SPACE,
    TEXT,
    URL,
    ZMQ_ADDRESS,
    Kind,
    choice,
    integer,
    of_scheduler,
    rate,
    seconds,
    share,
)
from pykv.service.tls import TlsFiles

__all__ = ["ALTERNATIVES", "ServeOptions", "group_of", "help_of", "kind_of"]

MODEL, CACHE, SCHEDULER = "model", "cache", "scheduler"
NETWORK, SECURITY, OPERATION = "network", "security", "operation"

ALTERNATIVES = (frozenset({"num_blocks", "kv_memory"}),)
"""Options of which one source gives one: a source that gives it overrules the other in weaker sources."""

DEFAULT_KV_EVENTS = 2**16

ENGINE_NAMES = {"kv_memory": "kv_memory_bytes", "swap_space": "swap_space_bytes"}


def _option(default: Any, kind: Kind, group: str, text: str) -> Any:
    return field(default=default, metadata={"kind": kind, "group": group, "help": text})


def _engine(name: str, kind: Kind, group: str, text: str) -> Any:
    """An option of the engine, whose default is the engine's."""
    default = next(entry.default for entry in fields(EngineConfig) if entry.name == name)
    return _option(default, kind, group, text)


def _count(name: str, group: str, text: str) -> Any:
    """An option of the engine that its scheduler takes as it is, and whose range it knows."""
    return _engine(name, of_scheduler(name), group, text)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """What the daemon serves, and how.

    Raises:
        ConfigError: the host is beyond loopback without TLS and without `insecure_bind`, or a part of TLS is missing.
    """

    model: str = _option("bundled", TEXT, MODEL, "bundled, a folder, a GGUF file, or OWNER/NAME of the hub")
    dtype: str = _engine("dtype", choice(*DTYPES), MODEL, "of the weights")
    device: str = _engine("device", TEXT, MODEL, "a torch device, or auto")
    attention_backend: str = _engine(
        "attention_backend", choice(*ATTENTION_BACKENDS), MODEL, "of the attention"
    )
    cuda_graphs: bool = _engine("cuda_graphs", FLAG, MODEL, "record the decodes on a GPU and replay them")
    block_size: int = _count("block_size", CACHE, "tokens a block")
    num_blocks: int | None = _count("num_blocks", CACHE, "blocks of the cache, instead of --kv-memory")
    kv_memory: int | None = _engine(
        "kv_memory_bytes",
        SIZE,
        CACHE,
        "size of the cache, such as 2GiB; if not set 1GiB, or what --gpu-memory-utilization leaves",
    )
    gpu_memory_utilization: float = _engine(
        "gpu_memory_utilization",
        share(above_low=True),
        CACHE,
        "share of a GPU that weights, steps and cache may take",
    )
    kv_dtype: str = _engine("kv_dtype", choice("auto", *kv_format_names()), CACHE, "of the cache")
    kv_scales: tuple[float, float] | None = _engine(
        "kv_scales", SCALES, CACHE, "scales of an 8-bit cache; one for each token and head if not set"
    )
    swap_space: int = _engine(
        "swap_space_bytes", SPACE, CACHE, "host memory for preempted sequences, such as 4GiB"
    )
    preemption: str = _engine(
        "preemption", choice(*PREEMPTIONS), CACHE, "how a preempted sequence comes back"
    )
    enable_prefix_caching: bool = _engine(
        "enable_prefix_caching", FLAG, CACHE, "keep blocks for prompts that begin alike"
    )
    partial_block_reuse: int = _count(
        "partial_block_reuse",
        CACHE,
        "fewest tokens of a cached block, below its size, that are reused by copying it; 0 = whole blocks",
    )
    watermark: float = _engine(
        "watermark", share(below_high=True), CACHE, "share of the blocks that an admission leaves free"
    )
    admission: str = _engine("admission", choice(*ADMISSIONS), CACHE, "when a waiting request starts")
    eviction: str = _engine(
        "eviction",
        choice(*EVICTIONS),
        CACHE,
        "which cached blocks make room first; segmented_lru: those that no hit has found yet",
    )
    tenant_cache_share: float = _engine(
        "tenant_cache_share",
        share(),
        CACHE,
        "share of the cache that a tenant's idle blocks may fill before they make room first",
    )
    max_model_len: int | None = _count(
        "max_model_len", SCHEDULER, "tokens a sequence; the model's if not set"
    )
    max_num_seqs: int = _count("max_num_seqs", SCHEDULER, "sequences that run at once")
    max_num_batched_tokens: int = _count("max_num_batched_tokens", SCHEDULER, "tokens a step")
    max_chunk_tokens: int | None = _count(
        "max_chunk_tokens", SCHEDULER, "tokens of one sequence a step; no cap if not set"
    )
    max_queued_requests: int = _count("max_queued_requests", SCHEDULER, "samples that wait; more are refused")
    max_queued_tokens: int | None = _count(
        "max_queued_tokens", SCHEDULER, "prompt tokens that wait; no limit if not set"
    )
    queue_order: str = _option(
        "fair_share",
        choice(*QUEUE_ORDERS),
        SCHEDULER,
        "who of those that wait is next; fair_share: each tenant in turn, by tokens",
    )
    host: str = _option("127.0.0.1", HOST, NETWORK, "address to listen on")
    port: int = _option(50051, integer(0, 65535), NETWORK, "port to listen on; 0 takes a free one")
    insecure_bind: bool = _option(False, FLAG, NETWORK, "allow plain text on addresses beyond loopback")
    tls_cert: str | None = _option(None, FILE, SECURITY, "PEM file of the daemon's certificate chain")
    tls_key: str | None = _option(None, FILE, SECURITY, "PEM file of its key")
    tls_client_ca: str | None = _option(
        None, FILE, SECURITY, "PEM file of authorities: clients must show a certificate of theirs"
    )
    tls_client_auth: str = _option(
        "required",
        choice("required", "optional"),
        SECURITY,
        "whether clients without a certificate may connect",
    )
    tenants: str | None = _option(
        None, FILE, SECURITY, "TOML file of tenants, their credentials and limits; everybody if not set"
    )
    max_connections: int = _option(
        4096,
        integer(1, 10**6),
        NETWORK,
        "connections at once; more are refused, and open files bound them too",
    )
    max_connections_per_peer: int = _option(
        1024,
        integer(1, 10**6),
        NETWORK,
        "of one IPv4 address or one /64 network of IPv6; a proxy is one peer",
    )
    connections_per_second: float = _option(
        200.0, rate(0.1, 1e6), NETWORK, "that one peer may make in the long run, once it has made its most"
    )
    request_timeout: float = _option(
        30.0,
        seconds(0.1, 60),
        NETWORK,
        "how long a client may take to send one frame, or the request of a call",
    )
    control_frames_burst: int = _option(
        1000,
        integer(10, 10**6),
        NETWORK,
        "resets, SETTINGS, PING and the like at once; then the connection is closed",
    )
    control_frames_per_second: float = _option(
        200.0, rate(1, 1e6), NETWORK, "the same in the long run; small DATA and WINDOW_UPDATE count a tenth"
    )
    keepalive_time: float = _option(
        30.0,
        seconds(0.1, 86400),
        NETWORK,
        "after so long without a byte from a client it is asked, by a PING, whether it is there",
    )
    keepalive_timeout: float = _option(
        20.0, seconds(0.1, 3600), NETWORK, "how long it may take to answer; then its connection is closed"
    )
    keepalive_permit_without_calls: bool = _option(
        True, FLAG, NETWORK, "ask clients without calls too, and let them ask as often as others"
    )
    min_recv_ping_interval_without_data: float = _option(
        5.0, seconds(0, 86400), NETWORK, "between two PINGs of a client to which nothing was sent meanwhile"
    )
    max_ping_strikes: int = _option(
        2,
        integer(0, 10**6),
        NETWORK,
        "PINGs that may come sooner; then the connection is closed; 0: any number",
    )
    max_streams: int = _option(4096, integer(1, 2**31 - 1), NETWORK, "calls at once on one connection")
    max_message_size: int = _option(16 * 2**20, SIZE, NETWORK, "size of a request; larger ones are refused")
    request_memory: int = _option(
        256 * 2**20, SIZE, NETWORK, "memory of requests that are still coming in; more of them wait"
    )
    max_pending_tokens: int = _option(
        2**10,
        integer(1, MOST_PENDING_TOKENS),
        NETWORK,
        "tokens that may wait for one slow client; then its request is paused",
    )
    stall_timeout: float = _option(
        30.0,
        seconds(0.1, 3600),
        NETWORK,
        "how long a client may leave its stream unread; then its request is ended",
    )
    metrics_port: int | None = _option(
        None, integer(0, 65535), OPERATION, "port for Prometheus; none if not set, 0 takes a free one"
    )
    metrics_host: str = _option(
        "127.0.0.1", HOST, OPERATION, "address that Prometheus reaches, in plain text"
    )
    metrics_aliases: str = _option(
        "none", choice("none", "vllm"), OPERATION, "vllm: give vLLM's metrics under its names too"
    )
    max_kv_events: int = _count(
        "max_kv_events",
        OPERATION,
        f"events about cached blocks that wait for subscribers; 0: none are kept, or {DEFAULT_KV_EVENTS} with "
        "--kv-events-zmq",
    )
    kv_events_zmq: str | None = _option(
        None, ZMQ_ADDRESS, OPERATION, "publish these events as vLLM does, such as tcp://127.0.0.1:5557"
    )
    kv_events_zmq_replay: str | None = _option(
        None, ZMQ_ADDRESS, OPERATION, "answer here who missed some of them"
    )
    otlp_endpoint: str | None = _option(
        None, URL, OPERATION, "send OpenTelemetry traces here, such as http://127.0.0.1:4318; none if not set"
    )
    progress_timeout: float = _option(
        120.0, seconds(0.1, 86400), OPERATION, "without progress the engine is not ready"
    )
    drain_timeout: float = _option(
        30.0, seconds(0, 86400), OPERATION, "how long calls may go on after SIGTERM"
    )
    ready_file: str | None = _option(
        None, FILE, OPERATION, "file that gets HOST:PORT once requests are served"
    )
    log_level: str = _option(
        "info", choice("debug", "info", "warning", "error"), OPERATION, "least level that is logged"
    )
    log_format: str = _option(
        "auto", choice("auto", "console", "json"), OPERATION, "auto: console on a terminal, else json"
    )

    def __post_init__(self) -> None:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError(
                "tls_cert and tls_key go together, but one of them is missing: allowed is both or none"
            )
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ConfigError("tls_client_ca is given without tls_cert and tls_key: allowed is with both")
        if self.tls_client_auth == "optional" and self.tls_client_ca is None:
            raise ConfigError(
                "tls_client_auth is 'optional' without tls_client_ca: "
                "allowed is with the authorities by which clients' certificates are checked"
            )
        if self.tls_cert is None and not self.insecure_bind and not _is_loopback(self.host):
            raise ConfigError(
                f"host is {self.host!r}, where others could read the plain text: "
                "allowed is a loopback address, or any with --tls-cert and --tls-key, or with --insecure-bind"
            )

        if self.kv_events_zmq_replay is not None and self.kv_events_zmq is None:
            raise ConfigError("kv_events_zmq_replay is given without kv_events_zmq: allowed is with it")
        for name in ("kv_events_zmq", "kv_events_zmq_replay"):
            self._check_zmq(name, getattr(self, name))
        if self.kv_events_zmq is not None and not self.max_kv_events:
            object.__setattr__(self, "max_kv_events", DEFAULT_KV_EVENTS)

    def _check_zmq(self, name: str, address: str | None) -> None:
        """Events hold the tokens of prompts and go in plain text."""
        if address is None or address.startswith("ipc://") or self.insecure_bind:
            return
        host = address.removeprefix("tcp://").rpartition(":")[0]
        if not _is_loopback(host.removeprefix("[").removesuffix("]")):
            raise ConfigError(
                f"{name} is {address!r}, where others could read the tokens of prompts: "
                "allowed is ipc://, a loopback address, or any with --insecure-bind"
            )

    def engine_config(self) -> EngineConfig:
        """The engine's part of the options.

        Raises:
            ConfigError: they do not fit together.
        """
        known = {entry.name for entry in fields(EngineConfig)}
        values = {
            ENGINE_NAMES.get(entry.name, entry.name): getattr(self, entry.name) for entry in fields(self)
        }
        return EngineConfig(**{name: value for name, value in values.items() if name in known})

    @property
    def keeps_kv_events(self) -> bool:
        """Whether the engine keeps events about cached blocks."""
        return self.max_kv_events > 0

    @property
    def tls_files(self) -> TlsFiles | None:
        """The files of TLS; None = plain text."""
        if self.tls_cert is None or self.tls_key is None:
            return None
        authorities = None if self.tls_client_ca is None else Path(self.tls_client_ca)
        is_required = self.tls_client_auth == "required"
        return TlsFiles(Path(self.tls_cert), Path(self.tls_key), authorities, is_required)

    @property
    def tenants_path(self) -> Path | None:
        """The file of tenants; None = everybody may call."""
        return None if self.tenants is None else Path(self.tenants)

    @property
    def ready_path(self) -> Path | None:
        """The file to write once requests are served."""
        return None if self.ready_file is None else Path(self.ready_file)


def kind_of(entry: Field[Any]) -> Kind:
    """How an option's value is read."""
    kind: Kind = entry.metadata["kind"]
    return kind


def group_of(entry: Field[Any]) -> str:
    """Under which heading the help shows an option."""
    return str(entry.metadata["group"])


def help_of(entry: Field[Any]) -> str:
    """An option's line in the help."""
    default = "" if entry.default is None else f" (default: {_shown_default(entry)})"
    allowed = f"; {kind_of(entry).allowed}" if kind_of(entry).is_range else ""
    return f"{entry.metadata['help']}{allowed}{default}"


def _shown_default(entry: Field[Any]) -> str:
    kind = kind_of(entry)
    value: Any = entry.default
    if kind is FLAG:
        return "on" if value else "off"
    if kind in (SIZE, SPACE) and value and value % 2**20 == 0:
        return f"{value // 2**20}MiB"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
