"""The kind of a server is another one when any part of its model is."""

from pathlib import Path

import pytest

from oaiserve.checkpoints.kind import HEAD_BYTES, SAMPLE_BYTES, SAMPLES, kind_of


@pytest.mark.parametrize("place", [0, HEAD_BYTES - 1, HEAD_BYTES, 2 * HEAD_BYTES + 7])
def test_it_tells_weights_apart_that_differ_from_some_place_on(tmp_path: Path, place: int) -> None:
    size = 3 * HEAD_BYTES
    kinds = []
    for name, content in (("a", bytes(size)), ("b", bytes(place) + b"x" * (size - place)), ("c", bytes(size))):
        (folder := tmp_path / name).mkdir()
        (folder / "model.safetensors").write_bytes(content)
        kinds.append(kind_of(str(folder), ["bfloat16"]))
    assert kinds[0] == kinds[2] != kinds[1]
    assert kind_of(str(tmp_path / "a"), ["float32"]) != kinds[0]


def test_it_reads_samples_of_large_files_alone(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"")
    with file.open("r+b") as opened:
        opened.truncate(2**30)  # sparse
    before = kind_of(str(file), [])
    for place, changes in ((2**30 // SAMPLES * 100 + HEAD_BYTES, True), (HEAD_BYTES + 2 * SAMPLE_BYTES, False)):
        with file.open("r+b") as opened:
            opened.seek(place)
            opened.write(b"x")
        assert (kind_of(str(file), []) != before) == changes
        before = kind_of(str(file), [])


@pytest.mark.parametrize("changed", ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf", "mmproj-m.gguf"])
def test_it_reads_all_parts_of_a_gguf_file_and_the_file_that_reads_its_images(tmp_path: Path, changed: str) -> None:
    names = ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf", "mmproj-m.gguf"]
    for name in names:
        (tmp_path / name).write_bytes(b"before")
    before = kind_of(str(tmp_path / names[0]), [], tmp_path / names[2])
    (tmp_path / changed).write_bytes(b"after_")
    assert kind_of(str(tmp_path / names[0]), [], tmp_path / names[2]) != before
