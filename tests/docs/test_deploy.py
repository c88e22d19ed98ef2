"""The files in docs/deploy parse and match the server's limits; the Dockerfile's commands build a server."""

from __future__ import annotations

import configparser
import fnmatch
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from support.served import make_image, tiny_model
from vitral.cli.commands.serve import read_keys
from vitral.errors import VitralError
from vitral.serve.hosts import allowed_hosts
from vitral.serve.limits import Limits

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "docs" / "deploy"
FILES = [path for path in DEPLOY.rglob("*.*") if "__pycache__" not in path.parts]  # a test imports from there
PAGE = (ROOT / "docs" / "how-to" / "serve.md").read_text(encoding="utf-8")


def serve_flags() -> set[str]:
    done = subprocess.run(
        [sys.executable, "-m", "vitral", "serve", "--help"], capture_output=True, text=True, check=True
    )
    return set(re.findall(r"--[a-z][a-z-]+", done.stdout))


def test_every_documented_flag_exists():
    documented = set()
    for text in (PAGE, *(path.read_text() for path in FILES)):
        documented |= set(re.findall(r"`(--[a-z][a-z-]+)", text)) | set(re.findall(r'"(--[a-z][a-z-]+)"', text))
    assert documented - {"--cpus"} <= serve_flags()  # --cpus is docker's
    assert {"--keys", "--drain-s", "--max-body-mib"} <= documented


def test_documented_defaults_are_the_defaults():
    for name, value in re.findall(r"`--([a-z-]+) (\d+)`", PAGE):
        if name not in ("cpus", "threads"):
            assert getattr(Limits(), name.replace("-", "_")) == float(value), name


def test_every_deployment_file_is_mentioned_in_the_guide():
    files = {str(path.relative_to(ROOT)) for path in FILES}
    assert {file for file in files if file not in PAGE} <= {"docs/deploy/ray/config.yaml"}


# --- systemd --------------------------------------------------------------------------------------------------------


def test_the_systemd_unit_allows_enough_time_to_stop():
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment, method-assign]  # keep upper case
    unit.read(DEPLOY / "vitral.service")
    words = shlex.split(unit["Service"]["ExecStart"])
    assert words[0].endswith("/bin/vitral")
    assert words[1] == "serve"
    assert {word for word in words if word.startswith("--")} <= serve_flags()
    longest = Limits().drain_s + Limits().body_timeout_s + Limits().request_timeout_s
    assert float(unit["Service"]["TimeoutStopSec"]) > longest
    assert unit["Service"]["DynamicUser"] == "yes"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze here")
def test_systemd_accepts_the_unit(tmp_path):
    text = (DEPLOY / "vitral.service").read_text().replace("/opt/vitral/bin/vitral", sys.executable)
    (tmp_path / "vitral.service").write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", tmp_path / "vitral.service"],
        capture_output=True,
        text=True,
        timeout=240,
    )
    complaints = [line for line in done.stderr.splitlines() if "vitral.service" in line]
    assert complaints == []


# --- Kubernetes -----------------------------------------------------------------------------------------------------


def test_kubernetes_probes_ports_and_grace_period_match_the_server():
    documents = list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))
    kinds = {document["kind"]: document for document in documents}
    assert set(kinds) == {"Secret", "Deployment", "Service", "PodDisruptionBudget"}
    pod = kinds["Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["readinessProbe"]["httpGet"]["path"] == container["startupProbe"]["httpGet"]["path"] == "/readyz"
    assert container["livenessProbe"]["httpGet"]["path"] == "/healthz"
    assert container["ports"][0]["containerPort"] == 8000
    drain = float(container["args"][container["args"].index("--drain-s") + 1])
    assert pod["terminationGracePeriodSeconds"] > drain + Limits().body_timeout_s + Limits().request_timeout_s
    probe = container["readinessProbe"]
    assert drain > probe["periodSeconds"] * probe["failureThreshold"]  # the load balancer notices before draining ends
    labels = kinds["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert kinds["Service"]["spec"]["selector"] == labels == kinds["Deployment"]["spec"]["selector"]["matchLabels"]
    (user,) = re.findall(r"^USER (\d+)", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
    assert pod["securityContext"]["runAsUser"] == int(user)
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}


def test_the_kubernetes_secret_is_a_key_file(tmp_path):
    documents = list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))
    (tmp_path / "keys").write_text(documents[0]["stringData"]["keys"])
    assert read_keys(tmp_path / "keys") == ["replace-me"]
    (tmp_path / "none").write_text("# nothing\n\n")
    with pytest.raises(VitralError, match=r"no (API )?keys"):
        read_keys(tmp_path / "none")


