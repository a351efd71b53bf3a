# SPDX-License-Identifier: Apache-2.0
"""Every overlay of ``deploy/k8s``: well-formed for Kubernetes, and what the deployment promises."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import jsonschema
import pytest

from tests.deploy.manifests import (
    OVERLAYS,
    VERSIONS,
    Manifest,
    check,
    manifests,
    named,
    pod_templates,
)

SERVER = "randkv-serving"
GROUP = "randkv-multi-node"
DRAIN_MARGIN = 15
"""Seconds that the engine's own end may take after --shutdown-timeout."""


@pytest.fixture(params=OVERLAYS)
def documents(request: pytest.FixtureRequest) -> list[Manifest]:
    return manifests(request.param)


def containers(documents: list[Manifest]) -> Iterator[tuple[str, Manifest, Manifest]]:
    """(what to call it, pod spec, container) of every container, init containers too."""
    for name, template in pod_templates(documents):
        spec = template["spec"]
        for container in [*spec.get("initContainers", []), *spec["containers"]]:
            yield f"{name}/{container['name']}", spec, container


def options(container: Manifest) -> dict[str, str]:
    """The arguments by name; all of them are written as --name=value or --name."""
    pairs = (argument.partition("=") for argument in container["args"])
    return {name: value for name, _, value in pairs}


# What Kubernetes would say


@pytest.mark.parametrize("version", VERSIONS)
def test_every_manifest_has_the_fields_that_its_schema_knows(
    documents: list[Manifest], version: str
) -> None:
    for document in documents:
        check(document, version)


class Fault(NamedTuple):
    """`key` is set to `value` in what is at `path` of a manifest."""

    overlay: str
    kind: str
    name: str
    path: str
    key: str
    value: Any


CONTAINER = "spec/template/spec/containers/0"
WORKER = "spec/leaderWorkerTemplate/workerTemplate/spec/containers/0"
FAULTS = [
    Fault("gpu", "Deployment", SERVER, CONTAINER, "livenesProbe", {}),
    Fault("cpu", "Deployment", SERVER, "spec/template/spec", "terminationGracePeriod", 60),
    Fault("gpu", "Deployment", SERVER, "spec", "progressDeadlineSeconds", "600"),
    Fault("router", "NetworkPolicy", "randkv-router", "spec", "policyType", ["Ingress"]),
    Fault("gpu", "PodMonitor", SERVER, "spec/podMetricsEndpoints/0", "intervall", "15s"),
    Fault("router", "ScaledObject", SERVER, "spec", "maxReplicas", 4),
    Fault("router", "ScaledObject", SERVER, "spec/triggers/0/metadata", "threshold", 4),
    Fault("multi-node", "LeaderWorkerSet", GROUP, "spec/leaderWorkerTemplate", "restart", "None"),
    Fault("multi-node", "LeaderWorkerSet", GROUP, WORKER, "volumeMount", []),
]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.kind}.{fault.key}")
def test_a_planted_fault_is_found(fault: Fault, version: str) -> None:
    document = named(manifests(fault.overlay), fault.kind, fault.name)
    check(document, version)
    place: Any = document
    for step in fault.path.split("/"):
        place = place[int(step) if step.isdecimal() else step]
    place[fault.key] = fault.value
    with pytest.raises(jsonschema.ValidationError):
        check(document, version)


# What the deployment promises


def test_every_container_runs_without_privileges(documents: list[Manifest]) -> None:
    for name, spec, container in containers(documents):
        pod = spec["securityContext"]
        assert pod["runAsNonRoot"] is True, name
        assert (pod["runAsUser"], pod["runAsGroup"]) == (10001, 10001), name
        assert pod["seccompProfile"] == {"type": "RuntimeDefault"}, name
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }, name
        for field in ("hostNetwork", "hostPID", "hostIPC"):
            assert field not in spec, name
        assert not any("hostPath" in volume for volume in spec["volumes"]), name


def test_every_container_has_requests_and_limits(documents: list[Manifest]) -> None:
    for name, _, container in containers(documents):
        resources = container["resources"]
        assert {"cpu", "memory"} <= resources["requests"].keys(), name
        assert "memory" in resources["limits"], name
        for resource in ("memory", "nvidia.com/gpu"):  # nothing is overcommitted
            assert resources["requests"].get(resource) == resources["limits"].get(resource), name


def test_the_gpus_of_a_pod_are_those_that_the_engine_uses(documents: list[Manifest]) -> None:
    for name, _, container in containers(documents):
        gpus = container["resources"]["limits"].get("nvidia.com/gpu")
        ranks = options(container).get("--tensor-parallel-size", "1")
        assert gpus in (ranks, None), name


def test_every_image_is_pinned(documents: list[Manifest]) -> None:
    for name, _, container in containers(documents):
        image = container["image"]
        pinned = re.search(r"@sha256:[0-9a-f]{64}$", image) or re.search(r":v?\d+\.\d+\.\d+", image)
        assert pinned, f"{name} has image {image}"


