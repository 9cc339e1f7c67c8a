"""Exceptions become statuses by one table, with texts that are safe to send."""

import anyio
import pytest
from grpclib.const import Status
from grpclib.exceptions import GRPCError

import pykv.errors
from pykv.errors import CapacityError, InvalidRequestError, PykvError
from pykv.service import errors as service_errors
from pykv.service.status import error_metadata, innermost, is_unexpected, message_of, status_of

OF_PYKV = [getattr(pykv.errors, name) for name in pykv.errors.__all__]
OF_SERVICE = [getattr(service_errors, name) for name in service_errors.__all__]


@pytest.mark.parametrize("kind", [*OF_PYKV, *OF_SERVICE], ids=lambda kind: kind.__name__)
def test_every_error_of_pykv_has_a_status(kind):
    error = kind("feature", "extra") if kind is pykv.errors.MissingExtraError else kind("what happened")
    assert status_of(error) is not Status.UNKNOWN
    assert not is_unexpected(error)


def test_what_is_wrong_with_a_request_is_an_invalid_argument():
    for error in (InvalidRequestError("x", "field"), CapacityError("x")):
        assert status_of(error) is Status.INVALID_ARGUMENT
    assert error_metadata(InvalidRequestError("x", "top_p")) == {
        "pykv-error": "InvalidRequestError",
        "pykv-field": "top_p",
    }


def test_an_unforeseen_error_is_internal_and_says_nothing():
    error = ValueError("the prompt was: secret")
    assert (status_of(error), is_unexpected(error)) == (Status.INTERNAL, True)
    assert "secret" not in message_of(error)
    assert error_metadata(error) == {}


def test_a_status_of_its_own_is_kept():
    assert status_of(GRPCError(Status.UNIMPLEMENTED, "no")) is Status.UNIMPLEMENTED
    assert message_of(GRPCError(Status.UNIMPLEMENTED)) == ""


def test_texts_are_short_and_printable():
    assert message_of(PykvError("a\nb\x00c\ud800é")) == "a?b?c?é"
    assert len(message_of(PykvError("x" * 10_000))) == 300
    assert message_of(PykvError()) == "PykvError"


def test_a_deadline_is_told_from_other_errors():
    assert status_of(TimeoutError()) is Status.DEADLINE_EXCEEDED
    assert message_of(TimeoutError()) == "the deadline passed"


@pytest.mark.asyncio
async def test_the_error_inside_a_task_group_is_found():
    async def fail():
        raise InvalidRequestError("x")

    async def run_nested():
        async with anyio.create_task_group() as outer, anyio.create_task_group() as inner:
            inner.start_soon(fail)
            outer.start_soon(anyio.sleep, 10)

    with pytest.raises(ExceptionGroup) as raised:
        await run_nested()
    assert isinstance(innermost(raised.value), InvalidRequestError)