def test_keys_are_read_from_the_environment(monkeypatch):
    monkeypatch.setenv("VITRAL_API_KEYS", "one, two,")
    assert read_keys(None) == ["one", "two"]
    monkeypatch.delenv("VITRAL_API_KEYS")
    assert read_keys(None) is None
    for value in ("", " , "):
        monkeypatch.setenv("VITRAL_API_KEYS", value)
        with pytest.raises(VitralError, match="no API keys in VITRAL_API_KEYS"):
            read_keys(None)


def test_requests_through_the_proxy_and_the_cluster_have_an_allowed_host():
    """Hosts that nginx, ingress, service and probes send, with the flags of the deployment files."""
    (unit,) = re.findall(r"^ExecStart=(.*)$", (DEPLOY / "vitral.service").read_text(), flags=re.MULTILINE)
    words = shlex.split(unit)
    hosts = allowed_hosts("127.0.0.1", words[words.index("--allowed-hosts") + 1].split(","))
    nginx = (DEPLOY / "nginx.conf").read_text()
    assert set(re.findall(r"server_name (\S+);", nginx)) == {"vitral.example"}
    assert hosts.allows("vitral.example")
    assert "://$host" not in nginx  # redirects
    (deployment,) = [
        document
        for document in yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
        if document["kind"] == "Deployment"
    ]
    arguments = deployment["spec"]["template"]["spec"]["containers"][0]["args"]
    hosts = allowed_hosts("0.0.0.0", arguments[arguments.index("--allowed-hosts") + 1].split(","))
    for host in ("10.1.2.3:8000", "[fd00::1]:8000", "vitral", "vitral:80", "vitral.example", "127.0.0.1:8000"):
        assert hosts.allows(host), host
    assert not hosts.allows("attacker.example")


# --- nginx ----------------------------------------------------------------------------------------------------------


def test_nginx_timeouts_match_the_server():
    text = (DEPLOY / "nginx.conf").read_text()

    def seconds(directive: str) -> float:
        return float(re.findall(rf"{directive} (\d+)s;", text)[0])

    assert seconds("proxy_read_timeout") > Limits().body_timeout_s + Limits().request_timeout_s
    assert seconds("    keepalive_timeout") < Limits().keep_alive_s
    assert re.findall(r"client_max_body_size (\d+)m;", text) == [str(Limits().max_body_mib)]
    assert text.count("{") == text.count("}")


