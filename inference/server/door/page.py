"""The page at `/`: a chat box that shows which tokens were accepted drafts (page.html), and the headers that guard it.

Its content security policy allows the script and the style that it holds, by their digests, and requests to this server. It loads
nothing else, and may not be framed.
"""

import base64
import hashlib
import re
from pathlib import Path

PAGE = Path(__file__).with_name("page.html").read_text(encoding="utf-8")


def _digest_of(tag):
    """What a content security policy names an element of the page by."""
    (content,) = re.findall(rf"<{tag}>(.*?)</{tag}>", PAGE, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"


POLICY = (
    f"default-src 'none'; script-src {_digest_of('script')}; style-src {_digest_of('style')}; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
PAGE_HEADERS = {
    "Content-Type": "text/html; charset=utf-8",
    "Content-Security-Policy": POLICY,
    "Cache-Control": "no-cache",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
