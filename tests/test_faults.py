"""Planted faults have their places in the code, and their tests: see `tests/faults.py`."""

import ast

from tests.faults import ROOT, planted


def test_every_fault_has_its_place_and_its_tests() -> None:
    faults = planted()
    assert len({fault.name for fault in faults}) == len(faults) >= 44
    for fault in faults:
        ast.parse(fault.applied_to((ROOT / fault.file).read_text()))
        assert fault.breaks
        for test in fault.tests:
            path, *names = test.split("::")
            assert (ROOT / path).exists(), test
            text = (ROOT / path).read_text() if names else ""
            assert all(f"\ndef {name}(" in text for name in names), test
        assert fault.tests
