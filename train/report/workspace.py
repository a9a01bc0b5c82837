"""The dashboard (train/report/dashboard.py) as a saved view of a W&B project: `headstart dashboard`.

The view's name in W&B follows from entity, project and title, so a second call finds the view of the first and replaces its
content. Changes made by hand in the browser are lost. It needs the `dashboard` extra (wandb-workspaces) and a login.

It does not make the project, which the first run logged online makes, and it touches no run.
"""

import hashlib
import json
import os

from ..run.wandb_login import wandb_mode
from .dashboard import DASHBOARD

PROJECT = "headstart"  # the trainers' own
TITLE = "Headstart"
INSTALL = 'pip install "wandb-workspaces>=0.4.13,<0.5"'  # content of the extra `dashboard`

# W&B's own words for a view: the type of a saved workspace, and the form of its names.
FIND_VIEW = """
query View($entityName: String, $name: String, $viewName: String) {
    project(name: $name, entityName: $entityName) {
        allViews(viewType: "project-view", viewName: $viewName) { edges { node { id } } }
    }
}
"""


def build_view(entity, project, title):
    """The view as wandb-workspaces sends it: the same bytes on every call. Sends nothing.

    Raises ValueError if wandb-workspaces is not installed, or W&B does not accept the title.
    """
    workspaces, panels, internal = _import()
    sections = [
        workspaces.Section(
            name=name,
            panels=[_panel(panels, panel) for panel in described],
            is_open=True,
            # Only a table needs the width of the page.
            layout_settings=workspaces.SectionLayoutSettings(columns=min(3, len(described)), rows=2),
        )
        for name, described in DASHBOARD.items()
    ]
    view = workspaces.Workspace(entity=entity, project=project, name=title, sections=sections)._to_model()
    view.name = internal._url_query_str_to_internal_name(view_id(entity, project, title))
    # The library draws these at random.
    bank = view.spec.section.panel_bank_config
    for section in bank.sections:
        for i, panel in enumerate(section.panels):
            panel.id = _short_hash(section.name, str(i))
    view.spec.section.run_sets[0].id = _short_hash("runs")
    return view


def view_id(entity, project, title):
    """The view's id in its URL, `?nw=<id>`: 11 letters and digits, in W&B's form."""
    return _short_hash(entity, project, title)


def view_json(view):
    """The view as JSON text, for reading and for comparing."""
    spec = json.loads(view.spec.model_dump_json(by_alias=True, exclude_none=True))
    content = {"entity": view.entity, "project": view.project, "name": view.name, "title": view.display_name}
    return json.dumps(content | {"spec": spec}, indent=2, ensure_ascii=False)


def save_dashboard(entity, project, title):
    """Make or update the view online and return its URL.  entity: user or team; "" for W&B's default

    Raises ValueError if the machine is not logged in, the project does not exist, or W&B refuses.
    """
    _import()
    import wandb
    from wandb.sdk.lib.service.service_connection import WandbApiFailedError
    from wandb_workspaces._graphql import execute_graphql, get_app_url
    from wandb_workspaces.workspaces import internal

    # WANDB_MODE is only for runs; without a key or a login the library would ask for one.
    if wandb_mode({name: value for name, value in os.environ.items() if name != "WANDB_MODE"}) != "online":
        raise ValueError(
            "W&B is not logged in here: run `wandb login`, or set WANDB_API_KEY; --print shows the workspace without"
        )
    try:
        api = wandb.Api()
        entity = entity or api.default_entity
        if not entity:
            raise ValueError("this W&B login has no default entity: name the user or team with --entity")
        view = build_view(entity, project, title)
        names = {"entityName": entity, "name": project, "viewName": view.name}
        found = execute_graphql(api, FIND_VIEW, names).get("project")
        if found is None:
            raise ValueError(
                f"W&B knows no project {entity}/{project}: log a run online first, or name it with --entity and --project"
            )
        edges = found["allViews"]["edges"]
        view.id = edges[0]["node"]["id"] if edges else ""
        internal.upsert_view2(view)
        app = get_app_url(api).rstrip("/")
    except (wandb.errors.Error, WandbApiFailedError, OSError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(f"W&B does not take the dashboard: {reason}") from error
    return f"{app}/{entity}/{project}?nw={view_id(entity, project, title)}"


def _import():
    try:
        import wandb_workspaces.reports.v2 as panels
        from wandb_workspaces import workspaces
        from wandb_workspaces.workspaces import internal
    except ImportError as error:
        raise ValueError(
            f"wandb-workspaces, which makes W&B dashboards, cannot be imported ({error}): {INSTALL}"
        ) from error
    return workspaces, panels, internal


def _panel(panels, panel):
    """The library's object for a panel of ours."""
    if panel.kind == "line":
        return panels.LinePlot(title=panel.title, y=[panel.key], title_y=panel.label)
    if panel.kind == "lines":
        return panels.LinePlot(title=panel.title, metric_regex=f"^{panel.key}$", title_y=panel.label)
    if panel.kind == "heat map":
        return panels.MediaBrowser(title=panel.title, media_keys=[panel.key], num_columns=1)
    if panel.kind == "table":
        return panels.WeavePanelSummaryTable(table_name=panel.key)
    if panel.kind == "bars":
        grouped = {"groupby": panels.Config("family"), "groupby_aggfunc": "mean"}
        return panels.BarPlot(title=panel.title, metrics=[panel.key], title_x=panel.label, **grouped)
    assert panel.kind == "recipes", panel
    return panels.RunComparer(diff_only="split")


def _short_hash(*words):
    """11 of the digits and small letters that W&B's ids are made of."""
    number, letters = int.from_bytes(hashlib.sha256("\n".join(words).encode()).digest()), ""
    for _ in range(11):
        number, digit = divmod(number, 36)
        letters += "0123456789abcdefghijklmnopqrstuvwxyz"[digit]
    return letters
