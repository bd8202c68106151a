"""Model files that change under a model: the right logits or an error that says so, never other logits (CASES S17)."""

from __future__ import annotations

import pytest
from support import faults

both_engines = pytest.mark.parametrize("io", ["pread", "io_uring"])

COPY = """
import pathlib, shutil, tempfile
folder = pathlib.Path(tempfile.mkdtemp())
import atexit
atexit.register(shutil.rmtree, folder)
path = folder / "model.gguf"
shutil.copyfile(TINY, path)
other = folder / "other.gguf"  # the same shapes and offsets, other weights
shutil.copyfile(models.tiny(seed=99), other)
assert other.stat().st_size == path.stat().st_size and other.read_bytes() != path.read_bytes()
want = reference(n=20, n_threads=1)

def right_or_refused(context, n=20):
    \"\"\"Decodes; the error that stopped it, or None. What came before it must be right.\"\"\"
    got = []
    try:
        got.append(context.decode(PROMPT))
        for i in range(n):
            got.append(context.decode([7 + i]))
    except ms.ReadError as error:
        assert same(got, want[: len(got)])
        return error
    assert same(got, want[: len(got)])
    return None
"""


@both_engines
def test_a_file_replaced_by_another_is_read_on_as_it_was(io: str) -> None:
    """An update by rename: the old file stays open."""
    faults.run(
        COPY
        + """
with opened(path) as model, model.context(256, n_threads=1) as context:
    os.replace(other, path)
    assert right_or_refused(context) is None
    assert model.stats()["n_evictions"] > 0
with opened(path) as model, model.context(256, n_threads=1) as context:
    assert not same([context.decode(PROMPT)], want[:1])  # the new one, once it is opened
""",
        io=io,
    )


@both_engines
@pytest.mark.parametrize(
    "change",
    [
        "path.write_bytes(other.read_bytes())",
        "f.seek(200_000); f.write(b'x' * 2_000_000)",
        "f.truncate(300_000)",
        "f.truncate(300_000); f.truncate(size)",
        "f.seek(size); f.write(b'more')",
    ],
    ids=["rewritten", "partly_overwritten", "cut", "cut_and_grown_again", "grown"],
)
def test_a_file_written_to_while_it_is_open_is_an_error_that_says_so(io: str, change: str) -> None:
    """The length may be the same in the end: the time of modification is not."""
    faults.run(
        COPY
        + f"""
size = path.stat().st_size
with opened(path) as model, model.context(256, n_threads=1) as context:
    assert right_or_refused(context, 3) is None
    with open(path, "r+b") as f:
        {change}
    context.clear()
    error = right_or_refused(context)
    assert error is not None and str(path) in str(error), error
    if not {change == "f.truncate(300_000)"}:
        assert error.errno == errno.ESTALE and "written to" in str(error), error
    context.clear()
    assert right_or_refused(context) is not None  # and it stays so
shutil.copyfile(TINY, path)
with opened(path) as model, model.context(256, n_threads=1) as context:
    assert right_or_refused(context) is None
""",
        io=io,
    )


def test_what_was_read_before_stays_right_unless_the_dense_weights_are_mapped() -> None:
    faults.run(
        COPY
        + """
for dense in ("anon", "mmap"):
    with opened(path, cache="100%", dense=dense) as model, model.context(256, n_threads=1) as context:
        assert right_or_refused(context) is None
        with open(path, "r+b") as f:
            f.seek(0)
            f.write(TINY.read_bytes())
        context.clear()
        error = right_or_refused(context)
        assert (error is None) == (dense == "anon"), (dense, error)
        assert error is None or error.errno == errno.ESTALE
"""
    )


def test_a_file_replaced_or_written_to_during_the_load_is_refused() -> None:
    """llama.cpp opens it by name once more, after we did."""
    faults.run(
        COPY
        + """
def change(how):
    done = []
    def progress(share):
        if not done:
            done.append(how())
        return True
    return progress
def replace():
    os.replace(other, path)
def write():
    with open(path, "r+b") as f:
        f.write(b"GGUF")  # as it was
for how in (replace, write):
    try:
        ms.Model(path, stream=ms.Stream(cache="min"), progress=change(how))
        raise AssertionError("it was loaded")
    except ms.ReadError as error:
        assert error.errno == errno.ESTALE and str(path) in str(error), error
with opened(path) as model, model.context(256, n_threads=1) as context:
    assert not same([context.decode(PROMPT)], want[:1])
"""
    )


def test_a_file_that_another_process_writes_to_for_a_while_never_gives_other_logits() -> None:
    """A copy over it, in pieces, while it is decoded from and opened anew."""
    faults.run(
        COPY
        + """
new = other.read_bytes()
def copy_over():
    with open(path, "r+b") as f:
        for at in range(0, len(new), 1 << 18):
            f.write(new[at : at + (1 << 18)])
            f.flush()
            time.sleep(0.002)
        done.set()
done = threading.Event()
refused = 0
with opened(path) as model, model.context(256, n_threads=1) as context:
    thread = threading.Thread(target=copy_over)
    thread.start()
    while not done.is_set():
        context.clear()
        refused += right_or_refused(context) is not None
    thread.join()
    context.clear()
    assert right_or_refused(context) is not None
with opened(path) as model, model.context(256, n_threads=1) as context:
    first = steps(context, 3)
assert same(first, reference(path, 3, n_threads=1))
"""
    )
