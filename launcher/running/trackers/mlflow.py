"""MLflow: one run of an experiment, on the server or in the store that MLFLOW_TRACKING_URI names."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence

from mlflow import MlflowClient
from mlflow.entities import Metric, Param, RunTag
from mlflow.exceptions import MlflowException

from launcher.running.scalars import Record, flat
from launcher.running.trackers import Ending, Subject

MOST_METRICS, MOST_PARAMS, LONGEST = 1000, 100, 500  # of one request; characters of a value
STATES = {"done": "FINISHED", "failed": "FAILED"}


def start(subject: Subject) -> MlflowRun:
    """Open the run, or the same one again after a resume."""
    # MLflow 3.17 refuses a folder as its store, also where MLFLOW_TRACKING_URI names one.
    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
    return MlflowRun(subject)


class MlflowRun:
    """A run in MLflow's store."""

    def __init__(self, subject: Subject) -> None:
        self._client = MlflowClient()
        self.id: str = subject.id if subject.id and self._reopen(subject.id) else self._create(subject)
        self.where: str | None = f"run {self.id} in {self._client.tracking_uri}, experiment {subject.project}"

    def log(self, records: Sequence[Record]) -> None:
        """Send, in as few requests as the server allows."""
        metrics = [
            Metric(_allowed(name), value, int(record.time * 1000), record.step)
            for record in records
            for name, value in record.values.items()
        ]
        for first in range(0, len(metrics), MOST_METRICS):
            self._client.log_batch(self.id, metrics=metrics[first : first + MOST_METRICS])

    def finish(self, ending: Ending) -> None:
        """Set the state and the best numbers."""
        now = int(time.time() * 1000)
        best = [Metric(_allowed(f"best/{name}"), value, now, 0) for name, value in ending.best.items()]
        tags = [RunTag("outcome", ending.status), *([RunTag("failure", ending.text[:LONGEST])] if ending.text else [])]
        self._client.log_batch(self.id, metrics=best, tags=tags)
        self._client.set_terminated(self.id, STATES.get(ending.status, "KILLED"))

    def _reopen(self, run_id: str) -> bool:
        """Whether the store still has the run; it may have been deleted, or MLFLOW_TRACKING_URI be another."""
        try:
            self._client.update_run(run_id, status="RUNNING")
        except MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                return False
            raise
        return True

    def _create(self, subject: Subject) -> str:
        experiment = self._client.get_experiment_by_name(subject.project)
        experiment_id = experiment.experiment_id if experiment else self._client.create_experiment(subject.project)
        run_id: str = self._client.create_run(experiment_id, run_name=subject.name).info.run_id
        params = [Param(_allowed(key), str(value)[:LONGEST]) for key, value in flat(subject.config).items()]
        for first in range(0, len(params), MOST_PARAMS):
            self._client.log_batch(run_id, params=params[first : first + MOST_PARAMS])
        return run_id


def _allowed(name: str) -> str:
    """A name that MLflow takes: eval/ndcg@10 becomes eval/ndcg_at_10."""
    return re.sub(r"[^\w./: -]", "_", name.replace("@", "_at_"))
