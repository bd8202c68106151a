"""Model files made to do harm: an error that names the tensor or the key, quickly; nothing run, written or sent.

Broken numbers are the C tests' (tests/fuzz replays a corpus and mutations); here are the kinds that need a process.
"""

from __future__ import annotations

import os
import pathlib
import platform
import resource
import shutil
import struct
import time

import pytest
from support import faults, models

import moestream as ms

F32, UINT32, STRING = 0, 4, 8
EXPERT = b"blk.0.ffn_up_exps.weight"


def _entries(folder: str) -> int:
    return len(list((pathlib.Path("/proc/self") / folder).iterdir()))


def _text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def _write(
    path: pathlib.Path,
    tensors: list[tuple[bytes, tuple[int, ...], int]],
    keys: dict[bytes, bytes | int] | None = None,
    data: int = 0,
) -> pathlib.Path:
    """A GGUF of F32 tensors (name, shape, offset), with `data` bytes behind the header."""
    pairs: dict[bytes, bytes | int] = {
        b"general.architecture": b"made", b"made.block_count": 1, b"made.expert_count": 2, b"made.expert_used_count": 1,
        **(keys or {}),
    }  # fmt: skip
    out = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(pairs))
    for key, value in pairs.items():
        kind = STRING if isinstance(value, bytes) else UINT32
        out += _text(key) + struct.pack("<I", kind)
        out += _text(value) if isinstance(value, bytes) else struct.pack("<I", value)
    rows = [_text(name) + struct.pack(f"<I{len(ne)}QIQ", len(ne), *ne, F32, offset) for name, ne, offset in tensors]
    out += b"".join(rows)
    path.write_bytes(out + bytes(-len(out) % 32 + data))
    return path


def _experts(name: bytes = EXPERT) -> list[tuple[bytes, tuple[int, ...], int]]:
    return [(name, (32, 4, 2), 0)]


def test_the_maker_of_hostile_files_can_make_a_good_one(tmp_path: pathlib.Path) -> None:
    plan = ms.plan(_write(tmp_path / "good.gguf", _experts(), data=1024))
    assert [t.name for t in plan.tensors] == [EXPERT.decode()] and plan.expert_bytes == 1024


@pytest.mark.parametrize("n", [8_000, 32_768])
def test_thousands_of_tensors_are_indexed_or_refused_in_seconds(tmp_path: pathlib.Path, n: int) -> None:
    """llama.cpp's reader compares each name with all others: a million would take hours."""
    tensors = [(b"t%d" % i, (8,), 32 * (i + 32)) for i in range(n)]
    path = _write(tmp_path / "many.gguf", _experts() + tensors, data=1024 + 32 * n)
    begin = time.monotonic()
    if n < 32_768:
        assert len(ms.plan(path, cpu_moe=True).tensors) == n + 1
    else:
        with pytest.raises(ms.FormatError, match=r"many\.gguf' claims 32769 tensors, the limit is 32768"):
            ms.plan(path)
    assert time.monotonic() - begin < 30


