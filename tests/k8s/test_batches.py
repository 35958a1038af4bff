"""Where the Batch API keeps its files: a volume, or a store of objects."""

import re
from pathlib import Path
from typing import Any

import pytest

from deployments.config.application import AppConfig
from tests.k8s.cases import with_password
from tests.k8s.engines import (
    Engine,
    Helm3,
    Manifest,
    RefusedError,
    Values,
    application,
    documents,
    ray_service,
    settings_of,
)
from tests.k8s.fake_api import serve
from tests.k8s.schemas import templates_of

ROOM: Values = {"routerGroup": {"rayCpus": 3}}
ONE_POD: Values = {"redis": {"mode": "none"}, "engineGroups": [], **ROOM}


def values(base: Values = ROOM, **batches: Any) -> Values:
    return with_password({**base, "batches": batches})


def claims(text: str) -> dict[str, Manifest]:
    found = [each for each in documents(text) if each["kind"] == "PersistentVolumeClaim"]
    return {each["metadata"]["name"]: each for each in found}


def mounts(text: str) -> dict[str, tuple[str, str]]:
    """Claim and path of the volume of batches, by the group of pods that mounts it."""
    found = {}
    for group, template in templates_of(ray_service(text)).items():
        volumes = [each for each in template["spec"]["volumes"] if each["name"] == "batches"]
        paths = [each for each in template["spec"]["containers"][0]["volumeMounts"] if each["name"] == "batches"]
        for volume, path in zip(volumes, paths, strict=True):
            found[group] = (volume["persistentVolumeClaim"]["claimName"], path["mountPath"])
    return found


def test_a_volume_is_claimed_and_stays_and_the_application_keeps_its_files_there(helm: Engine) -> None:
    text = helm.render(values(volume={"enabled": True, "size": "3Ti", "storageClass": "shared", "mountPath": "/b"}))
    claim = claims(text)["my-sluice-batches"]
    assert claim["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    assert claim["spec"] == {
        "accessModes": ["ReadWriteMany"],
        "storageClassName": "shared",
        "resources": {"requests": {"storage": "3Ti"}},
    }
    assert application(text)["args"]["batches"] == {"folder": "/b"}
    assert AppConfig.model_validate(settings_of(text)).batches.folder == "/b"


def test_only_pods_of_routers_mount_it_for_batches_run_there(helm: Engine) -> None:
    assert mounts(helm.render(values(volume={"enabled": True}))) == {"router": ("my-sluice-batches", "/batches")}


def test_one_pod_mounts_it_for_all(helm: Engine) -> None:
    text = helm.render(values(ONE_POD, volume={"enabled": True}))
    assert mounts(text) == {"head": ("my-sluice-batches", "/batches")}


def test_a_claim_of_ones_own_is_mounted_and_none_is_made(helm: Engine) -> None:
    text = helm.render(values(volume={"enabled": True, "existingClaim": "mine"}))
    assert mounts(text) == {"router": ("mine", "/batches")}
    assert "my-sluice-batches" not in claims(text)


def test_a_store_of_objects_has_its_credentials_in_pods_of_routers_alone(helm: Engine) -> None:
    base = {**ROOM, "extraEnvFrom": [{"configMapRef": {"name": "proxy"}}], "app": {"batches": {"max_open": 7}}}
    text = helm.render(values(base, url="s3://bucket/folder", existingSecret="bucket"))
    assert application(text)["args"]["batches"] == {"folder": "s3://bucket/folder", "max_open": 7}
    assert mounts(text) == {}
    proxy, bucket = {"configMapRef": {"name": "proxy"}}, {"secretRef": {"name": "bucket"}}
    found = {group: pod["spec"]["containers"][0]["envFrom"] for group, pod in templates_of(ray_service(text)).items()}
    assert found == {"head": [proxy], "router": [proxy, bucket], "engine": [proxy]}


def test_without_either_there_is_no_batch_api(helm: Engine) -> None:
    text = helm.render(values())
    assert "batches" not in application(text)["args"]
    assert mounts(text) == {}


ON_A_VOLUME: dict[str, Values] = {
    "the chart's": values(volume={"enabled": True}),
    "a bucket": values(url="s3://bucket"),
    "one of all pods": {
        **values({**ROOM, "app": {"batches": {"folder": "/x/y"}}}),
        "extraVolumeMounts": [{"name": "x", "mountPath": "/x/"}],
    },
    "one of routers": {
        "app": {"batches": {"folder": "/x"}},
        "routerGroup": {"rayCpus": 3, "extraVolumeMounts": [{"name": "x", "mountPath": "/x"}]},
    },
    "the models'": {**ROOM, "app": {"batches": {"folder": "/models/b"}}, "modelCache": {"enabled": True}},
    "no Batch API": ROOM,
}
ON_NONE: dict[str, Values] = {
    "nowhere": {**ROOM, "app": {"batches": {"folder": "/x"}}},
    "beside a volume": {
        **ROOM,
        "app": {"batches": {"folder": "/xy"}},
        "extraVolumeMounts": [{"name": "x", "mountPath": "/x"}],
    },
    "one of routers where those have no pods": {
        **ONE_POD,
        "app": {"batches": {"folder": "/x"}},
        "routerGroup": {"rayCpus": 3, "extraVolumeMounts": [{"name": "x", "mountPath": "/x"}]},
    },
}


@pytest.mark.parametrize(
    ("case", "warns"),
    [(case, False) for case in ON_A_VOLUME] + [(case, True) for case in ON_NONE],
)
def test_notes_warn_of_a_folder_that_is_lost_with_its_pod(tmp_path: Path, case: str, warns: bool) -> None:
    with serve() as (_, kubeconfig):
        (tmp_path / "kubeconfig").write_text(kubeconfig)
        notes = Helm3().notes((ON_A_VOLUME | ON_NONE)[case], tmp_path / "kubeconfig")
    assert "helm -n prod test my" in notes
    assert ("is on no volume: what is uploaded is lost with its pod" in notes) is warns


REFUSED: dict[str, tuple[Values, str]] = {
    "two places": (values(volume={"enabled": True}, url="s3://b"), "batches: set volume.enabled or url, not both"),
    "a volume and a folder": (
        values({**ROOM, "app": {"batches": {"folder": "/x"}}}, volume={"enabled": True}),
        "app.batches.folder is set by batches.volume and batches.url: leave it out",
    ),
    "credentials of no store": (values(volume={"enabled": True}, existingSecret="s"), "set batches.url"),
    "a path for a URL": (values(url="/folder"), "batches"),
    "a store without exclusive creation": (values(url="sftp://host/folder"), "batches"),
    "a volume that nobody may write to": (
        values(volume={"enabled": True, "accessModes": ["ReadOnlyMany"]}),
        "accessModes",
    ),
    "no CPUs left to run them": (values({}, url="s3://b"), "app.batches and app.router ask for 2.1 CPUs"),
}


@pytest.mark.parametrize("mistake", REFUSED)
def test_what_cannot_be_is_refused(helm: Engine, mistake: str) -> None:
    wrong, message = REFUSED[mistake]
    with pytest.raises(RefusedError, match=re.escape(message)):
        helm.render(wrong)
