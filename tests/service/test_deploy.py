"""The files that operators start from say what the daemon understands."""

import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
import tomllib
from pathlib import Path

import promql_parser
import pytest
import yaml

from pykv.service.access import read_tenants
from pykv.service.options import read_options

DEPLOY = Path(__file__).resolve().parents[2] / "service" / "deploy"
METRIC = re.compile(r"pykv:[a-z0-9_]+")
FIELDS = {"alert", "expr", "for", "labels", "annotations"}


def rules():
    found = [
        rule
        for group in yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"]
        for rule in group["rules"]
    ]
    assert len(found) > 3
    return found


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule["alert"])
def test_a_rule_is_whole(rule):
    assert set(rule) == FIELDS
    assert re.fullmatch(r"\d+[smh]", rule["for"])
    assert rule["labels"]["severity"] in ("page", "ticket")
    assert rule["annotations"]["summary"]
    assert promql_parser.parse(rule["expr"]), "what is no PromQL raises"


@pytest.mark.asyncio
async def test_rules_ask_for_metrics_that_there_are(start_tls):
    daemon = await start_tls()
    families = list(daemon.daemon._collector.collect())
    known = {sample.name for family in families for sample in family.samples}
    known |= {family.name + "_total" for family in families}  # counters without a value yet
    asked = {name for rule in rules() for name in METRIC.findall(rule["expr"])}
    assert len(asked) > 4
    assert asked <= known


def test_the_configuration_is_read():
    options = read_options(["--config", str(DEPLOY / "serve.toml")], {}, "0")
    assert (options.host, options.metrics_port) == ("0.0.0.0", 9464)
    assert options.tls_files is not None


def test_the_tenants_are_read():
    assert {tenant.name for tenant in read_tenants(DEPLOY / "tenants.toml")} == {
        "search",
        "batch",
        "operations",
    }


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not here")
def test_the_unit_is_one_for_systemd(tmp_path):
    text = (DEPLOY / "pykv-serve.service").read_text()
    assert "ExecStart=/opt/pykv/bin/pykv-serve\n" in text
    unit = tmp_path / "pykv-serve.service"
    unit.write_text(
        text.replace("/opt/pykv/bin/pykv-serve", sys.executable)
    )  # it must be there to be verified
    verified = subprocess.run(
        ["systemd-analyze", "verify", unit], check=False, capture_output=True, text=True, timeout=60
    )
    assert (verified.returncode, verified.stdout + verified.stderr) == (0, "")


STUB = """#!{bash}
printf '%s ' "$(basename "$0")" "$@" >> "$LOG"; echo >> "$LOG"
"""
AS_ROOT = {
    "sudo": '"$@"',
    # Everybody may copy files and set their modes; whose they are root alone can say.
    "install": 'kept=(); for each in "$@"; do case "$each" in --owner=*|--group=*) ;; *) kept+=("$each");; esac; done; '
    'PATH="$OLD_PATH" exec install "${kept[@]}"',
    "python3": '[[ "$*" == "-m venv "* ]] && mkdir -p "$3/bin" && cp "$(dirname "$0")/pip" "$3/bin/pip"',
    **dict.fromkeys(("pip", "useradd", "systemctl", "journalctl"), ":"),
}


