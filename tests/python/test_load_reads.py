"""Loading reads the dense weights and next to nothing of the experts, and not through the map (issue 2, line 5)."""

from __future__ import annotations

from support import faults

CODE = """
path = models.named("mid_430mb")
plan = ms.plan(path, stream=True)
def resident_pages():
    # bytes of the model's file that this process has mapped and present
    total = here = 0
    for line in open("/proc/self/smaps"):
        if "-" in line.split(" ")[0] and ":" not in line.split(" ")[0]:
            here = str(path) in line
        elif here and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total
with open(path, "rb") as f:
    os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
faults("pread:path=.gguf")
"""


def test_a_streamed_load_reads_under_2_percent_of_the_expert_bytes() -> None:
    faults.run(
        CODE
        + """
with opened(path) as model:
    stats = model.stats()
    mapped = resident_pages()
    read = read_bytes(0)
    print("read", read, "mapped", mapped, "dense", plan.dense_bytes, "experts", plan.expert_bytes)
    assert stats["load_expert_bytes"] < 0.02 * plan.expert_bytes
    assert read - plan.dense_bytes < 0.02 * plan.expert_bytes
    assert read > 0.5 * plan.dense_bytes  # the rig saw the load
    assert mapped < 0.02 * plan.expert_bytes
"""
    )


def test_a_load_without_streaming_reads_nothing_of_ours_and_maps_as_upstream_does() -> None:
    """The same count finds the whole file: the policy is on for streamed loads only."""
    faults.run(
        CODE
        + """
opened(path).close()
faults("pread:path=.gguf")
model = ms.Model(path)
assert resident_pages() > 0.9 * plan.expert_bytes, resident_pages()
assert read_bytes(0) < 0.02 * plan.expert_bytes
"""
    )
