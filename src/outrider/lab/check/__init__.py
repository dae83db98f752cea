"""The verdict before anyone waits: does this draft, or lookup alone, pay with this target on this machine."""

from outrider.lab.check.check import CheckRequest, check
from outrider.lab.check.report import Report

__all__ = ["CheckRequest", "Report", "check"]
