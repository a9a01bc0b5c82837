"""The page at `/`: served without a key, and guarded so that nothing but its own script runs in it."""

import base64
import hashlib
import re

import httpx

from headstart.tests.inference.server.serving import running


def test_the_page_needs_no_key_and_all_else_does(speculative):
    with running(speculative(), api_keys=("secret",)) as server, httpx.Client(base_url=server.url) as http:
        page = http.get("/")
        assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
        assert page.headers["x-content-type-options"] == "nosniff"
        assert "secret" not in page.text
        assert server.llm.model_name not in page.text
        for path in ("/v1/models", "/?/v1/models", "/index.html"):
            assert http.get(path).status_code == (200 if path.startswith("/?") else 401), path
        assert http.post("/").status_code == 405
        assert http.head("/").status_code == 200  # as a load balancer asks


def test_its_policy_allows_its_own_script_and_nothing_else(http):
    page = http.get("/")
    policy = {name: values for name, *values in map(str.split, page.headers["content-security-policy"].split(";"))}
    for tag in ("script", "style"):
        (content,) = re.findall(f"<{tag}>(.*?)</{tag}>", page.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert policy[f"{tag}-src"] == [f"'sha256-{digest}'"]
        assert page.text.count(f"<{tag}") == 1
    assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == ["'none'"]
    assert policy["connect-src"] == ["'self'"]
    assert set(policy) == {
        "default-src", "script-src", "style-src", "connect-src", "base-uri", "form-action", "frame-ancestors",
    }  # fmt: skip


def test_text_is_only_ever_set_as_text(http):
    """Neither markup from strings, nor handlers and styles in attributes, nor anything from elsewhere."""
    text = http.get("/").text
    for forbidden in (
        "innerHTML",
        "outerHTML",
        "insertAdjacent",
        "document.write",
        "eval(",
        "http:",
        "https:",
        "src=",
        "href=",
    ):
        assert forbidden not in text
    assert not re.search(r"<[^>]+\s(on\w+|style)=", text)
