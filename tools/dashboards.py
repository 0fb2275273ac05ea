"""Writes the Grafana dashboards of the chart, helm/rljob/files/dashboards/*.json; ``make generate`` runs it, a test compares.

    python tools/dashboards.py [--check]

A panel is a line of a table below: title, unit, expressions. Units are Grafana's: https://grafana.com/docs/grafana/latest/panels-visualizations.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[1] / "helm" / "rljob" / "files" / "dashboards"
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
COLUMNS = 24
LAST_VALUE = {"reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False}, "orientation": "auto"}
"""The one number a stat or gauge shows of a series."""
OPTIONS: dict[str, dict[str, Any]] = {
    "timeseries": {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
        "tooltip": {"mode": "multi", "sort": "desc"},
    },
    "stat": LAST_VALUE
    | {
        "colorMode": "value",
        "graphMode": "area",
        "justifyMode": "auto",
        "textMode": "auto",
        "wideLayout": True,
        "showPercentChange": False,
        "percentChangeColorMode": "standard",
    },
    "gauge": LAST_VALUE
    | {"showThresholdLabels": False, "showThresholdMarkers": False, "sizing": "auto", "minVizWidth": 75, "minVizHeight": 75},
}
"""All that Grafana's schema requires: what a version assumes for a missing option can change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """A panel; ``queries`` are (expression, legend)."""

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    kind: str = "timeseries"
    width: int = 8
    stacked: bool = False
    note: str = ""


def train(name: str) -> str:
    """A training metric of the chosen jobs."""
    return f'rljob_train_{name}{{namespace=~"$namespace", job=~"$job"}}'


def own(*names: str, prefix: str = "", unit: str = "") -> tuple[tuple[str, str], ...]:
    """Training metrics with their name as the legend."""
    return tuple((train(f"{prefix}{name}{unit}"), f"{name} · {{{{job}}}} a{{{{attempt}}}}") for name in names)


def one(name: str) -> tuple[tuple[str, str], ...]:
    """A training metric, one line a job."""
    return ((train(name), "{{job}} a{{attempt}}"),)


