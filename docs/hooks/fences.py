"""Which parts of a page are code, in which no text is a link."""

import re

CODE = re.compile(
    r"^(?P<fence>`{3,}|~{3,}).*?^(?P=fence)[^\n]*$|(?P<ticks>`+)(?!`).+?(?<!`)(?P=ticks)(?!`)", re.M | re.S
)
"""A fenced block, or a piece between backticks."""
