"""The browser, as in tests/report."""

from tests.report.conftest import browser

__all__ = ["browser"]