@pytest.fixture
def installed(tmp_path, make_authority):
    """Where the document's commands have put everything, and each of them as root would have had it."""
    text = (DEPLOY.parents[1] / "docs" / "operate.md").read_text()
    section = text.partition("### As a service of systemd\n")[2].partition("\n## ")[0]
    commands = re.search(r"^```text\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)[1]
    clone, root, stubs = (tmp_path / name for name in ("clone", "root", "stubs"))
    for folder in (clone / "dist", root / "etc/systemd/system", root / "opt", stubs):
        folder.mkdir(parents=True)
    (clone / "dist/pykv_cache-0-py3-none-any.whl").touch()
    shutil.copytree(DEPLOY, clone / "service/deploy")
    for name, does in AS_ROOT.items():
        (stubs / name).write_text(STUB.format(bash=shutil.which("bash")) + does + "\n")
        (stubs / name).chmod(0o755)
    make_files(make_authority, clone / "target/authority")
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", re.sub(r"(?<=[ =])/(opt|etc)/", rf"{root}/\1/", commands)],
        cwd=clone,
        env={
            "PATH": f"{stubs}:{os.environ['PATH']}",
            "OLD_PATH": os.environ["PATH"],
            "LOG": str(tmp_path / "log"),
        },
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return root, (tmp_path / "log").read_text().replace(str(root), "").splitlines()


def make_files(make_authority, folder):
    """The files that the document makes there."""
    folder.parent.mkdir()
    chain, key = make_authority(folder, "ca").issue("server", "127.0.0.1")
    chain.rename(folder / "server.pem")
    key.rename(folder / "server.key")
    (folder / "tenants.toml").write_text(
        '[tenants.operations]\ncertificates = ["operations.internal.example"]\n'
    )


def test_the_commands_before_the_unit_put_everything_in_its_place_with_its_rights(installed):
    root, log = installed
    unit = (root / "etc/systemd/system/pykv-serve.service").read_text()
    user = re.search(r"^User=(.*)$", unit, re.MULTILINE)[1]
    cache = re.search(r"^CacheDirectory=(.*)$", unit, re.MULTILINE)[1]
    (made,) = [shlex.split(line) for line in log if line.startswith("useradd ")]
    assert (made[-1], made[made.index("--home-dir") + 1]) == (user, f"/var/cache/{cache}")
    etc = root / "etc/pykv"
    assert {path.name: stat.S_IMODE(path.stat().st_mode) for path in [etc, *etc.iterdir()]} == {
        "pykv": 0o750,
        **dict.fromkeys(("serve.toml", "tenants.toml", "server.pem", "server.key", "clients.pem"), 0o640),
    }
    into_etc = [shlex.split(line) for line in log if line.startswith("install ") and "/etc/pykv" in line]
    assert into_etc
    assert all({"--owner=root", f"--group={user}"} <= set(words) for words in into_etc)
    assert not any(line.startswith("pip install /") for line in log)
    assert any(re.match(r"pip install dist/pykv_cache-.*\.whl\[serve\]", line) for line in log)
    assert "systemctl daemon-reload " in log
    assert log.index("systemctl daemon-reload ") < log.index("systemctl enable --now pykv-serve ")


def test_the_daemon_takes_the_files_that_the_commands_have_put_there(installed):
    root, _ = installed
    config = root / "etc/pykv/serve.toml"
    config.write_text(config.read_text().replace('"/etc/pykv/', f'"{root}/etc/pykv/'))
    options = read_options([], {"PYKV_CONFIG": str(config)}, "0")
    assert options.tls_files.read().client_authorities
    assert [tenant.name for tenant in read_tenants(Path(options.tenants))] == ["operations"]


def test_the_container_starts_with_options_that_there_are():
    text = (DEPLOY / "Containerfile").read_text().replace("\\\n", " ")
    (variables,) = re.findall(r"^ENV (.*)$", text, re.MULTILINE)
    options = read_options(["--num-blocks", "512"], dict(re.findall(r"(\w+)=(\S+)", variables)), "0")
    assert options.insecure_bind
    assert (options.host, options.metrics_host, options.metrics_port) == ("0.0.0.0", "0.0.0.0", 9464)
    assert options.log_format == "json"


def test_the_unit_gives_a_stop_more_time_than_the_drain_takes():
    unit = (DEPLOY / "pykv-serve.service").read_text()
    stop = int(re.search(r"^TimeoutStopSec=(\d+)$", unit, re.MULTILINE)[1])
    assert stop > tomllib.loads((DEPLOY / "serve.toml").read_text())["drain_timeout"]
    variables = dict(
        shlex.split(line)[0].split("=", 1) for line in re.findall(r"^Environment=(.*)$", unit, re.MULTILINE)
    )
    assert set(variables) == {"PYKV_CONFIG", "PYKV_CACHE_DIR"}
