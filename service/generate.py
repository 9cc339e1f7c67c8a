"""Generates `pykv.service.protocol` from the protocol's definition: `python service/generate.py`."""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from grpc_tools import protoc
from reference import write as write_reference

SERVICE = Path(__file__).resolve().parent
DEFINITION = "pykv/v1/engine.proto"
TARGET = SERVICE / "src" / "protocol"


def generate(target: Path) -> None:
    """Writes the message module and its stub into the folder `target`."""
    with TemporaryDirectory() as folder:
        options = [f"-I{SERVICE / 'proto'}", f"--python_out={folder}", f"--pyi_out={folder}"]
        if protoc.main(["protoc", *options, DEFINITION]) != 0:
            sys.exit("protoc failed")
        for file in sorted(Path(folder).rglob("engine_pb2.py*")):
            text = file.read_text().replace("_Mapping]", "_Mapping[str, object]]")  # mypy wants it whole
            (target / file.name).write_text(text)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        generate(Path(sys.argv[1]))
    else:
        generate(TARGET)
        write_reference()