def test_more_tensors_than_the_file_has_room_for_take_no_memory(tmp_path: pathlib.Path) -> None:
    path = _write(tmp_path / "claims.gguf", _experts(), data=1024)
    content = bytearray(path.read_bytes())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for n, words in ((2**40, f"claims {2**40} tensors"), (2**15, "cut short at tensor")):
        content[8:16] = struct.pack("<Q", n)
        path.write_bytes(content)
        with pytest.raises(ms.FormatError, match=rf"claims\.gguf.*{words}"):
            ms.plan(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10


@pytest.mark.parametrize("where", [0, 3, len(EXPERT)])
def test_a_zero_byte_in_a_tensor_name_is_refused(tmp_path: pathlib.Path, where: int) -> None:
    """For whoever reads it as a C string it would be another tensor's name."""
    name = EXPERT[:where] + b"\0" + EXPERT[where:]
    path = _write(tmp_path / "zero.gguf", _experts(name), data=1024)
    with pytest.raises(ms.FormatError, match="zero byte in its name"):
        ms.plan(path)


def test_control_characters_do_not_reach_the_message(tmp_path: pathlib.Path) -> None:
    """A terminal would obey them."""
    path = _write(tmp_path / "escape.gguf", [(b"\x1b[2J\nblk", (2**62, 2**62), 0)])
    with pytest.raises(ms.FormatError) as caught:
        ms.plan(path)
    assert str(caught.value).isprintable() and "[2J" in str(caught.value)


@pytest.mark.parametrize(
    ("shape", "offset", "words"),
    [
        ((2**32, 2**31, 2**31), 0, "impossible shape"),
        ((2**63, 1, 2), 0, "impossible shape"),
        ((32, 4, 0), 0, "impossible shape"),
        ((32, 4, 2), 2**40, "hostile.gguf"),
        ((32, 4, 2), 2**64 - 32, "hostile.gguf"),
        ((32, 4, 4), 0, "hostile.gguf"),
        ((32, 4, 70_000), 0, "hostile.gguf"),
    ],
)
def test_sizes_that_overflow_and_offsets_beyond_the_end_are_named(
    tmp_path: pathlib.Path, shape: tuple[int, ...], offset: int, words: str
) -> None:
    path = _write(tmp_path / "hostile.gguf", [(EXPERT, shape, offset)], data=1024)
    with pytest.raises((ms.FormatError, ms.ReadError), match=words):
        ms.plan(path)


def test_text_of_the_file_is_never_a_pattern(tmp_path: pathlib.Path) -> None:
    """A name and values that would keep a backtracking engine busy for years, or not compile at all."""
    evil = b"blk.0.((((a|a)*)*)*)*$[.ffn_up_exps.weight"
    keys: dict[bytes, bytes | int] = {b"general.name": evil, b"tensor_buft_overrides": evil + b"=CPU"}
    path = _write(tmp_path / "regex.gguf", _experts(evil), keys, data=1024)
    begin = time.monotonic()
    for options in ({}, {"cpu_moe": True}, {"n_cpu_moe": 1}, {"stream": True}):
        plan = ms.plan(path, **options)  # type: ignore[arg-type]
        assert [t.name for t in plan.tensors] == [evil.decode()]
        assert not any("a|a" in rule.pattern for rule in plan.rules)
    assert time.monotonic() - begin < 10


@pytest.mark.parametrize("prefix", ["../../etc/x", "/etc/x", "a/../../b"])
def test_no_key_of_the_file_names_another_file(tmp_path: pathlib.Path, prefix: str) -> None:
    """Shards are looked for beside the first one, under its own name, whatever the file says."""
    keys: dict[bytes, bytes | int] = {
        b"split.count": 2, b"split.no": 0, b"split.tensors.count": 1, b"split.prefix": prefix.encode(),
        b"split.path": prefix.encode(), b"general.source": prefix.encode(),
    }  # fmt: skip
    path = _write(tmp_path / "m-00001-of-00002.gguf", _experts(), keys, data=1024)
    with pytest.raises(FileNotFoundError) as caught:
        ms.plan(path)
    assert str(tmp_path / "m-00002-of-00002.gguf") in str(caught.value)


def test_a_shard_that_is_a_link_to_something_else_is_refused(tmp_path: pathlib.Path) -> None:
    """A device, a folder, itself, nothing, or a file that is no model."""
    shards = models.all_shards(models.named("four_shards"))
    for shard in shards:
        shutil.copyfile(shard, tmp_path / shard.name)
    victim = tmp_path / shards[2].name
    for target in ("/dev/zero", "/proc/self/mem", str(tmp_path), str(victim), "/nonexistent", __file__):
        victim.unlink()
        victim.symlink_to(target)
        with pytest.raises((ms.MoestreamError, OSError), match="00003-of-00004"):
            ms.plan(tmp_path / shards[0].name)
        with pytest.raises((ms.MoestreamError, OSError), match="00003-of-00004"):
            ms.Model(tmp_path / shards[0].name, stream=ms.Stream(cache="min"))


@pytest.mark.skipif(platform.machine() != "x86_64", reason="needs x86-64: the numbers of the system calls")
def test_running_a_model_opens_no_socket_and_writes_no_file() -> None:
    """Each such call would kill the process."""
    done = faults.run(
        """
        from support import no_io_uring
        with ms.Model(TINY, use_extra_bufts=False) as model: pass  # numpy and the libraries are loaded
        no_io_uring.kill_on_sockets_and_writes()
        with opened(io="auto", prefetch="on") as model, model.context(256, n_threads=2) as context:
            steps(context)
            model.resize("100%")
            for piece in context.generate([1, 2, 3], 4, ignore_eog=True): pass
        ms.plan(TINY, cpu_moe=True)
        print("done", flush=True)
        os.open("/dev/null", os.O_WRONLY)
        print("not killed", flush=True)
        """,
        check=False,
    )
    assert done.returncode == -31, (done.returncode, done.stdout, done.stderr)  # SIGSYS, by the last line but one
    assert done.stdout.rstrip().endswith("done"), (done.stdout, done.stderr)


def test_a_thousand_hostile_files_leave_nothing(tmp_path: pathlib.Path) -> None:
    """Refused opens of several kinds: descriptors, threads, mappings and the resident set are flat."""
    good = _write(tmp_path / "good.gguf", _experts(), data=1024).read_bytes()
    path = tmp_path / "bad.gguf"

    def once(i: int) -> None:
        cut = bytearray(good[: len(good) - 1 - i * 7 % (len(good) - 8)])
        cut[i * 13 % len(cut)] ^= 1 << i % 8
        path.write_bytes(cut)
        try:
            ms.plan(path)
        except (ms.MoestreamError, OSError, ValueError):
            return

    def count() -> tuple[int, int, int, int]:
        rss = int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        maps = len(pathlib.Path("/proc/self/maps").read_text().splitlines())
        return _entries("fd"), _entries("task"), maps, rss

    for i in range(200):
        once(i)
    before = count()
    for i in range(1000):
        once(i)
    after = count()
    assert after[:2] <= before[:2] and after[2] <= before[2] + 10 and after[3] - before[3] < 4 << 20, (before, after)
