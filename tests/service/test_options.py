"""Options come from three sources; what is unknown or not allowed is refused by name."""

import os
import re
from dataclasses import fields
from functools import partial
from pathlib import Path

import pytest

from pykv.engine.config import EngineConfig
from pykv.errors import ConfigError
from pykv.scheduler_config import OPTION_RANGES
from pykv.service.options import ServeOptions, read_options
from pykv.service.options.sources import OTHER_VARIABLES

ROOT = Path(__file__).resolve().parents[2]


def read(arguments=(), environment=None, file=None, tmp_path=None):
    if file is not None:
        path = tmp_path / "pykv.toml"
        path.write_text(file)
        arguments = ["--config", str(path), *arguments]
    return read_options(list(arguments), environment or {}, "0")


def test_the_defaults_are_those_of_the_engine():
    options = read()
    assert options == ServeOptions()
    assert options.engine_config() == EngineConfig(
        queue_order="fair_share"
    )  # without tenants the same as fcfs
    assert (options.host, options.port, options.model) == ("127.0.0.1", 50051, "bundled")


def test_every_option_of_the_engine_is_an_option_of_the_daemon():
    names = {entry.name for entry in fields(ServeOptions)} | {"kv_memory_bytes", "swap_space_bytes"}
    without_a_method = {"max_pinned_blocks"}  # nothing of the protocol pins
    assert {entry.name for entry in fields(EngineConfig)} - without_a_method <= names


def test_the_policy_of_eviction_can_be_chosen():
    assert read(["--eviction", "segmented_lru"]).engine_config().eviction == "segmented_lru"


def test_the_command_line_wins_over_variables_and_they_over_the_file(tmp_path):
    file = "block_size = 1\nmax_num_seqs = 1\nport = 1"
    environment = {"PYKV_BLOCK_SIZE": "2", "PYKV_MAX_NUM_SEQS": "2"}
    options = read(["--block-size", "3"], environment, file, tmp_path)
    assert (options.block_size, options.max_num_seqs, options.port) == (3, 2, 1)


def test_the_file_can_be_named_by_a_variable(tmp_path):
    path = tmp_path / "pykv.toml"
    path.write_text("port = 7")
    assert read(environment={"PYKV_CONFIG": str(path)}).port == 7


def test_a_stronger_source_overrules_the_alternative_of_a_weaker_one(tmp_path):
    options = read(["--num-blocks", "9"], {"PYKV_KV_MEMORY": "1GiB"})
    assert (options.num_blocks, options.kv_memory) == (9, None)
    with pytest.raises(ConfigError, match="one of them"):
        read(["--num-blocks", "9", "--kv-memory", "1GiB"]).engine_config()


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("1048576", 2**20), ("2GiB", 2**31), ("1.5 gib", 3 * 2**29), ("500MB", 5 * 10**8), ("1kB", 1000)],
)
def test_sizes_have_units(text, num_bytes):
    options = read(["--kv-memory", text])
    assert options.kv_memory == num_bytes
    assert options.engine_config().kv_memory_bytes == num_bytes


def test_the_cache_has_a_format_and_a_swap_space(tmp_path):
    arguments = [
        "--kv-dtype",
        "int8",
        "--kv-scales",
        "0.05,0.5",
        "--swap-space",
        "4GiB",
        "--preemption",
        "swap",
    ]
    config = read(arguments).engine_config()
    assert (config.kv_dtype, config.kv_scales) == ("int8", (0.05, 0.5))
    assert (config.swap_space_bytes, config.preemption) == (2**32, "swap")
    file = 'kv_dtype = "fp8"\nkv_scales = [1, 0.5]\nswap_space = 0'
    config = read(file=file, tmp_path=tmp_path).engine_config()
    assert (config.kv_dtype, config.kv_scales, config.swap_space_bytes) == ("fp8", (1.0, 0.5), 0)
    with pytest.raises(ConfigError, match="'bf16' has none: allowed with int8, fp8"):
        read(["--kv-dtype", "bf16", "--kv-scales", "1,1"]).engine_config()


