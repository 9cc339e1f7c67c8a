"""Every parameter of the client gets values of wrong kinds: all are refused by name, and nothing is sent."""

import asyncio
import functools
import inspect

from junk import Call, each, faults

from pykv.client import Client
from pykv.retention import Retention
from pykv.sampling import SamplingParams

TEXTS = {"text", "empty text", "text with a null"}
SECONDS = {"none", "float", "whole float", "huge"}


def of_client(client, run):
    def waited(method):
        return functools.wraps(method)(lambda **arguments: run(method(**arguments)))

    @functools.wraps(client.kv_events)
    def first_events(**arguments):
        return waited(client.kv_events(**arguments).__anext__)()

    shared = {
        "params": SamplingParams(),
        "request_id": "",
        "cache_salt": b"",
        "retention": Retention(),
        "timeout_seconds": 1.0,
    }
    allowed = {
        **each(("params", "retention"), {"none"}),
        "request_id": TEXTS,
        "cache_salt": {"bytes"},
        "timeout_seconds": SECONDS,
    }
    prompt = {*TEXTS, "list", "int array", "int32 array"}
    yield Call(client.generate, {"prompt": "a", **shared}, {**allowed, "prompt": prompt})
    messages = [{"role": "user", "content": "a"}]
    yield Call(client.chat, {"messages": messages, **shared}, allowed)
    yield Call(waited(client.abort), {"request_id": ""}, {"request_id": TEXTS})
    yield Call(waited(client.end_session), {"session_id": ""}, {"session_id": TEXTS})
    yield Call(first_events, {"next_sequence_number": 0})
    yield Call(waited(client.health), {"service": ""}, {"service": TEXTS})
    yield Call(
        Client,
        {
            "address": "localhost:1",
            "token": None,
            "tls": None,
            "max_message_bytes": 4096,
            "keepalive_seconds": 5.0,
            "keepalive_timeout_seconds": 1.0,
        },
        {
            "token": {"none", "text"},
            "tls": {"none"},
            "keepalive_seconds": {"none", "huge"},  # the others are below 5
            "keepalive_timeout_seconds": SECONDS - {"none"},
        },
    )


def test_junk_is_refused_by_name_and_opens_no_connection():
    client = Client()
    with asyncio.Runner() as runner:
        wrong, num_refused = faults(of_client(client, runner.run), lambda: client._channel)
    assert not wrong, "\n".join(wrong)
    assert num_refused > 500
    assert client._channel is None


def test_no_public_parameter_is_left_out():
    wanted = {
        (name, parameter)
        for name, method in inspect.getmembers(Client, inspect.isfunction)
        if not name.startswith("_")
        for parameter in inspect.signature(method).parameters
        if parameter != "self"
    }
    wanted |= {("Client", parameter) for parameter in inspect.signature(Client).parameters}
    calls = of_client(Client(), None)
    sent = {(call.function.__name__, field) for call in calls for field in call.arguments}
    assert len(wanted) > 15
    assert wanted - sent == set()
