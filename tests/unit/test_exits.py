"""What a peer says at its end is one line, whatever the error was."""

import pytest

from mesh import exits


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError(
            "[enforce fail] DefaultCPUAllocator: can't allocate memory:\nyou tried to allocate 5111808 bytes."
        ),
        RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB"),
    ],
)
def test_an_error_for_want_of_memory_says_what_to_change(error: Exception) -> None:
    for line in (exits.unexpected(error), exits.parting(error)):
        assert line.startswith("out of memory: ")
        assert "trainer.micro_batch_tokens" in line
        assert "\n" not in line


def test_others_come_with_their_type() -> None:
    assert exits.parting(KeyError("a\nb")) == "KeyError: 'a\\nb'"
    assert exits.parting(OSError("first\nsecond")) == "OSError: first second"
    assert exits.parting(ValueError("c.toml:\n wrong")) == "c.toml: wrong"
    assert exits.parting(None) == "finished"