@pytest.mark.parametrize("text", ["0", "-1", "2G iB", "GiB", "2 gigs", "1e9", "", "nan", "0.3KiB"])
def test_a_size_that_is_none_is_refused(text):
    with pytest.raises(ConfigError, match="--kv-memory"):
        read([f"--kv-memory={text}"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--block-size", "0"], ["--block-size", "'0'", "allowed is an integer from 1 to 65536"]),
        (["--block-size", "many"], ["--block-size", "'many'"]),
        (["--port", "65536"], ["--port", "65536", "65535"]),
        (["--port", "\u0663"], ["--port", "\u0663", "an integer from 0 to 65535"]),
        (["--stall-timeout", "\u0663"], ["--stall-timeout", "\u0663"]),
        (["--kv-memory", "\u0663GiB"], ["--kv-memory", "\u0663GiB"]),
        (["--connections-per-second", "0"], ["--connections-per-second", "a number from 0.1"]),
        (["--tls-client-auth", "optional"], ["tls_client_auth", "'optional'", "tls_client_ca"]),
        (["--dtype", "float8"], ["--dtype", "float8", "bfloat16"]),
        (["--kv-dtype", "int3"], ["--kv-dtype", "'int3'", "auto, f32, bf16, f16, int8, fp8"]),
        (["--kv-scales", "0.5"], ["--kv-scales", "'0.5'", "0.05,0.5"]),
        (["--kv-scales", "0.5,x"], ["--kv-scales", "'0.5,x'"]),
        (["--eviction", "fifo"], ["--eviction", "'fifo'", "lru, segmented_lru"]),
        (["--preemption", "kill"], ["--preemption", "'kill'", "auto, recompute, swap"]),
        (["--swap-space", "4gigs"], ["--swap-space", "'4gigs'", "4GiB"]),
        (["--kv-memory", "1000000TiB"], ["--kv-memory", "'1000000TiB'", "to 256TiB"]),
        (["--num-blocks", str(2**30 + 1)], ["--num-blocks", "an integer from 2 to 1073741824"]),
        (["--swap-space", "-1"], ["--swap-space"]),
        (["--watermark", "nan"], ["--watermark", "nan"]),
        (["--watermark", "1"], ["--watermark", "a number of at least 0 and below 1"]),
        (["--stall-timeout", "inf"], ["--stall-timeout", "inf"]),
        (["--model", ""], ["--model"]),
        (["--bock-size", "16"], ["--bock-size"]),
        (["--block", "16"], ["--block"]),
        (["--port"], ["--port"]),
        (["stray"], ["stray"]),
        (["--config", "/nowhere/pykv.toml"], ["config /nowhere/pykv.toml cannot be read: No such file"]),
        (["--host", "0.0.0.0"], ["0.0.0.0", "--insecure-bind"]),
        (["--host", "example.com"], ["example.com", "--insecure-bind"]),
    ],
)
def test_a_bad_argument_is_refused_by_name_value_and_what_is_allowed(arguments, words):
    with pytest.raises(ConfigError) as refusal:
        read(arguments)
    assert all(word in str(refusal.value) for word in words)


COUNTS = [name for name in OPTION_RANGES if name in {entry.name for entry in fields(ServeOptions)}]


def what_is_allowed(make, *arguments, **options):
    with pytest.raises(ConfigError) as refusal:
        make(*arguments, **options)
    return re.search(r": allowed is (.*)", str(refusal.value))[1]


def test_all_counts_of_the_scheduler_are_options_but_those_of_embedders():
    without = {
        "num_host_blocks",
        "num_lookahead_tokens",
        "max_steps_in_flight",
        "max_passes",
        "num_state_slots",
    }
    without |= {"max_pinned_blocks", "max_pinned_blocks_per_tenant", "checkpoint_every"}
    assert set(OPTION_RANGES) - set(COUNTS) == without


