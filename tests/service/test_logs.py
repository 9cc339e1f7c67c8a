"""Logs: one JSON object a line for machines, lines for people, and never the values of variables."""

import io
import json
import logging

import pytest
import structlog

from pykv.service.logs import configure_logs


class Terminal(io.StringIO):
    def isatty(self):
        return True


pytestmark = pytest.mark.usefixtures("logging_as_it_was")


def log_something(stream, log_format="auto", level="info"):
    configure_logs(level, log_format, stream)
    log = structlog.get_logger("pykv.service")
    with structlog.contextvars.bound_contextvars(request_id="mine"):
        log.info("request ended", output_tokens=3)
        log.debug("call ended")
        logging.getLogger("pykv.engine").info("step")
        logging.getLogger("library").info("busy")
        logging.getLogger("library").warning("odd")
    return stream.getvalue()


def test_json_lines_carry_the_request_id():
    lines = [json.loads(line) for line in log_something(io.StringIO()).splitlines()]
    assert [line["event"] for line in lines] == ["request ended", "step", "odd"]
    assert {line["request_id"] for line in lines} == {"mine"}
    assert lines[0]["output_tokens"] == 3
    assert lines[0]["level"] == "info"
    assert lines[0]["timestamp"].endswith("Z")


def test_a_terminal_gets_lines_for_people():
    text = log_something(Terminal())
    assert "request ended" in text
    assert "{" not in text


def test_values_stand_in_the_order_in_which_they_are_given():
    stream = io.StringIO()
    configure_logs("info", "console", stream)
    structlog.get_logger("pykv.service").info("model served", model="small", block_size=16)
    assert "model=small block_size=16" in stream.getvalue()


def test_the_format_can_be_chosen():
    assert json.loads(log_something(Terminal(), "json").splitlines()[0])
    assert not log_something(io.StringIO(), "console").startswith("{")


def test_the_level_can_be_chosen():
    assert '"odd"' in log_something(io.StringIO(), level="warning")
    assert "request ended" not in log_something(io.StringIO(), level="warning")
    assert "call ended" in log_something(io.StringIO(), level="debug")


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()])
def test_tracebacks_do_not_show_the_values_of_variables(stream):
    configure_logs("info", "auto", stream)
    prompt = "secret" + "!"
    try:
        raise ValueError(len(prompt))
    except ValueError as error:
        structlog.get_logger("pykv.service").error("call failed", exc_info=error)
    assert "ValueError: 7" in stream.getvalue()
    assert "secret!" not in stream.getvalue()