def test_probes_ask_the_ports_and_routes_that_answer_without_a_key(
    documents: list[Manifest],
) -> None:
    for name, _, container in containers(documents):
        given = options(container)
        if "--headless" in given:
            assert not [key for key in container if key.endswith("Probe")], name
            continue
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        assert ports["http"] == int(given["--port"]), name
        routes = {
            kind: container[f"{kind}Probe"]["httpGet"]
            for kind in ("startup", "readiness", "liveness")
        }
        assert {get["port"] for get in routes.values()} == {"http"}, name
        if name.endswith("/router"):
            continue
        assert ports["metrics"] == int(given["--metrics-port"]), name
        assert {kind: get["path"] for kind, get in routes.items()} == {
            "startup": "/live",
            "readiness": "/ready",
            "liveness": "/live",
        }, name
        assert "--open-readiness" in given, name
        assert given["--host"] == given["--metrics-host"] == "0.0.0.0", name


def test_a_pod_is_given_the_time_that_draining_takes(documents: list[Manifest]) -> None:
    for name, spec, container in containers(documents):
        given = options(container)
        if "--shutdown-timeout" not in given:
            continue
        pre_stop = container["lifecycle"]["preStop"]["sleep"]["seconds"]
        drained = pre_stop + int(given["--shutdown-timeout"])
        assert spec["terminationGracePeriodSeconds"] >= drained + DRAIN_MARGIN, name


def test_a_worker_outlives_the_draining_of_its_leader() -> None:
    pods = {name: (spec, c) for name, spec, c in containers(manifests("multi-node"))}
    _, leader = pods[f"{GROUP} leader/server"]
    spec, worker = pods[f"{GROUP} worker/worker"]
    sleeps = [c["lifecycle"]["preStop"]["sleep"]["seconds"] for c in (leader, worker)]
    assert sleeps[1] >= sleeps[0] + int(options(leader)["--shutdown-timeout"])
    assert spec["terminationGracePeriodSeconds"] >= sleeps[1] + DRAIN_MARGIN


def test_leader_and_worker_configure_the_same_engine() -> None:
    given = [options(c) for _, _, c in containers(manifests("multi-node"))]
    front_end = {
        *("--host", "--port", "--open-readiness", "--api-keys-file", "--shutdown-timeout"),
        *("--metrics-host", "--metrics-port", "--headless"),
    }
    leader, worker = ({k: v for k, v in one.items() if k not in front_end} for one in given)
    assert leader == worker


def test_a_leader_worker_set_leaves_its_name_to_the_service_it_makes() -> None:
    """The controller makes a headless Service of the set's name."""
    documents = manifests("multi-node")
    names = {d["metadata"]["name"] for d in documents if d["kind"] == "Service"}
    assert GROUP not in names


def test_a_rollout_asks_for_no_spare_gpu(documents: list[Manifest]) -> None:
    for document in documents:
        if document["metadata"]["name"] == SERVER and document["kind"] == "Deployment":
            rolling = document["spec"]["strategy"]["rollingUpdate"]
        elif document["kind"] == "LeaderWorkerSet":
            rolling = document["spec"]["rolloutStrategy"]["rollingUpdateConfiguration"]
        else:
            continue
        assert rolling == {"maxSurge": 0, "maxUnavailable": 1}


def test_only_the_router_has_a_token_of_the_kubernetes_api(documents: list[Manifest]) -> None:
    for name, template in pod_templates(documents):
        mounted = template["spec"]["automountServiceAccountToken"]
        assert mounted is (name == "randkv-router"), name
    for document in documents:
        if document["kind"] == "ServiceAccount":
            assert document["automountServiceAccountToken"] is False


def test_secrets_are_files_of_the_server_alone(documents: list[Manifest]) -> None:
    """No manifest holds one, and none is in an environment but the router's: it takes no file."""
    assert not [d for d in documents if d["kind"] == "Secret"]
    for name, spec, container in containers(documents):
        secret = [
            variable["name"]
            for variable in container.get("env", [])
            if "secretKeyRef" in variable.get("valueFrom", {})
        ]
        assert secret == (["VLLM_API_KEY"] if name.endswith("/router") else []), name
        assert "envFrom" not in container, name
        for volume in spec["volumes"]:
            if "secret" in volume:
                assert volume["secret"]["defaultMode"] == 0o440, name


def test_every_mount_has_its_volume_and_what_is_written_to_can_be(
    documents: list[Manifest],
) -> None:
    for name, spec, container in containers(documents):
        volumes = {volume["name"] for volume in spec["volumes"]}
        mounts = {m["mountPath"]: m["name"] for m in container["volumeMounts"]}
        assert set(mounts.values()) == volumes, name
        if name.endswith("/router"):
            continue
        assert {"/tmp", "/home/randkv", "/dev/shm"} <= mounts.keys(), name
        if "/home/randkv/.cache/huggingface" in mounts:  # else the runtime makes it, as root
            assert "/home/randkv/.cache" in mounts, name