@pytest.mark.parametrize("name", COUNTS)
def test_a_count_of_the_scheduler_has_its_range_in_its_words(name, capsys):
    low, high = OPTION_RANGES[name]
    flag = "--" + name.replace("_", "-")
    for value in (low - 1, high + 1):
        allowed = what_is_allowed(read, [f"{flag}={value}"])
        assert allowed == what_is_allowed(EngineConfig, **{name: value})
    with pytest.raises(SystemExit):
        read(["--help"])
    assert f"; {allowed}" in " ".join(capsys.readouterr().out.split())
    for value in (low, high):
        assert getattr(read([f"{flag}={value}"]), name) == value


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("gpu_memory_utilization", (0.0, 1.1)),
        ("watermark", (-0.1, 1.0)),
        ("tenant_cache_share", (-0.1, 1.1)),
        ("dtype", ("float8",)),
        ("eviction", ("fifo",)),
        ("preemption", ("kill",)),
        ("queue_order", ("lifo",)),
    ],
)
def test_another_option_of_the_engine_takes_what_the_engine_takes(name, values):
    for value in values:
        flag = f"--{name.replace('_', '-')}={value}"
        for make in (partial(read, [flag]), partial(EngineConfig, **{name: value})):
            what_is_allowed(make)
    good = {"gpu_memory_utilization": (1.0, 0.1), "watermark": (0.0, 0.9), "tenant_cache_share": (0.0, 1.0)}
    for value in good.get(name, ()):
        options = read([f"--{name.replace('_', '-')}={value}"])
        assert getattr(options.engine_config(), name) == value


def test_a_bad_variable_is_refused_by_name():
    with pytest.raises(ConfigError, match="PYKV_BLOCK_SIZE is 'x'"):
        read(environment={"PYKV_BLOCK_SIZE": "x"})


SERVICE_LINKS = {
    "PYKV_SERVICE_HOST": "10.0.0.1",
    "PYKV_SERVICE_PORT": "1234",
    "PYKV_SERVICE_PORT_GRPC": "1234",
    "PYKV_PORT": "tcp://10.0.0.1:1234",
    "PYKV_PORT_1234_TCP": "tcp://10.0.0.1:1234",
    "PYKV_PORT_1234_TCP_PROTO": "tcp",
    "PYKV_PORT_1234_TCP_PORT": "1234",
    "PYKV_PORT_1234_TCP_ADDR": "10.0.0.1",
    "PYKV_METRICS_SERVICE_HOST": "10.0.0.2",
    "PYKV_METRICS_PORT": "tcp://10.0.0.2:9090",
}


def test_what_kubernetes_tells_of_services_is_no_option():
    assert read(environment=SERVICE_LINKS) == ServeOptions()
    assert read(environment=SERVICE_LINKS | {"PYKV_PORT": "7"}).port == 7
    with pytest.raises(ConfigError, match="PYKV_BLOCK_SIZE"):
        read(environment=SERVICE_LINKS | {"PYKV_BLOCK_SIZE": "tcp://10.0.0.1:1234"})


@pytest.mark.parametrize(
    ("variable", "nearest"),
    [
        ("PYKV_BLOCKSIZE", "PYKV_BLOCK_SIZE"),
        ("PYKV_KV_MEMROY", "PYKV_KV_MEMORY"),
        ("PYKV_MODLE", "PYKV_MODEL"),
        ("PYKV_TLS_CERTIFICATE", "PYKV_TLS_CERT"),
    ],
)
def test_an_unknown_variable_is_refused_by_name_with_what_may_have_been_meant(variable, nearest):
    with pytest.raises(
        ConfigError, match=rf"{variable} is no variable of pykv-serve; near ones: "
    ) as refusal:
        read(environment={variable: "16", "HOME": "/"})
    text = str(refusal.value)
    assert nearest in text.partition("near ones: ")[2].partition(";")[0].split(", ")
    assert text.endswith("; see pykv-serve --help")
    assert text.count("PYKV_") <= 5


