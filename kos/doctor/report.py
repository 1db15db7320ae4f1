"""The doctor's report as text and JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import kos
from kos.doctor.checks import BAD, OK, TRAINER, Check
from kos.doctor.ranks import Facts
from kos.errors import ranks_in_words


@dataclass
class Report:
    """The findings so far; equal findings of several ranks are one."""

    size: int = 1
    checks: dict[Check, list[int]] = field(default_factory=dict)
    facts: list[Facts] = field(default_factory=list)
    backends: str = ""

    def add(self, per_rank: Sequence[Sequence[Check]], first: int = 0) -> None:
        """Add the checks of every rank, from rank ``first`` on; checks of one name stay together."""
        for rank, checks in enumerate(per_rank, first):
            for check in checks:
                if rank not in (ranks := self.checks.setdefault(check, [])):
                    ranks.append(rank)
        names = list(dict.fromkeys(check.name for check in self.checks))
        self.checks = dict(sorted(self.checks.items(), key=lambda item: names.index(item[0].name)))

    @property
    def bad(self) -> list[str]:
        """Names of the checks that keep these ranks from communicating."""
        return list(dict.fromkeys(check.name for check in self.checks if check.verdict == BAD))

    @property
    def trains(self) -> bool:
        """Whether these ranks can train: they communicate, and all have the trainer's packages."""
        return not self.bad and all(check.name != TRAINER or check.verdict == OK for check in self.checks)

    def to_json(self) -> dict[str, Any]:
        return {
            "kos": kos.__version__,
            "ranks": self.size,
            "will_communicate": not self.bad,
            "will_train": self.trains,
            "checks": [{**asdict(check), "ranks": ranks} for check, ranks in self.checks.items()],
            "backends": self.backends.splitlines(),
            "facts": self.facts,
        }

    def to_text(self) -> str:
        width = max((len(check.name) for check in self.checks), default=0)
        lines, remedies = [], {""}
        for check, ranks in self.checks.items():
            some = f"  ({ranks_in_words(ranks)})" if len(ranks) < self.size else ""
            lines.append(f"{check.verdict:<4} {check.name:<{width}}  {check.found}{some}")
            if check.remedy not in remedies:  # printed once
                lines.append(f"{'':<{width + 7}}-> {check.remedy}")
                remedies.add(check.remedy)
        if self.backends:
            lines += ["", self.backends]
        who = "This rank" if self.size == 1 else f"These {self.size} ranks"
        verdict = (
            f"cannot communicate or train, see: {', '.join(self.bad)}" if self.bad
            else "can communicate and train" if self.trains
            else f"can communicate; to train, see: {TRAINER}"
        )  # fmt: skip
        return "\n".join([*lines, "", f"{who} {verdict}."])
