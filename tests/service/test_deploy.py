"""The files that operators start from say what the daemon understands."""

import re
import shlex
import shutil
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


def test_the_container_starts_with_options_that_there_are():
    text = (DEPLOY / "Containerfile").read_text()
    command = re.search(r"^CMD (\[.*\])$", text, re.MULTILINE)
    options = read_options(yaml.safe_load(command[1]), {}, "0")
    assert options.insecure_bind
    assert options.metrics_port == 9464


def test_the_unit_gives_a_stop_more_time_than_the_drain_takes():
    unit = (DEPLOY / "pykv-serve.service").read_text()
    stop = int(re.search(r"^TimeoutStopSec=(\d+)$", unit, re.MULTILINE)[1])
    assert stop > tomllib.loads((DEPLOY / "serve.toml").read_text())["drain_timeout"]
    variables = dict(
        shlex.split(line)[0].split("=", 1) for line in re.findall(r"^Environment=(.*)$", unit, re.MULTILINE)
    )
    assert set(variables) == {"PYKV_CONFIG", "PYKV_CACHE_DIR"}
