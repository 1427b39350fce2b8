"""The site of documents: every page is in the menu, no link leads nowhere, the references hold every public name."""

from __future__ import annotations

import html
import re
import subprocess
from importlib import import_module
from pathlib import Path

import pytest

import callboard

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built strictly."""
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [ROOT / "scripts" / "docs", "--out", folder], capture_output=True, text=True, check=False, timeout=170
    )
    assert built.returncode == 0, built.stderr
    assert "WARNING" not in built.stderr
    return folder


def test_every_page_is_there_and_links_to_pages_only(site: Path) -> None:
    for source in (ROOT / "docs").glob("*.md"):
        assert (site / f"{source.stem}.html").exists()
    for page in site.rglob("*.html"):
        for target in re.findall(r'href="([^"#:]+\.md)', page.read_text()):
            pytest.fail(f"{page.name} links to {target}, which is no page of the site")


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        assert not re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="https?://(?!www\.sitemaps)', page.read_text()), (
            page
        )


def test_the_python_reference_has_every_public_name(site: Path) -> None:
    text = (site / "reference" / "python.html").read_text()
    classes = [name for name in callboard.__all__ if isinstance(getattr(callboard, name), type)]
    assert not [name for name in classes if f'.{name}"' not in text]


def test_the_grpc_reference_has_every_method_and_message(site: Path) -> None:
    text = html.unescape((site / "reference" / "grpc.html").read_text())
    modules = [import_module(f"callboard.v1.{file.stem}_pb2") for file in (ROOT / "protos").rglob("*.proto")]
    assert modules
    for module in modules:
        for service in module.DESCRIPTOR.services_by_name.values():
            assert not [method.name for method in service.methods if f"<code>{method.name}</code>" not in text]
        for name in module.DESCRIPTOR.message_types_by_name:
            assert f'id="{name.lower()}"' in text, name