@pytest.mark.skipif(shutil.which("nginx") is None, reason="no nginx here")
def test_nginx_accepts_the_configuration(tmp_path):
    """Uses a self-signed certificate."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl here")
    words = "req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=vitral.example -keyout key.pem -out fullchain.pem"
    subprocess.run(["openssl", *words.split()], cwd=tmp_path, check=True, capture_output=True)
    text = (DEPLOY / "nginx.conf").read_text().replace("/etc/ssl/vitral", str(tmp_path))
    (tmp_path / "nginx.conf").write_text(
        f"pid {tmp_path}/pid; error_log stderr; events {{}} http {{ access_log off; {text} }}"
    )
    done = subprocess.run(["nginx", "-t", "-c", tmp_path / "nginx.conf"], capture_output=True, text=True, timeout=240)
    assert "syntax is ok" in done.stderr, done.stderr


# --- Triton and Ray Serve -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> Path:
    """An ONNX export of a small model."""
    onnx_file = pytest.importorskip("vitral.export.onnx_file")
    import torch

    from vitral.runs.model_io import load_model

    place = tmp_path_factory.mktemp("exported")
    model, model_config = load_model(tiny_model(place / "model", ood_threshold=6.0))
    onnx_file.write_onnx(
        place / "model.onnx", model, model_config, "fp32", False, torch.zeros(1, 3, 32, 32, dtype=torch.uint8)
    )
    return place / "model.onnx"


@pytest.mark.slow
def test_triton_config_names_the_tensors_of_an_export(exported):
    import onnxruntime

    session = onnxruntime.InferenceSession(str(exported), providers=["CPUExecutionProvider"])
    text = re.sub(r"#.*", "", (DEPLOY / "triton" / "config.pbtxt").read_text())
    assert text.count("{") == text.count("}")
    assert text.count("[") == text.count("]")
    types = {"tensor(uint8)": "TYPE_UINT8", "tensor(float)": "TYPE_FP32"}
    for kind, tensors in (("input", session.get_inputs()), ("output", session.get_outputs())):
        (block,) = re.findall(rf"^{kind} \[(.*?)^\]", text, flags=re.DOTALL | re.MULTILINE)
        tensors_in_config = re.findall(r'name: "(\w+)"\s+data_type: (\w+)\s+dims: \[ ([\d, ]+) \]', block)
        assert [(name, kind) for name, kind, _ in tensors_in_config] == [(t.name, types[t.type]) for t in tensors]
        for (_, _, dims), tensor in zip(tensors_in_config, tensors, strict=True):
            assert len(dims.split(",")) == len(tensor.shape) - 1  # the batch is Triton's
            assert isinstance(tensor.shape[0], str)  # and of any size


@pytest.mark.slow
def test_ray_deployment_predicts_like_the_model(exported, monkeypatch):
    """Ray is not installed: its decorators are replaced by ones that run each request as a batch."""
    import asyncio
    import importlib.util
    import types

    from starlette.requests import Request

    from vitral.inference.predictor import Predictor

    def batch(**settings):
        def decorate(function):
            async def run_single(self, item):
                return (await function(self, [item]))[0]

            return run_single

        return decorate

    def deployment(kind):
        kind.bind = classmethod(lambda cls, *arguments: cls(*arguments))
        return kind

    ray: Any = types.ModuleType("ray")
    ray.serve = types.SimpleNamespace(batch=batch, deployment=deployment)
    monkeypatch.setitem(sys.modules, "ray", ray)
    config = yaml.safe_load((DEPLOY / "ray" / "config.yaml").read_text())
    (application,) = config["applications"]
    module, function = application["import_path"].split(":")
    spec = importlib.util.spec_from_file_location(module, DEPLOY / "ray" / f"{module}.py")
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    assert hasattr(loaded, application["deployments"][0]["name"])
    classifier = getattr(loaded, function)(application["args"] | {"model": str(exported), "threads": "1"})

    def post(body: bytes):
        async def receive():
            return {"type": "http.request", "body": body, "more_body": False}

        return asyncio.run(classifier(Request({"type": "http", "method": "POST", "headers": []}, receive)))

    predictor = Predictor.load(exported.parent / "model", device="cpu", engine="fp32")
    for seed in range(4):
        response = json.loads(post(make_image(seed)).body)
        prediction = predictor.predict(make_image(seed))
        assert response["ood"] == prediction.is_ood
        assert [label["name"] for label in response["labels"]] == [label.name for label in prediction.labels]
        assert response["labels"][0]["probability"] == pytest.approx(prediction.best.probability, abs=1e-4)
    assert post(b"not an image").status_code == 422
    assert post(b"x" * (32 * 2**20 + 1)).status_code == 413


# --- the Dockerfile -------------------------------------------------------------------------------------------------


def instructions() -> list[tuple[str, str]]:
    text = re.sub(r"\\\n\s*", "", (ROOT / "Dockerfile").read_text())
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(line.split(maxsplit=1)[0], line.split(maxsplit=1)[1]) for line in lines]


def ignored(path: str) -> bool:
    """Whether .dockerignore keeps a path out of the build."""
    out = False
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        pattern = line.strip()
        if not pattern or pattern.startswith("#"):
            continue
        keep = pattern.startswith("!")
        pattern = pattern.lstrip("!").removeprefix("**/")
        parts = path.split("/")
        if any(fnmatch.fnmatch(part, pattern) for part in (parts if "**" in line else parts[:1])):
            out = not keep
    return out


def test_the_dockerfile_matches_the_guide():
    steps = instructions()
    assert [value for kind, value in steps if kind == "USER"] == ["10001:10001"]
    assert any(kind == "HEALTHCHECK" and "/readyz" in value for kind, value in steps)
    assert ("EXPOSE", "8000") in steps
    entry = json.loads(next(value for kind, value in steps if kind == "ENTRYPOINT"))
    assert entry[1] == "serve"
    assert {word for word in entry if word.startswith("--")} <= serve_flags()
    sources = [word for kind, value in steps if kind == "COPY" and "--from" not in value for word in value.split()[:-1]]
    for source in sources:
        assert (ROOT / source).exists(), source
        assert not ignored(source), source
    assert ignored(".git")
    assert ignored("runs")
    assert ignored("src/vitral/__pycache__")


def pip_index() -> str:
    """The package index of this machine, used instead of the Dockerfile's."""
    configured = subprocess.run(
        [sys.executable, "-m", "pip", "config", "get", "global.index-url"], capture_output=True, text=True
    )
    return os.environ.get("PIP_INDEX_URL") or configured.stdout.strip() or "https://pypi.org/simple"


