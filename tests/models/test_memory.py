"""How much memory there is: the machine's, and what the control groups around a process leave of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tswift.models import devices
from tswift.models.devices import available_bytes, gigabytes

CPU = torch.device("cpu")
MEMINFO = "MemTotal:       24000000 kB\nMemFree:         1000000 kB\nMemAvailable:    8000000 kB\n"
STAT = "anon 100\nfile 900\ninactive_anon 1\nactive_anon 2\ninactive_file 300\nactive_file 200\n"
UNLIMITED = 9_223_372_036_854_771_712


def left(monkeypatch: pytest.MonkeyPatch, root: Path, files: dict[str, str]) -> int | None:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    monkeypatch.setattr(devices, "_ROOT", root)
    return available_bytes(CPU)


def test_a_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert left(monkeypatch, tmp_path, {}) is None
    assert left(monkeypatch, tmp_path, {"proc/meminfo": "MemTotal: 5 kB\n"}) is None
    assert left(monkeypatch, tmp_path, {"proc/meminfo": MEMINFO}) == 8_192_000_000


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({}, 8_192_000_000),
        ({"": ("max", "7000")}, 8_192_000_000),
        ({"": ("1000000", "7000")}, 993_500),
        ({"": ("6000", "7000")}, 0),
        ({"jobs/one": ("5000", "1000"), "jobs": ("4000", "2000"), "": ("max", "9000")}, 2500),
        ({"jobs/one": ("5000", "1000"), "jobs": ("9000", "2000")}, 4500),
        ({"jobs/two": ("5000", "1000")}, 8_192_000_000),
    ],
)
def test_version_2(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, limits: dict[str, tuple[str, str]], expected: int
) -> None:
    files = {"proc/meminfo": MEMINFO, "proc/self/cgroup": "0::/jobs/one\n"}
    for group, (limit, used) in limits.items():
        folder = f"sys/fs/cgroup/{group}"
        files |= {f"{folder}/memory.max": f"{limit}\n", f"{folder}/memory.current": f"{used}\n"}
        files |= {f"{folder}/memory.stat": STAT}
    assert left(monkeypatch, tmp_path, files) == expected


@pytest.mark.parametrize(("limit", "expected"), [(2_000_000, 1_999_500), (UNLIMITED, 8_192_000_000)])
@pytest.mark.parametrize("group", ["docker/abc", ""])  # in a container, what the process is told is not what it sees
def test_version_1(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, limit: int, expected: int, group: str) -> None:
    folder = f"sys/fs/cgroup/memory/{group}"
    files = {
        "proc/meminfo": MEMINFO,
        "proc/self/cgroup": "9:name=systemd:/\n4:cpu,memory:/docker/abc\n2:cpuacct:/\n0::/\n",
        f"{folder}/memory.limit_in_bytes": f"{limit}\n",
        f"{folder}/memory.usage_in_bytes": "1000\n",
        f"{folder}/memory.stat": STAT.replace("inactive_file 300", "total_inactive_file 400")
        .replace("\nactive_file 200", "\ntotal_active_file 100"),
    }  # fmt: skip
    assert left(monkeypatch, tmp_path, files) == expected


def test_files_that_cannot_be_made_sense_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    files = {"proc/meminfo": MEMINFO, "proc/self/cgroup": "0::/../../x\n"}
    assert left(monkeypatch, tmp_path, {**files, "sys/fs/cgroup/memory.max": "", "sys/fs/cgroup/memory.current": "5"})
    (tmp_path / "sys/fs/cgroup/memory.max").unlink()
    (tmp_path / "sys/fs/cgroup/memory.max").mkdir()
    assert available_bytes(CPU) == 8_192_000_000


def test_this_machine() -> None:
    free = available_bytes(CPU)
    assert free is None or free > 10_000_000
    assert gigabytes(1_500_000_000) == "1.50 GB"
