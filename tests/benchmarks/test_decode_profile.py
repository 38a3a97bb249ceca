"""A profile of decode steps: parts that add up to a step, on a whole run."""

from __future__ import annotations

import json
import socket
import threading
from pathlib import Path

import pytest
from command import run
from decode_profile import decode_profile, summarise
from readers import read_all

from tests.tiny_model import save_tiny_model


def test_parts_are_medians_and_steps_their_sums_beside_the_pass_in_process() -> None:
    here = {"engine": [0.0], "batch": [0.0005], "pass": [0.004, 0.003, 0.2], "sampling": [0.0015]}
    over_http = here | {"engine": [0.002], "pass": [0.005]}
    parts = summarise({"in process": here, "over HTTP": over_http})["parts"]
    assert parts["in process"] == pytest.approx(
        {"engine": 0, "batch": 0.5, "pass": 4, "sampling": 1.5, "step": 6, "added": 0.5}
    )
    assert (parts["over HTTP"]["step"], parts["over HTTP"]["added"]) == pytest.approx((9, 1.25))


def test_steps_that_never_had_all_streams_are_no_profile() -> None:
    with pytest.raises(ValueError, match="no step had all streams"):
        summarise({"in process": {"engine": [], "batch": [], "pass": [], "sampling": []}})


def test_a_whole_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("Hello", "x" * 600, "Why?")))
    model = save_tiny_model(tmp_path)
    flags = f"--model {model} --device cpu --dtype float32 --max-total-tokens 512 --chunked-prefill-size 4 --prompts {prompts}"
    run_flags = [*flags.split(), "--max-tokens", "48", "--streams", "3", "--repeats", "1", "--json"]
    assert run(decode_profile, run_flags) == 0
    out = capsys.readouterr().out.splitlines()
    parts = json.loads(out[-1])["parts"]
    assert out[0].startswith("prompt 2: skipped")
    assert list(parts) == ["in process", "over HTTP"]
    for found in parts.values():
        assert list(found) == ["engine", "batch", "pass", "sampling", "step", "added"]
        assert all(found[name] > 0 for name in found if name != "added")
    assert parts["in process"]["added"] > 0

    assert run(decode_profile, [*flags.split(), "--max-tokens", "600"]) == 2
    assert "no prompt fits" in capsys.readouterr().err


def test_readers_tell_of_an_answer_that_is_no_stream() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        served = threading.Thread(target=lambda: refuse(listener))
        served.start()
        assert read_all(port, [{"prompt": "x"}]) == "no\n"
        served.join()


def refuse(listener: socket.socket) -> None:
    connection, _ = listener.accept()
    with connection:
        connection.recv(1 << 16)
        connection.sendall(b"no\n")
