"""The dashboard in W&B: one saved view with every panel, made once and then updated."""

import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from headstart.cli import main
from headstart.tests.train.report.test_dashboard import PANELS
from headstart.train.report import workspace
from headstart.train.report.dashboard import DASHBOARD


@pytest.mark.filterwarnings("ignore:Pydantic V1 style")  # the library's own
def test_printed_workspace_holds_every_panel_and_contacts_nobody(capsys, monkeypatch):
    pytest.importorskip("wandb_workspaces")
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    assert main(["dashboard", "--print", "--entity", "someone", "--name", "Heads"]) == 0
    text = capsys.readouterr().out
    found = json.loads(text)
    assert (found["entity"], found["project"], found["title"]) == ("someone", "headstart", "Heads")
    sections = found["spec"]["section"]["panelBankConfig"]["sections"]
    assert [section["name"] for section in sections] == list(DASHBOARD)
    for section, panels in zip(sections, DASHBOARD.values()):
        for shown, panel in zip(section["panels"], panels, strict=True):
            config = shown["config"]
            if panel.kind == "line":
                assert (config["metrics"], config["chartTitle"]) == ([panel.key], panel.title)
            elif panel.kind == "lines":
                assert config["metricRegex"] == f"^{panel.key}$"
                assert config["useMetricRegex"] is True
            elif panel.kind == "heat map":
                assert config["mediaKeys"] == [panel.key]
            elif panel.kind == "table":
                assert f'"{panel.key}"' in json.dumps(config)
            elif panel.kind == "bars":
                assert (config["metrics"], config["groupBy"]) == ([panel.key], "family.value")
            else:
                assert shown["viewType"] == "Run Comparer"
    ids = [shown["__id__"] for section in sections for shown in section["panels"]]
    assert len(set(ids)) == len(PANELS)
    assert main(["dashboard", "--print", "--entity", "someone", "--name", "Heads"]) == 0
    assert capsys.readouterr().out == text
    assert main(["dashboard", "--print", "--entity", "someone", "--name", "Other heads"]) == 0
    assert json.loads(capsys.readouterr().out)["name"] != found["name"]


class Wandb(ThreadingHTTPServer):
    """As much of a W&B server as the dashboard needs: one user, projects by name, views by name."""

    def __init__(self, *projects):
        super().__init__(("127.0.0.1", 0), Answers)
        self.views, self.saved = {project: {} for project in projects}, []
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def answer(self, query, variables):
        if "upsertView" in query:
            views = self.views[variables["projectName"]]
            identity = variables.get("id") or f"VIEW{len(views)}"
            views[variables["name"]] = identity
            self.saved.append(variables | {"id": identity})
            return {"upsertView": {"view": {"id": identity, "name": variables["name"]}, "inserted": True}}
        if "allViews" in query:
            views = self.views.get(variables["name"])
            found = [] if views is None or variables["viewName"] not in views else [views[variables["viewName"]]]
            edges = [{"node": {"id": identity}} for identity in found]
            return {"project": None if views is None else {"allViews": {"edges": edges}}}
        return {"viewer": {"id": "U", "entity": "someone", "username": "someone", "teams": {"edges": []}}}


class Answers(BaseHTTPRequestHandler):
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        data = json.dumps({"data": self.server.answer(asked["query"], asked.get("variables") or {})}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


def test_second_call_updates_the_view_of_the_first(logged_out):
    """In a process of its own: the library reads where its server is only once."""
    pytest.importorskip("wandb_workspaces")
    server = Wandb("headstart")
    login = {"WANDB_BASE_URL": f"http://127.0.0.1:{server.server_port}", "WANDB_API_KEY": "0123456789" * 4}
    calls = [[], ["--entity", "someone"], ["--project", "nowhere"]]
    code = f"from headstart.cli import main; print([main(['dashboard', *words]) for words in {calls}])"
    options = {"capture_output": True, "text": True, "timeout": 100, "stdin": subprocess.DEVNULL}
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], env=os.environ | login | {"WANDB_MODE": "offline"}, **options
        )
    finally:
        server.shutdown()
        server.server_close()
    view = workspace.view_id("someone", "headstart", "Headstart")
    assert done.stdout.splitlines() == [f"{login['WANDB_BASE_URL']}/someone/headstart?nw={view}"] * 2 + ["[0, 0, 2]"], (
        done
    )
    assert [saved["id"] for saved in server.saved] == ["VIEW0", "VIEW0"]
    assert [saved["displayName"] for saved in server.saved] == ["Headstart"] * 2
    spec = json.loads(server.saved[1]["spec"])
    names = [section["name"] for section in spec["section"]["panelBankConfig"]["sections"]]
    assert names == list(DASHBOARD)
    assert "W&B knows no project someone/nowhere" in done.stderr


def test_without_a_login_the_command_says_how_to_log_in(logged_out, capsys):
    pytest.importorskip("wandb_workspaces")
    assert main(["dashboard"]) == 2
    assert "wandb login" in capsys.readouterr().err


def test_without_the_package_the_command_says_how_to_install_it(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb_workspaces", None)
    assert main(["dashboard", "--print"]) == 2
    assert 'pip install "wandb-workspaces' in capsys.readouterr().err
