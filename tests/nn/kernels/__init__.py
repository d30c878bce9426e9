"""GPU kernels against torch's operations, in Triton's interpreter: no GPU is needed."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)


def interpreted(code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", "-c", code]
    variables = {**os.environ, "TRITON_INTERPRET": "1"}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, env=variables, check=False
    )