def test_a_variable_like_no_other_is_refused_without_a_list():
    with pytest.raises(ConfigError) as refusal:
        read(environment={"PYKV_QQXX": "1"})
    assert str(refusal.value) == "PYKV_QQXX is no variable of pykv-serve; see pykv-serve --help"


@pytest.mark.parametrize(
    ("flag", "nearest"), [("--bock-size", "--block-size"), ("--max-num-seq=4", "--max-num-seqs")]
)
def test_an_unknown_flag_is_refused_with_what_may_have_been_meant(flag, nearest):
    with pytest.raises(ConfigError, match=rf"{flag}.*; near ones: .*{nearest}\b.*; see pykv-serve --help$"):
        read([flag])


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("blocksize = 16", ["blocksize", "no option", "near ones: block_size", "see pykv-serve --help"]),
        ("block-size = 16", ["block-size", "no option"]),
        ("[cache]\nblock_size = 16", ["cache", "no option"]),
        ("block_size = 1.5", ["block_size", "1.5"]),
        ("block_size = true", ["block_size", "True"]),
        ("model = 7", ["model", "7"]),
        ("block_size =", ["no TOML"]),
        ("block_size = " + "1" * 5000, ["no TOML"]),
        ("block_size = 0x" + "1" * 5000, ["block_size", "a huge int"]),
        ("block_size = " + "[" * 100_000, ["nested too deeply"]),
        ("kv_memory" + ".a" * 20_000 + " = 1", ["kv_memory", "a huge dict"]),
        ("kv_scales = 5", ["kv_scales", "5"]),
        ("model = '" + "x" * 100_000 + "'\nblock_size = '" + "x" * 100_000 + "'", ["block_size", "xxx..."]),
        ("#" * 2**20 + " a remark", ["too large"]),
    ],
)
def test_a_bad_file_is_refused_by_key(tmp_path, file, words):
    with pytest.raises(ConfigError) as refusal:
        read(file=file, tmp_path=tmp_path)
    assert all(word in str(refusal.value) for word in [*words, "pykv.toml"])
    assert len(str(refusal.value)) < 2000


def test_flags_are_given_and_taken_back(tmp_path):
    file = "enable_prefix_caching = false\ninsecure_bind = true"
    assert not read(file=file, tmp_path=tmp_path).enable_prefix_caching
    assert read(["--enable-prefix-caching"], file=file, tmp_path=tmp_path).enable_prefix_caching
    assert not read(environment={"PYKV_ENABLE_PREFIX_CACHING": "no"}).enable_prefix_caching
    assert read(["--host", "0.0.0.0", "--insecure-bind"]).host == "0.0.0.0"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_loopback_needs_no_flag(host):
    assert read(["--host", host]).host == host


def test_the_help_names_every_option_under_a_heading(capsys):
    with pytest.raises(SystemExit) as end:
        read(["--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    for entry in fields(ServeOptions):
        assert "--" + entry.name.replace("_", "-") in text
    for heading in ("model", "cache", "scheduler", "network", "security", "operation"):
        assert f"\n{heading}:" in text
    assert text.startswith("usage: pykv-serve [--config FILE] [OPTION ...]\n\n")
    words = " ".join(text.split())
    for shown in ("--tls-cert FILE", "--host HOST", "begin alike (default: on)", "refused (default: 16MiB)"):
        assert shown in words


def test_every_variable_that_pykv_reads_is_known():
    """A variable of another part would otherwise be refused as a misspelt option."""
    known = {
        "PYKV_CONFIG",
        *OTHER_VARIABLES,
        *("PYKV_" + entry.name.upper() for entry in fields(ServeOptions)),
    }
    files = [*ROOT.glob("pykv/**/*.py"), *ROOT.glob("rust/**/*.rs"), *ROOT.glob("kernels/src/**/*.py")]
    found = {
        name for file in files for name in re.findall(r"""["'](PYKV_[A-Z0-9_]+)["']""", file.read_text())
    }
    assert "PYKV_CACHE_DIR" in found
    assert found <= known
    assert not {name for name in os.environ if name.startswith("PYKV_")} - known
