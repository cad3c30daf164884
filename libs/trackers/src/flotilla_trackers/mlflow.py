"""Shows a run in MLflow, on a server or in files.

Invariants: the run is found again by its tag `flotilla.run_id`, so a resumed run continues its line. The configuration
becomes the parameters of the run once, because MLflow takes no other value for one. All metrics of a step are one call.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from flotilla_core.config import MlflowConfig
from flotilla_trackers.tracker import COLUMNS, RunFacts, Tracker

RUN_ID = "flotilla.run_id"
ALLOW_FILES = "MLFLOW_ALLOW_FILE_STORE"
STATUS = {"succeeded": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
NOT_IN_A_NAME = re.compile(r"[^\w\-. :/]")
MOST_PARAMETERS, MOST_METRICS = 100, 1000
"""Limits of one call."""
LONGEST_PARAMETER = 500


class MlflowTracker(Tracker):
    """One run in MLflow."""

    def __init__(self, config: MlflowConfig) -> None:
        self._config = config
        self._client: Any = None
        self._run = ""
        self._tables: list[str] = []

    def start(self, facts: RunFacts) -> str:
        from mlflow.tracking import MlflowClient

        # Its own retries take minutes; the feed tells what fails and tries again by itself.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        # MLflow asks for this where there is no server; its databases need more packages than its client has.
        os.environ.setdefault(ALLOW_FILES, "true")
        of_the_stack = (facts.directory.parent.parent / "mlruns").absolute().as_uri()
        uri = self._config.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or of_the_stack
        self._client = MlflowClient(tracking_uri=uri)
        experiment = self._experiment()
        found = self._client.search_runs([experiment], f"tags.`{RUN_ID}` = '{facts.run_id}'", max_results=1)
        if found:
            self._run = found[0].info.run_id
            self._tables = [table["path"] for table in json.loads(found[0].data.tags.get(TABLES, "[]"))]
            self._client.update_run(self._run, status="RUNNING")
        else:
            tags = {RUN_ID: facts.run_id}
            self._run = self._client.create_run(experiment, tags=tags, run_name=facts.run_id).info.run_id
            self._parameters(facts)
        if uri.startswith("http"):
            return f"{uri.rstrip('/')}/#/experiments/{experiment}/runs/{self._run}"
        return f"{ALLOW_FILES}=true mlflow ui --backend-store-uri {uri}"

    def log(self, step: int, moment: float, metrics: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        entities = (
            Metric(NOT_IN_A_NAME.sub("_", name), value, round(moment * 1000), step)
            for name, value in metrics.items()
        )
        while some := list(islice(entities, MOST_METRICS)):
            self._client.log_batch(self._run, metrics=some)

    def samples(self, step: int, rows: Sequence[Sequence[Any]]) -> None:
        path = f"samples/step-{step:06d}.json"
        self._client.log_dict(
            self._run, {"columns": list(COLUMNS), "data": [list(row) for row in rows]}, path
        )
        if path not in self._tables:
            self._tables = [*self._tables, path][-MOST_TABLES:]
            named = json.dumps([{"path": path, "type": "table"} for path in self._tables])
            self._client.set_tag(self._run, TABLES, named)

    def finish(self, outcome: str) -> None:
        self._client.set_terminated(self._run, status=STATUS[outcome])

    def _experiment(self) -> str:
        from mlflow.exceptions import MlflowException

        name = self._config.experiment
        found = self._client.get_experiment_by_name(name)
        if found is None:
            try:
                return str(self._client.create_experiment(name))
            except MlflowException:  # another run has made it in the meantime
                found = self._client.get_experiment_by_name(name)
                if found is None:
                    raise
        return str(found.experiment_id)

    def _parameters(self, facts: RunFacts) -> None:
        from mlflow.entities import Param

        parameters = (
            Param(NOT_IN_A_NAME.sub("_", name), str(value)[:LONGEST_PARAMETER])
            for name, value in facts.parameters.items()
        )
        while some := list(islice(parameters, MOST_PARAMETERS)):
            self._client.log_batch(self._run, params=some)


TABLES = "mlflow.loggedArtifacts"
"""The tag by which MLflow shows artifacts as tables."""
MOST_TABLES = 50
"""The tag has a limit of 5000 characters; older tables stay artifacts."""