def test_the_api_keys_file_is_mounted_where_the_server_looks(documents: list[Manifest]) -> None:
    for name, spec, container in containers(documents):
        path = options(container).get("--api-keys-file")
        if path is None:
            assert "--metrics-port" not in options(container), f"{name} is open to everybody"
            continue
        folder, _, _ = path.rpartition("/")
        (volume,) = (m["name"] for m in container["volumeMounts"] if m["mountPath"] == folder)
        (secret,) = (v["secret"] for v in spec["volumes"] if v["name"] == volume)
        assert secret["secretName"] == "randkv-api-keys"
        assert not secret.get("optional"), f"{name} would start without keys"


def test_every_pod_is_behind_a_network_policy_for_both_directions(
    documents: list[Manifest],
) -> None:
    policies = [d["spec"] for d in documents if d["kind"] == "NetworkPolicy"]
    for name, template in pod_templates(documents):
        labels = template["metadata"]["labels"].items()
        types = {
            kind
            for policy in policies
            if policy["podSelector"]["matchLabels"].items() <= labels
            for kind in policy["policyTypes"]
        }
        assert types == {"Ingress", "Egress"}, name


def test_the_embedded_model_reaches_nothing() -> None:
    policies = [d["spec"] for d in manifests("cpu") if d["kind"] == "NetworkPolicy"]
    assert [policy["egress"] for policy in policies] == [[]]


def test_behind_the_router_the_api_answers_the_router_alone() -> None:
    documents = manifests("router")
    (rule,) = (
        rule
        for rule in named(documents, "NetworkPolicy", SERVER)["spec"]["ingress"]
        if rule["ports"] == [{"port": 8000}]
    )
    labels = {"app.kubernetes.io/name": "randkv-router"}
    assert rule["from"] == [{"podSelector": {"matchLabels": labels}}]


def test_the_router_selects_the_pods_of_the_server() -> None:
    documents = manifests("router")
    deployments = dict(pod_templates(documents))
    given = options(deployments["randkv-router"]["spec"]["containers"][0])
    label, _, value = given["--k8s-label-selector"].partition("=")
    assert deployments[SERVER]["metadata"]["labels"][label] == value
    assert (
        given["--k8s-namespace"] == named(documents, "Deployment", SERVER)["metadata"]["namespace"]
    )


def test_selectors_find_pods(documents: list[Manifest]) -> None:
    labels = [t["metadata"]["labels"].items() for _, t in pod_templates(documents)]
    injected = "leaderworkerset.sigs.k8s.io/worker-index"  # by the controller
    for document in documents:
        spec = document.get("spec", {})
        selector = spec.get("selector", spec.get("podSelector"))
        if not selector:
            continue
        wanted = dict(selector.get("matchLabels", selector))
        wanted.pop(injected, None)
        assert any(wanted.items() <= have for have in labels), document["metadata"]["name"]


def test_everything_is_in_one_namespace(documents: list[Manifest]) -> None:
    assert {d["metadata"]["namespace"] for d in documents} == {"randkv"}


def test_what_scales_and_what_it_reads_exists() -> None:
    """Metric names are vLLM's own (vllm/v1/metrics/loggers.py); the job is the PodMonitor's."""
    documents = manifests("router")
    scaled = named(documents, "ScaledObject", SERVER)["spec"]
    named(documents, "Deployment", scaled["scaleTargetRef"]["name"])
    monitor = named(documents, "PodMonitor", SERVER)["spec"]
    (template,) = (t for n, t in pod_templates(documents) if n == SERVER)
    job = template["metadata"]["labels"][monitor["jobLabel"]]
    queries = [trigger["metadata"]["query"] for trigger in scaled["triggers"]]
    for query, metric in zip(
        queries, ("vllm:num_requests_waiting", "vllm:num_requests_running"), strict=True
    ):
        assert query == f'sum({metric}{{job="{job}",namespace="randkv"}})'
    assert (
        "replicas" not in named(documents, "Deployment", SERVER)["spec"]
    )  # kubectl would reset it


def test_the_options_are_those_of_the_server(tmp_path: Any) -> None:
    """Parsed by the server's own parser, so a misspelled or removed option is found here."""
    from server.options import parse_arguments

    keys = tmp_path / "keys"
    keys.write_text("k\n")
    variables = {"LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1", "LWS_LEADER_ADDRESS": "leader"}
    seen = set()
    for overlay in OVERLAYS:
        for name, _, container in containers(manifests(overlay)):
            if name.endswith("/router"):
                continue
            arguments = [
                re.sub(r"\$\((\w+)\)", lambda match: variables[match[1]], argument)
                for argument in container["args"]
            ]
            arguments = [
                f"--api-keys-file={keys}" if a.startswith("--api-keys-file=") else a
                for a in arguments
            ]
            if overlay == "cpu":  # the embedded model may not be prepared on this machine
                arguments.append("--model=some/model")
            parsed = parse_arguments(arguments)
            assert (parsed.headless, parsed.shutdown_timeout) == ("--headless" in arguments, 30)
            seen.add(overlay)
    assert seen == set(OVERLAYS)