@dataclass(frozen=True, kw_only=True)
class Container:
    """What the Dockerfile leaves behind: files below `root`, environment, working folder and commands."""

    root: Path
    folder: Path
    environment: dict[str, str]
    entrypoint: list[str]
    arguments: list[str]
    health_check: str


def build_container(root: Path, home: Path) -> Container:
    """Run the instructions in order with every path below `root`; no container engine is needed."""
    folder, environment = root, {"PATH": os.environ["PATH"], "HOME": str(home)}
    environment |= {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "SSL_", "REQUESTS_"))}
    environment["PIP_COMPILE"] = "0"  # most modules are never imported
    last: dict[str, str] = {}  # the last instruction of a kind counts
    for kind, argument in instructions():
        last[kind] = argument
        if kind == "ARG":
            environment["TORCH_INDEX"] = pip_index()
        elif kind == "ENV":
            for pair in shlex.split(argument):
                name, _, value = pair.partition("=")
                environment[name] = f"{root}{value}" if value.startswith("/") else value
        elif kind == "WORKDIR":
            folder = root / argument.strip("/")
            folder.mkdir(parents=True, exist_ok=True)
        elif kind == "COPY" and "--from" not in argument:
            copy_into(folder, argument.split())
        elif kind == "RUN":
            command = (
                f'export PATH="{Path(sys.executable).parent}:$PATH"; {argument}' if "venv" in argument else argument
            )
            done = subprocess.run(["sh", "-ec", command], cwd=folder, env=environment, capture_output=True, text=True)
            assert done.returncode == 0, f"{argument}\n{done.stderr[-3000:]}"
    return Container(
        root=root,
        folder=folder,
        environment=environment | {"HOME": "/nonexistent", "OMP_NUM_THREADS": "1"},
        entrypoint=json.loads(last["ENTRYPOINT"]),
        arguments=json.loads(last["CMD"]),
        health_check=last["HEALTHCHECK"].partition("CMD ")[2],
    )


def copy_into(folder: Path, words: list[str]) -> None:
    *sources, target = words
    for source in sources:
        destination = folder / (source if target == "./" else target)
        if (ROOT / source).is_dir():
            shutil.copytree(ROOT / source, destination, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / source, destination)


def wait_for_port(server: subprocess.Popen[bytes], log: Path) -> int:
    """The port in the server's first log line; it was started with port 0."""
    while True:
        assert server.poll() is None, log.read_text()
        for line in log.read_text().splitlines(keepends=True):
            if line.endswith("\n") and json.loads(line)["event"] == "listening":
                return int(json.loads(line)["url"].rpartition(":")[2])
        time.sleep(0.2)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_dockerfile_commands_build_a_working_server(tmp_path, network):
    container = build_container(tmp_path / "root", tmp_path / "home")
    model = tiny_model(container.root / container.arguments[0].strip("/"))
    replaced = {"8000": "0", "0.0.0.0": "127.0.0.1"}
    command = [f"{container.root}{container.entrypoint[0]}", *container.entrypoint[1:], str(model)]
    log = tmp_path / "log"
    with log.open("w") as file:
        server = subprocess.Popen(
            [replaced.get(word, word) for word in command],
            env=container.environment,
            cwd=container.folder,
            stderr=file,
            stdout=file,
        )
    try:
        port = wait_for_port(server, log)
        check = ["sh", "-c", container.health_check.replace(":8000", f":{port}").replace("timeout=2", "timeout=60")]
        while subprocess.run(check, env=container.environment, capture_output=True).returncode:
            assert server.poll() is None, log.read_text()
            time.sleep(0.5)
        url = f"http://127.0.0.1:{port}"
        name = httpx.get(f"{url}/v1/models", timeout=60).json()["models"][0]["name"]
        reply = httpx.post(f"{url}/v1/models/{name}/predict", content=make_image(), timeout=60)
        assert reply.status_code == 200, reply.text
        assert httpx.get(url, timeout=60).status_code == 200  # the wheel contains the web page
        server.terminate()
        assert server.wait(120) == 0, log.read_text()
        assert subprocess.run(check, env=container.environment, capture_output=True).returncode != 0
    finally:
        server.kill()
        server.wait(60)
    assert all(json.loads(line) for line in log.read_text().splitlines())  # JSON lines only, no warnings
