"""Segments leave nothing behind, are fully allocated, and fall back where /dev/shm is small."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys

import pytest

from slipring.shm.segment import Segment
from tests import dev_shm

SMALL_SHM = """
import logging, os, subprocess, sys
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", "/dev/shm"], check=True)
logging.basicConfig(stream=sys.stdout)
from slipring.shm.segment import Segment
small = Segment.create("small thing", 64 << 10)
large = Segment.create("large thing", 8 << 20)
large.buf[-1] = 7
print("free", os.statvfs("/dev/shm").f_bavail * os.statvfs("/dev/shm").f_bsize)
print("fd", os.readlink(f"/proc/self/fd/{large.fd}"))
"""


def test_nothing_stays_in_dev_shm() -> None:
    before = dev_shm.names()
    segment = Segment.create("test", 1 << 20)
    dev_shm.assert_nothing_new(before)
    assert os.fstat(segment.fd).st_size == 1 << 20
    assert os.fstat(segment.fd).st_blocks * 512 >= 1 << 20, "allocated, not sparse"
    assert os.fstat(segment.fd).st_mode & 0o777 == 0o600
    segment.close(), segment.close()


def test_both_sides_see_the_same_bytes() -> None:
    one = Segment.create("test", mmap.PAGESIZE)
    two = Segment.attach(os.dup(one.fd), mmap.PAGESIZE)
    one.buf[10] = 42
    assert two.buf[10] == 42


def test_descriptors_are_not_inherited_by_accident() -> None:
    segment = Segment.create("test", 4096)
    assert not os.get_inheritable(segment.fd)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small /dev/shm needs root")
def test_a_small_dev_shm_falls_back_and_names_the_fix() -> None:
    unshare = ["unshare", "--mount", sys.executable, "-c", SMALL_SHM]
    result = subprocess.run(unshare, capture_output=True, text=True)
    if "Operation not permitted" in result.stderr:
        pytest.skip("mount namespaces are not allowed here")
    assert result.returncode == 0, result.stderr
    assert "--shm-size" in result.stdout and "large thing" in result.stdout and "small thing" not in result.stdout
    assert "memfd:slipring-large thing" in result.stdout
