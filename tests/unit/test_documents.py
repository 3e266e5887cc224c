"""The documents for users: their links lead somewhere, and their Python is Python."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted(
    path
    for path in (
        *ROOT.glob("*.md"),
        *(p for top in ("bench", "client", "proto", "systemd") for p in (ROOT / top).rglob("*.md")),
    )
)
LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)")
PYTHON = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def anchors(text):
    """As forges make them of headings."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^a-z0-9 -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path):
    for target, anchor in LINK.findall(path.read_text()):
        if "://" in target:
            continue
        file = path.parent / target if target else path
        assert file.exists(), f"{target} is not there"
        if anchor:
            assert anchor in anchors(file.read_text()), f"{target} has no heading #{anchor}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_examples_are_python(path):
    for block in PYTHON.findall(path.read_text()):
        compile(block, str(path), "exec")
