"""docs/operating.md: its units and its configuration fit the server's options, and its health check restarts on 503 alone."""

import configparser
import http.server
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import yaml

from headstart.cli import build_parser, with_dashes
from headstart.commands.config_file import with_config

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "operating.md"
BLOCKS = {
    Path(path).name: text
    for path, text in re.findall(r"```(?:ini|yaml)\n# (\S+)\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
}
SERVER, HEALTH, TIMER = "headstart@.service", "headstart-health@.service", "headstart-health@.timer"


def section(unit, name):
    parser = configparser.ConfigParser(interpolation=None, strict=False)
    parser.optionxform = str
    parser.read_string(BLOCKS[unit])
    return parser[name]


def test_the_command_of_the_unit_is_parsed_with_its_configuration(tmp_path):
    command = shlex.split(section(SERVER, "Service")["ExecStart"].replace("%i", "3"))
    path = tmp_path / "serve.yaml"
    path.write_text(BLOCKS["serve.yaml"])
    words = with_config(with_dashes([str(path) if word.endswith("serve.yaml") else word for word in command[1:]]))
    arguments, unknown = build_parser(words).parse_known_args(words)
    assert unknown == []
    assert arguments.port == 8003
    assert arguments.shutdown_timeout + 4 < float(section(SERVER, "Service")["TimeoutStopSec"])
    for name, value in yaml.safe_load(BLOCKS["serve.yaml"]).items():
        assert getattr(arguments, name.replace("-", "_")) == value
    assert arguments.request_timeout < float(re.search(r"proxy_read_timeout (\d+)s", DOCUMENT.read_text())[1])


def test_systemd_takes_the_units(tmp_path):
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    for name in (SERVER, HEALTH, TIMER):
        text = BLOCKS[name].replace("/opt/headstart/bin/headstart", sys.executable)
        (tmp_path / name).write_text(text)
    units = [str(tmp_path / name.replace("@", "@0")) for name in (SERVER, HEALTH, TIMER)]
    for unit, name in zip(units, (SERVER, HEALTH, TIMER)):
        shutil.copy(tmp_path / name, unit)
    done = subprocess.run(["systemd-analyze", "verify", "--man=no", *units], capture_output=True, text=True)
    assert [line for line in done.stderr.splitlines() if "headstart" in line or str(tmp_path) in line] == []


@pytest.mark.parametrize(("status", "restarted"), [(503, True), (200, False), (500, False), (None, False)])
def test_the_health_check_restarts_on_503_alone(status, restarted, tmp_path):
    """None: nobody listens, as while the engine is built."""
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    called = tmp_path / "called"
    (tmp_path / "systemctl").write_text(f'#!/bin/sh\necho "$@" > {called}\n')
    (tmp_path / "systemctl").chmod(0o755)

    class Answer(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Answer) as server:
        port = server.server_port
        if status is not None:
            threading.Thread(target=server.handle_request, daemon=True).start()
        else:
            server.server_close()
        line = section(HEALTH, "Service")["ExecStart"]
        words = shlex.split(line.replace("800%i", str(port)).replace("%i", "0").replace("%%", "%"))
        path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
        done = subprocess.run(words, env={**os.environ, "PATH": path}, capture_output=True, text=True, timeout=20)
    assert (done.returncode, done.stderr) == (0, "")
    assert called.exists() == restarted
    if restarted:
        assert called.read_text() == "try-restart headstart@0.service\n"