LEFT_S = f"({train('target_steps')} - {train('step')}) * avg_over_time({train('time_step_seconds')}[15m])"
TRAINING: tuple[tuple[str, tuple[Panel, ...]], ...] = (
    (
        "Progress",
        (
            Panel(
                title="Steps done",
                unit="percentunit",
                kind="gauge",
                width=6,
                queries=((f"{train('step')} / {train('target_steps')}", "{{job}}"),),
            ),
            Panel(title="Estimated time remaining", unit="s", kind="stat", width=6, queries=((LEFT_S, "{{job}}"),)),
            Panel(
                title="Time since last progress",
                unit="s",
                kind="stat",
                width=6,
                queries=((f"time() - {train('last_progress_timestamp_seconds')}", "{{job}}"),),
            ),
            Panel(title="Worker restarts in this attempt", unit="short", kind="stat", width=6, queries=one("worker_restarts_total")),
            Panel(title="Reward", unit="short", queries=own("mean", "min", "max", prefix="reward_")),
            Panel(
                title="Pass rate",
                unit="percentunit",
                queries=(*one("reward_pass_rate_ratio"), (train("validation_pass_rate_ratio"), "validation · {{job}}")),
            ),
            Panel(title="Response length", unit="short", queries=own("mean", "max", prefix="response_", unit="_tokens")),
        ),
    ),
    (
        "Where the time goes",
        (
            Panel(
                title="Step time by phase",
                unit="s",
                width=12,
                stacked=True,
                note="Phases that overlap stack above the whole step.",
                queries=own("generate", "reward", "score", "train", "sync", "checkpoint", prefix="time_", unit="_seconds"),
            ),
            Panel(
                title="Trainer idle, engines busy",
                unit="percentunit",
                width=12,
                queries=(
                    (train("overlap_trainer_idle_ratio"), "trainer waits · {{job}}"),
                    (train("overlap_engine_busy_ratio"), "engines' slots in use · {{job}}"),
                ),
            ),
            Panel(title="Tokens per second", unit="short", queries=one("rollout_tokens_per_second")),
            Panel(title="Requests", unit="short", queries=own("running", "waiting", prefix="rollout_requests_")),
            Panel(title="Step time", unit="s", queries=one("time_step_seconds")),
        ),
    ),
    (
        "Learning",
        (
            Panel(title="Loss", unit="short", queries=own("total_loss", "policy_loss", "kl_loss", prefix="train_")),
            Panel(title="Gradient norm", unit="short", queries=one("train_grad_norm")),
            Panel(title="Entropy", unit="short", note="nats per token", queries=one("train_entropy_from_behavior_nats")),
            Panel(
                title="Trainer and engine mismatch",
                unit="short",
                note="KL in nats per token",
                queries=own("k1", "k3", prefix="mismatch_kl_", unit="_nats"),
            ),
            Panel(title="Clipped tokens", unit="percentunit", queries=one("train_clip_ratio")),
            Panel(title="Groups with equal scores", unit="percentunit", queries=one("reward_uniform_groups_ratio")),
        ),
    ),
    (
        "Staleness and weight sync",
        (
            Panel(
                title="Staleness",
                unit="short",
                note="versions",
                queries=(
                    *own("mean", "max", prefix="staleness_", unit="_versions"),
                    (train("staleness_bound_versions"), "bound · {{job}}"),
                ),
            ),
            Panel(
                title="Weight sync",
                unit="s",
                queries=((train("time_sync_seconds"), "whole · {{job}}"), *own("stall", "hidden", prefix="sync_", unit="_seconds")),
            ),
            Panel(title="Bytes per sync", unit="bytes", queries=one("sync_bytes")),
        ),
    ),
    (
        "Memory and failures",
        (
            Panel(
                title="Memory",
                unit="bytes",
                note="Workers that switch, and the driver.",
                queries=(
                    *own("device_peak", "host_rss", "pinned", prefix="memory_", unit="_bytes"),
                    (train("driver_memory_bytes"), "driver · {{job}}"),
                ),
            ),
            Panel(
                title="Lost and replaced",
                unit="short",
                queries=own("engines_lost", "engines_replaced", "environments_replaced", "worker_restarts", unit="_total"),
            ),
            Panel(
                title="Dropped and retried",
                unit="short",
                queries=own("groups_dropped", "rewards_failed", "rewards_timed_out", "syncs_resent", "updates_skipped", unit="_total"),
            ),
        ),
    ),
)

OPERATOR: tuple[tuple[str, tuple[Panel, ...]], ...] = (
    (
        "Jobs",
        (
            Panel(
                title="RLJobs by state",
                unit="short",
                width=16,
                stacked=True,
                queries=(("sum by (reason) (rljob_operator_jobs)", "{{reason}}"),),
            ),
            Panel(title="Active operators", unit="short", kind="stat", width=8, queries=(("sum(rljob_operator_leader)", "leaders"),)),
        ),
    ),
    (
        "Work",
        (
            Panel(title="Queue", unit="short", queries=(("sum(rljob_operator_queue_depth)", "waiting"),)),
            Panel(
                title="Reconcile duration",
                unit="s",
                queries=tuple(
                    (
                        f"histogram_quantile({share}, sum by (le) (rate(rljob_operator_reconcile_seconds_bucket[$__rate_interval])))",
                        f"p{share * 100:g}",
                    )
                    for share in (0.5, 0.99)
                ),
            ),
            Panel(
                title="Reconciles per second",
                unit="ops",
                queries=(("sum(rate(rljob_operator_reconcile_seconds_count[$__rate_interval]))", "all"),),
            ),
            Panel(
                title="Requests to the API server",
                unit="reqps",
                width=16,
                stacked=True,
                queries=(
                    ("sum by (verb, kind, status) (rate(rljob_operator_requests_total[$__rate_interval]))", "{{verb}} {{kind}} {{status}}"),
                ),
            ),
            Panel(
                title="Webhook",
                unit="reqps",
                queries=(("sum by (result) (rate(rljob_operator_webhook_reviews_total[$__rate_interval]))", "{{result}}"),),
            ),
        ),
    ),
    (
        "Failures",
        (
            Panel(
                title="Errors", unit="ops", queries=(("sum by (error) (rate(rljob_operator_errors_total[$__rate_interval]))", "{{error}}"),)
            ),
            Panel(title="Watch age", unit="s", queries=(("max by (kind) (rljob_operator_watch_age_seconds)", "{{kind}}"),)),
            Panel(
                title="Missed and lost",
                unit="short",
                queries=(
                    ("sum by (kind) (increase(rljob_operator_missed_objects_total[1h]))", "missed {{kind}}"),
                    ("sum by (error) (increase(rljob_operator_events_lost_total[1h]))", "event {{error}}"),
                ),
            ),
        ),
    ),
)


