"""A server that speaks OpenAI's chat completions, in a process of its own: python chat_server.py LOG [--option value ...]

It prints its port. It answers with what it was asked, in upper case, and the seed; LOG gets a line of JSON per request. A user turn
that says "too long", "forbidden", "broken", "filtered" or "cut" gets what a server does then.
"""

import argparse
import json
import os
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

parser = argparse.ArgumentParser()
parser.add_argument("log")
parser.add_argument("--port", type=int, default=0)
parser.add_argument("--busy", type=int, default=0)  # the first so many requests get 503
parser.add_argument(
    "--die-after", type=int, default=0
)  # so many answers, then the process is gone in the middle of the next
parser.add_argument("--status", type=int, default=0)  # for every request
parser.add_argument("--location")
options = parser.parse_args()
lock, counts = threading.Lock(), {"requests": 0, "answers": 0}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        key = self.headers.get("Authorization")
        with lock, open(options.log, "a") as log:
            counts["requests"] += 1
            number = counts["requests"]
            log.write(json.dumps({"path": self.path, "key": key, "body": body}) + "\n")
        asked = body["messages"][-1]["content"]
        if options.status:
            return self.reply(options.status, {"error": {"message": "the server's own words"}})
        if number <= options.busy:
            return self.reply(503, {"detail": "still loading"}, {"Retry-After": "0"})
        if asked == "too long":
            said = "This model's maximum context length is 8 tokens. However, you requested 9 tokens."
            return self.reply(400, {"object": "error", "message": said, "code": 400})
        if asked == "forbidden":
            return self.reply(400, {"error": {"message": "roles must alternate"}})
        if asked == "broken":
            return self.reply(200, {"choices": []})
        with lock:
            if options.die_after and counts["answers"] == options.die_after:
                os._exit(1)
            counts["answers"] += 1
        reason = {"filtered": "content_filter", "cut": "length"}.get(asked, "stop")
        message = {"role": "assistant", "content": f"{asked.upper()} {body['seed']}"}
        usage = {"completion_tokens": 7}
        self.reply(200, {"choices": [{"index": 0, "message": message, "finish_reason": reason}], "usage": usage})

    def reply(self, status, content, headers=None):
        content = json.dumps(content).encode()
        self.send_response(status)
        headers = {"Content-Length": str(len(content)), **(headers or {})}
        if options.location:
            headers["Location"] = options.location
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *arguments):
        pass


server = ThreadingHTTPServer(("127.0.0.1", options.port), Handler)
print(server.server_address[1], flush=True)
server.serve_forever()
