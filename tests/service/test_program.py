"""`pykv-serve` as its users run it, with a model from a folder."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pykv.client import Client
from pykv.sampling import SamplingParams

ROOT = Path(__file__).resolve().parents[2]
SERVE = "import sys; from pykv.cli.launch import run_server; sys.exit(run_server())"


@pytest.mark.asyncio
async def test_a_folder_is_served_from_its_load_to_an_orderly_end(tmp_path, save_tiny_model):
    save_tiny_model(tmp_path / "tiny")
    process = subprocess.Popen(  # noqa: ASYNC220
        [
            sys.executable,
            "-c",
            SERVE,
            "--model",
            str(tmp_path / "tiny"),
            "--port",
            "0",
            "--kv-memory",
            "8MiB",
        ],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        line = process.stdout.readline()
        assert line.startswith("pykv-serve ready on "), process.stderr.read()
        async with Client(line.split()[-1]) as client:
            model = await client.get_model()
            assert (model.name, model.dtype, model.block_size) == ("tiny", "float32", 16)
            # 2 for K and V, 2 layers, 2 heads, 16 wide, 4 bytes
            assert model.kv_bytes_per_token == 2 * 2 * 2 * 16 * 4
            assert model.num_blocks == 8 * 2**20 // (512 * 16) - 1
            params = SamplingParams(max_tokens=8, ignore_eos=True)
            deltas = [delta async for delta in client.chat([{"role": "user", "content": "hi"}], params)]
            assert deltas[-1].usage.output_tokens == 8
        process.send_signal(signal.SIGTERM)
        _, error = process.communicate(timeout=30)
    assert process.returncode == 0
    assert "Traceback" not in error