def panel_json(panel: Panel, number: int, x: int, y: int, height: int) -> dict[str, Any]:
    """A panel in Grafana's words."""
    custom = {
        "lineWidth": 2,
        "fillOpacity": 40 if panel.stacked else 0,
        "stacking": {"mode": "normal" if panel.stacked else "none"},
        "spanNulls": True,
    }
    defaults: dict[str, Any] = {"unit": panel.unit, "custom": custom}
    if panel.kind != "timeseries":
        # Without a color of its own, Grafana shows every value above 80 in red, such as 90 s of remaining time.
        defaults = {"unit": panel.unit, "color": {"mode": "fixed", "fixedColor": "blue"}}
        defaults |= {"min": 0, "max": 1} if panel.kind == "gauge" else {}
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.note,
        "datasource": DATASOURCE,
        "gridPos": {"x": x, "y": y, "w": panel.width, "h": height},
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": OPTIONS[panel.kind],
        "targets": [
            {"refId": chr(ord("A") + index), "datasource": DATASOURCE, "expr": expression, "legendFormat": legend}
            for index, (expression, legend) in enumerate(panel.queries)
        ],
    }


def dashboard(uid: str, title: str, rows: tuple[tuple[str, tuple[Panel, ...]], ...], variables: list[dict[str, Any]]) -> dict[str, Any]:
    """A dashboard: rows of panels, from left to right and top to bottom."""
    panels: list[dict[str, Any]] = []
    y = 0
    for row_title, row in rows:
        panels.append(
            {
                "id": len(panels) + 1,
                "type": "row",
                "title": row_title,
                "collapsed": False,
                "panels": [],
                "gridPos": _place(0, y, COLUMNS, 1),
            }
        )
        y, x, height = y + 1, 0, 0
        for panel in row:
            if x + panel.width > COLUMNS:
                y, x, height = y + height, 0, 0
            high = 8 if panel.kind == "timeseries" else 5
            panels.append(panel_json(panel, len(panels) + 1, x, y, high))
            x, height = x + panel.width, max(height, high)
        y += height
    source = {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source", "hide": 0}
    return {
        "uid": uid,
        "title": title,
        "tags": ["rljob"],
        "schemaVersion": 39,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "templating": {"list": [source, *variables]},
        "annotations": {"list": []},
        "panels": panels,
    }


def _place(x: int, y: int, width: int, height: int) -> dict[str, int]:
    return {"x": x, "y": y, "w": width, "h": height}


def variable(name: str, query: str) -> dict[str, Any]:
    """A choice among the values of a label."""
    return {
        "name": name,
        "type": "query",
        "label": name.capitalize(),
        "datasource": DATASOURCE,
        "query": {"query": query, "refId": name, "qryType": 1},  # the editor's number of label_values
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": ["All"], "value": ["$__all"]},
        "hide": 0,
    }


def files() -> dict[str, str]:
    """Name and text of each dashboard."""
    choices = [
        variable("namespace", "label_values(rljob_train_step, namespace)"),
        variable("job", 'label_values(rljob_train_step{namespace=~"$namespace"}, job)'),
    ]
    made = {
        "rljob-training.json": dashboard("rljob-training", "RLJob / Training", TRAINING, choices),
        "rljob-operator.json": dashboard("rljob-operator", "RLJob / Operator", OPERATOR, []),
    }
    return {name: json.dumps(content, indent=1, ensure_ascii=False) + "\n" for name, content in made.items()}


def main() -> int:
    """Write, or compare with ``--check``; 1 where something is out of date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, fail when a file is out of date")
    check = parser.parse_args().check
    stale = [name for name, text in files().items() if not (FOLDER / name).exists() or (FOLDER / name).read_text(encoding="utf-8") != text]
    if check and stale:
        sys.stderr.write(f"{', '.join(stale)}: out of date; run: make generate\n")
        return 1
    for name in stale:
        (FOLDER / name).write_text(files()[name], encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
