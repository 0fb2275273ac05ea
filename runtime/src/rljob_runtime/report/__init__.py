"""What a user sees and keeps of a run: live display, metrics, timeline, trajectories, report, summary.

The driver uses ``Reporter``; everything else here is a part of it. Nothing in this package imports ray or torch.
"""

from rljob_runtime.report.choose_display import make_display
from rljob_runtime.report.display import Display, Displays, Level, PhaseView, PlainDisplay, RunInfo
from rljob_runtime.report.folder import FolderMode, RunFolder
from rljob_runtime.report.metrics import MetricsTable, load_metrics
from rljob_runtime.report.names import METRICS, MetricInfo, UnknownMetricError, markdown_table
from rljob_runtime.report.reporter import Reporter
from rljob_runtime.report.summary import RunStatus, RunSummary, load_summary
from rljob_runtime.report.trajectories import Decode, TrajectorySampling

__all__ = [
    "METRICS",
    "Decode",
    "Display",
    "Displays",
    "FolderMode",
    "Level",
    "MetricInfo",
    "MetricsTable",
    "PhaseView",
    "PlainDisplay",
    "Reporter",
    "RunFolder",
    "RunInfo",
    "RunStatus",
    "RunSummary",
    "TrajectorySampling",
    "UnknownMetricError",
    "load_metrics",
    "load_summary",
    "make_display",
    "markdown_table",
]
