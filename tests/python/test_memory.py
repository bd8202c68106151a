"""Memory: what a streamed model takes, what shrinking gives back, and clear errors first (issue 2, line 6).

Limits by cgroup need root: see tests/system.
"""

from __future__ import annotations

from support import faults

RSS = """
def rss():
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
def status(key):
    for line in open("/proc/self/status"):
        if line.startswith(key + ":"):
            return int(line.split()[1])
path = models.named("mid_430mb")
"""


def test_the_peak_is_dense_weights_cache_and_buffers() -> None:
    """Peak resident set, measured from before the open: at most 5 % above what has to be there."""
    faults.run(
        RSS
        + """
import logging, re
lines = []
class Keep(logging.Handler):
    def emit(self, record):
        lines.append(record.getMessage())
logging.getLogger("llama.cpp").addHandler(Keep())
ms.set_log_level("info")
with opened() as model, model.context(64, n_threads=2, n_batch=16) as context:
    context.decode([1])  # what Python and the libraries need once
gc.collect()
open("/proc/self/clear_refs", "w").write("5")  # the peak begins anew
before, n = rss(), len(lines)
with opened(path, cache="50%") as model, model.context(256, n_threads=2, n_batch=64) as context:
    for i in range(12):
        context.decode(list(range(1 + 7 * i, 65 + 7 * i)), pos=0)
    stats, plan = model.stats(), model.plan
    took = status("VmHWM") * 1024 - before
    said = "\\n".join(lines[n:])
    buffers = {kind: sum(float(x) * 2**20 for x in re.findall(kind + r" buffer size = +([0-9.]+) MiB", said))
               for kind in ("KV", "compute", "output")}
    need = plan.dense_bytes + stats["cache_bytes"] + sum(buffers.values())
    print("took", took, "need", need, "dense", plan.dense_bytes, "cache", stats["cache_bytes"], buffers)
    assert buffers["KV"] > 0 and buffers["compute"] > 0, said
    assert stats["cache_used_bytes"] > 0.95 * stats["cache_bytes"], stats
    assert took <= 1.05 * need, (took, need)
"""
    )


def test_shrinking_the_cache_gives_memory_back_at_once() -> None:
    faults.run(
        RSS
        + """
with opened(path, cache="100%") as model, model.context(64, n_threads=2, n_batch=16) as context:
    for i in range(40):
        context.decode(list(range(1 + 7 * i, 17 + 7 * i)), pos=0)
    used, before = model.stats()["cache_used_bytes"], rss()
    assert used > 100 << 20, used
    model.resize("min")
    assert before - rss() > 0.9 * (used - model.stats()["cache_bytes"]), (before, rss(), used)
"""
    )


def test_address_space_and_descriptor_limits_are_clear_errors() -> None:
    faults.run(
        RSS
        + """
import resource
opened().close()
size = status("VmSize") * 1024
resource.setrlimit(resource.RLIMIT_AS, (size + (200 << 20), resource.RLIM_INFINITY))
try:
    opened(path, cache="100%")
    raise AssertionError("opened beyond the limit")
except ms.OutOfMemoryError as error:
    assert "bytes" in str(error), error
with opened() as model, model.context(64, n_threads=1) as context:
    want = steps(context)
    resource.setrlimit(resource.RLIMIT_AS, (status("VmSize") * 1024 + (1 << 20), resource.RLIM_INFINITY))
    try:
        model.resize("100%")
        raise AssertionError("resized beyond the limit")
    except ms.OutOfMemoryError:
        pass
    context.clear()
    assert same(steps(context), want)  # with the cache it had
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
used = len(os.listdir("/proc/self/fd")) - 1
resource.setrlimit(resource.RLIMIT_NOFILE, (used, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
try:
    opened()
    raise AssertionError("opened without descriptors")
except (ms.MoestreamError, OSError) as error:
    assert "open" in str(error).lower(), error
"""
    )


def test_no_locked_memory_is_needed() -> None:
    faults.run(
        """
        import resource
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))
        want = reference()
        with opened(io="auto") as model, model.context(256, n_threads=2) as context:
            assert same(steps(context), want)
        """
    )


def test_without_huge_pages_everything_works() -> None:
    """Refused for the whole process, as some containers and settings of the machine do."""
    faults.run(
        """
        want = reference()
        PR_SET_THP_DISABLE = 41
        assert _lib.prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0) == 0
        with opened(cache="100%") as model, model.context(256, n_threads=2) as context:
            assert same(steps(context), want)
            model.resize("min"); model.resize("100%")
            context.clear()
            assert same(steps(context), want)
        """
    )


def test_a_thousand_opens_and_closes_leave_nothing() -> None:
    """Descriptors, threads and mappings flat; the resident set within noise."""
    faults.run(
        RSS
        + """
def count():
    maps = len(open("/proc/self/maps").readlines())
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), maps
def once(i):
    with opened(io=("pread", "auto")[i % 2], readers=2) as model:
        if i % 20 == 0:
            with model.context(64, n_threads=2) as context:
                context.decode([1])
for i in range(60):
    once(i)
gc.collect(); time.sleep(0.1)
before, memory = count(), rss()
for i in range(1000):
    once(i)
gc.collect(); time.sleep(0.1)
after, grown = count(), rss() - memory
print(before, after, grown)
assert after[0] == before[0] and after[1] <= before[1] and after[2] <= before[2] + 10, (before, after)
assert grown < 8 << 20, grown
""",
        timeout=120,
    )
