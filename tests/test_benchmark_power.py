"""What is told of a GPU's power and clock."""

from __future__ import annotations

from benchmarks.power import summarize


def test_power_counts_what_is_busy() -> None:
    """A sample that nvidia-smi did not finish, and those of an idle GPU, count nowhere."""
    lines = ["345, 120.50, 700.00, Not Active", *[f"{1500 + i}, {690 + i}.25, 700.00, Active" for i in range(21)], "19"]
    assert summarize([*lines, "1980, 400.00, 700.00, Not Active"]) == {
        "samples": 22, "power_limit_watts": 700.0, "watts": [690.3, 699.8, 709.2], "sm_mhz": [1501.0, 1510.5, 1520.0],
        "at_power_limit": 0.955,
    }  # fmt: skip
    assert summarize(lines[:1]) == {"samples": 0}
