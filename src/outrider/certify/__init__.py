"""The certificate: tests that speculation did not change the output, and what they found."""

from outrider.certify.certificate import (
    SCHEMA,
    Certificate,
    as_json,
    model_files,
    reasons,
    totals,
    write_certificate,
)
from outrider.certify.checks import certify
from outrider.certify.faults import FAULTS, check_fault
from outrider.certify.plan import Findings, Plan, Progress, Subject
from outrider.certify.prompts import BUILT_IN
from outrider.lab.machine import machine, versions

__all__ = [
    "BUILT_IN",
    "FAULTS",
    "SCHEMA",
    "Certificate",
    "Findings",
    "Plan",
    "Progress",
    "Subject",
    "as_json",
    "certify",
    "check_fault",
    "machine",
    "model_files",
    "reasons",
    "totals",
    "versions",
    "write_certificate",
]
