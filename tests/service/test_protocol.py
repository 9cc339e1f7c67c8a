"""The generated code is that of the definition, and servers can be asked for it."""

import importlib.util
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpclib.reflection.v1.reflection_grpc import ServerReflectionStub
from grpclib.reflection.v1.reflection_pb2 import ServerReflectionRequest

from pykv.engine.stats import EngineStats
from pykv.engine.timing import Timing
from pykv.sampling import SamplingParams
from pykv.service.client.channel import PatientChannel
from pykv.service.client.messages import sampling_message
from pykv.service.messages import HISTOGRAMS, params_of, stats_message
from pykv.service.protocol import engine_pb2 as pb

ROOT = Path(__file__).resolve().parents[2]
GENERATED = ROOT / "service" / "src" / "protocol"


@pytest.mark.skipif(importlib.util.find_spec("grpc_tools") is None, reason="needs grpcio-tools (extra dev)")
def test_the_generated_code_is_current(tmp_path):
    subprocess.run([sys.executable, str(ROOT / "service" / "generate.py"), str(tmp_path)], check=True)
    made = sorted(tmp_path.iterdir())
    assert [file.name for file in made] == ["engine_pb2.py", "engine_pb2.pyi"]
    for file in made:
        assert file.read_text() == (GENERATED / file.name).read_text(), "run `make proto`"


def test_the_generated_code_loads_on_protobuf_6_and_7():
    """A runtime takes code of its own major version and of the one before."""
    assert "# Protobuf Python Version: 6.31." in (GENERATED / "engine_pb2.py").read_text()


def test_every_sampling_parameter_crosses_the_wire_and_back():
    params = SamplingParams(
        max_tokens=7, min_tokens=1, temperature=0.3, top_k=4, top_p=0.5, min_p=0.1, repetition_penalty=1.1,
        presence_penalty=0.2, frequency_penalty=-0.3, seed=2**64 - 1, stop=("a", "b"), stop_token_ids=(1, 2),
        ignore_eos=True, logit_bias={3: -1.5}, logprobs=0, prompt_logprobs=2, n=3,
    )  # fmt: skip
    for each in (params, SamplingParams()):
        message = pb.SamplingParams.FromString(sampling_message(each).SerializeToString())
        assert params_of(message) == each


def test_the_reference_has_every_method_field_and_value_with_its_meaning():
    spec = importlib.util.spec_from_file_location("reference", ROOT / "service" / "reference.py")
    reference = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(reference)
    text = (ROOT / "docs" / "api.md").read_text()
    _, _, generated = text.partition(reference.BEGIN)
    assert generated.strip() == reference.reference(reference.DEFINITION.read_text()).strip(), (
        "run `make proto`"
    )
    sections = {
        section.partition("`")[2].partition("`")[0]: section for section in generated.split("### ")[1:]
    }
    kinds = [*pb.DESCRIPTOR.message_types_by_name.values(), *pb.DESCRIPTOR.enum_types_by_name.values()]
    assert len(kinds) > 10
    for kind in [*kinds, *pb.DESCRIPTOR.services_by_name.values()]:
        names = getattr(kind, "fields", None) or getattr(kind, "values", None) or getattr(kind, "methods", ())
        rows = dict(re.findall(r"^\| `(\w+)` \|.* \| (.*) \|$", sections[kind.name], re.MULTILINE))
        assert [each.name for each in names] == list(rows)
        assert all(rows.values()), kind.name


def test_every_count_of_the_engine_is_told():
    counts = {entry.name: place for place, entry in enumerate(fields(EngineStats), start=1)}
    counts["num_finished"] = {"stop": 101, "length": 102, "abort": 103, "error": 104}
    message = stats_message(EngineStats(**counts), Timing().counts())
    told = {
        descriptor.name: value
        for descriptor, value in message.ListFields()
        if descriptor.name not in HISTOGRAMS
    }
    by_reason = counts.pop("num_finished")
    assert told == counts | {f"num_finished_{reason}": count for reason, count in by_reason.items()}


@pytest.mark.asyncio
async def test_reflection_names_the_services_and_gives_the_definition(daemon):
    host, port = daemon.address.split(":")
    channel = PatientChannel(host, int(port))
    async with ServerReflectionStub(channel).ServerReflectionInfo.open() as stream:
        await stream.send_message(ServerReflectionRequest(list_services=""))
        services = {entry.name for entry in (await stream.recv_message()).list_services_response.service}
        assert {"pykv.v1.Engine", "grpc.health.v1.Health"} <= services
        await stream.send_message(ServerReflectionRequest(file_containing_symbol="pykv.v1.Engine"), end=True)
        reply = (await stream.recv_message()).file_descriptor_response
    channel.close()
    definition = FileDescriptorProto.FromString(reply.file_descriptor_proto[0])
    assert [method.name for method in definition.service[0].method] == [
        "Generate", "Chat", "Abort", "EndSession", "GetModel", "SubscribeKvEvents", "GetStats",
    ]  # fmt: skip
