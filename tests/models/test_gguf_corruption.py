"""A damaged file is refused with ModelError, or read as far as it is sound; it never crashes or eats memory."""

from __future__ import annotations

import contextlib
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import gguf
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from models.base import ModelError
from models.gguf import GGUFSource, gguf_config
from models.gguf_tokenizer import read_gguf_tokenizer
from tests.models.checkpoints import make_checkpoint
from tests.models.gguf_files import convert

MOST_MEMORY = 32 << 20  # bytes of Python objects; the sound file needs well under one


def byte_level(writer: gguf.GGUFWriter) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list([*"abcdefgh", "ab", "abc", "<|end|>"])
    writer.add_token_types([1] * 10 + [3])
    writer.add_token_merges(["a b", "ab c"])
    writer.add_bos_token_id(10)
    writer.add_eos_token_id(10)


def sentencepiece(writer: gguf.GGUFWriter) -> None:
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["<unk>", "<s>", "<0x41>", "a", "b", "▁", "ab", "▁ab", "  "])
    writer.add_token_types([2, 3, 6, 1, 1, 1, 1, 1, 4])
    writer.add_token_scores([0.0, 0.0, 0.0, -3.0, -4.0, -5.0, -1.0, -2.0, 0.0])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(1)


@pytest.fixture(scope="module", params=[byte_level, sentencepiece])
def content(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("corruption")
    make_checkpoint("llama-llama3", folder)
    return convert(folder, folder / "sound.gguf", tokenizer=request.param).read_bytes()


@pytest.fixture(scope="module")
def header_size(content: bytes) -> int:
    """Where the tensors' data begin, near enough: behind the last tensor's description."""
    return content.rindex(b"rope_freqs.weight") + 64


@pytest.fixture
def damaged(tmp_path: Path) -> Callable[[bytes], Path]:
    def write(data: bytes) -> Path:
        path = tmp_path / "damaged.gguf"
        path.write_bytes(data)
        return path

    return write


def read_all(path: Path) -> None:
    """Everything that is read from a file before it is served."""
    gguf_config(path)
    read_gguf_tokenizer(path)
    source = GGUFSource(path)
    for name in source.names():
        source.tensor(name)


def read_within_bounds(path: Path) -> None:
    tracemalloc.start()
    try:
        with contextlib.suppress(ModelError):
            read_all(path)
        assert tracemalloc.get_traced_memory()[1] < MOST_MEMORY
    finally:
        tracemalloc.stop()


fuzz = settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    derandomize=True,
)


def test_the_sound_file_is_read(content: bytes, damaged: Callable[[bytes], Path]) -> None:
    read_all(damaged(content))


@fuzz
@given(data=st.data())
def test_truncated_anywhere(content: bytes, damaged: Callable[[bytes], Path], data: st.DataObject) -> None:
    length = data.draw(st.integers(0, len(content) - 1))
    with pytest.raises(ModelError):
        read_all(damaged(content[:length]))


@fuzz
@given(data=st.data())
def test_bytes_flipped_in_the_header(
    content: bytes, header_size: int, damaged: Callable[[bytes], Path], data: st.DataObject
) -> None:
    changes = data.draw(
        st.lists(st.tuples(st.integers(0, header_size - 1), st.integers(0, 255)), min_size=1, max_size=4)
    )
    broken = bytearray(content)
    for position, value in changes:
        broken[position] = value
    read_within_bounds(damaged(bytes(broken)))


@pytest.mark.parametrize("value", [0, 1, 0xFF])
def test_bytes_all_along_the_header(
    content: bytes, header_size: int, damaged: Callable[[bytes], Path], value: int
) -> None:
    for position in range(4, header_size, 13):
        broken = bytearray(content)
        broken[position] = value
        with contextlib.suppress(ModelError):
            read_all(damaged(bytes(broken)))
