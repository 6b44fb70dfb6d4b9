"""A node for tests: runs the first container of each pod as a process of this machine.

It registers itself, places pods, mounts their volumes in a private mount namespace, sends SIGTERM
and after the grace period SIGKILL, and serves logs. Instead of an image there are the files of this
machine. Claims are folders below FOLDER/claims, host names of pods lead to 127.0.0.1.

The API server that scripts/kube/build compiles is older than Indexed Jobs, so this node also gives
each pod of a Job the smallest index that no other pod of it has, as the job controller does since
Kubernetes 1.21. It applies the failure policy of Jobs as newer controllers do: FailJob marks the
Job as failed and deletes its other pods, and an ignored pod is removed before the controller counts
it. A pod starts after deleted ones have ended, as with the failure policy of newer Jobs. The file
FOLDER/late/NAME-INDEX has the seconds for which a pod waits for its start.
"""

import argparse
import base64
import contextlib
import json
import os
import re
import shlex
import signal
import ssl
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

NODE = "local"
POLICY = "kube-up/failure-policy"
INDEX = "batch.kubernetes.io/job-completion-index"
CAPACITY = {"cpu": "64", "memory": "512Gi", "pods": "50", "nvidia.com/gpu": "8"}
LABELS = {"pool": "h100"}


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def second() -> str:
    return now()[:19] + "Z"


class Api:
    """Requests to the API server."""

    def __init__(self, server: str, token: str) -> None:
        self.server, self.token = server, token
        self.context = ssl._create_unverified_context()

    def call(self, method: str, path: str, body=None, kind: str = "json"):
        request = urllib.request.Request(
            self.server + path,
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={
                "Authorization": f"Bearer {self.token}",
                "Content-Type": f"application/{kind}",
            },
        )
        with urllib.request.urlopen(request, context=self.context, timeout=10) as answer:
            return json.load(answer)

    def patch(self, path: str, body) -> None:
        self.call("PATCH", path, body, "merge-patch+json")


def path_of(pod) -> str:
    metadata = pod["metadata"]
    return f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}"


def gpus(pod) -> int:
    limits = pod["spec"]["containers"][0].get("resources", {}).get("limits", {})
    return int(limits.get("nvidia.com/gpu", 0))


def place(api: Api, pod, used: int) -> bool:
    """Bind a pod to this node, or say why it does not fit."""
    spec = pod["spec"]
    reasons = []
    if gpus(pod) + used > int(CAPACITY["nvidia.com/gpu"]):
        reasons.append("1 Insufficient nvidia.com/gpu")
    if any(LABELS.get(key) != value for key, value in spec.get("nodeSelector", {}).items()):
        reasons.append("1 node(s) didn't match Pod's node affinity/selector")
    if reasons:
        condition = {
            "type": "PodScheduled",
            "status": "False",
            "reason": "Unschedulable",
            "message": f"0/1 nodes are available: {', '.join(reasons)}.",
        }
        if condition not in pod["status"].get("conditions", []):
            api.patch(f"{path_of(pod)}/status", {"status": {"conditions": [condition]}})
        return False
    binding = {
        "apiVersion": "v1",
        "kind": "Binding",
        "metadata": {"name": pod["metadata"]["name"]},
        "target": {"apiVersion": "v1", "kind": "Node", "name": NODE},
    }
    api.call("POST", f"{path_of(pod)}/binding", binding)
    return True


def owner_of(pod) -> str:
    owners = pod["metadata"].get("ownerReferences", [])
    return next((owner["uid"] for owner in owners if owner["kind"] == "Job"), "")


def action_of(rules, status: int, conditions) -> str:
    """Return the action of the first rule that matches a pod; else ``Count``."""
    true = {each["type"] for each in conditions if each["status"] == "True"}
    for rule in rules:
        codes = rule.get("onExitCodes")
        if codes is not None:
            matches = (status in codes["values"]) == (codes["operator"] == "In")
        else:
            matches = any(each["type"] in true for each in rule["onPodConditions"])
        if matches:
            return rule["action"]
    return "Count"


def is_ending(owner: str, pods) -> bool:
    """Whether a pod of a Job has been deleted and has not ended yet."""
    return bool(owner) and any(
        owner_of(pod) == owner
        and pod["metadata"].get("deletionTimestamp")
        and pod["status"].get("phase") == "Running"
        for pod in pods
    )


class Container:
    """The process of a pod.

    Attributes:
        pod: The pod.
        log: File with the lines of its output, each with its time.
        process: The process; None until it has started.
    """

    def __init__(self, api: Api, folder: Path, pod, hosts: Path) -> None:
        self.api, self.folder, self.pod, self.hosts = api, folder, pod, hosts
        self.process: subprocess.Popen[bytes] | None = None
        self.stopping = False
        self.spec = pod["spec"]["containers"][0]
        self.home = folder / "pods" / pod["metadata"]["name"]
        self.home.mkdir(parents=True, exist_ok=True)
        self.log = self.home / "log"
        self.log.touch()
        threading.Thread(target=self.run, daemon=True).start()

    def run(self) -> None:
        image = self.spec.get("image", "")
        if "missing" in image:
            message = f'Back-off pulling image "{image}"'
            self.post("Pending", {"waiting": {"reason": "ImagePullBackOff", "message": message}})
            return
        self.process = subprocess.Popen(
            ["unshare", "--mount", "--propagation", "private", "bash", "-c", self.script()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=self.environment(),
            start_new_session=True,
        )
        (self.home / "pid").write_text(str(self.process.pid))
        self.post("Running", {"running": {"startedAt": second()}})
        with self.log.open("ab", buffering=0) as log:
            for line in self.process.stdout:
                log.write(f"{now()} ".encode() + line.rstrip(b"\n") + b"\n")
        code = self.process.wait()
        with contextlib.suppress(ProcessLookupError):  # nothing outlives the first process
            os.killpg(self.process.pid, signal.SIGKILL)
        status = code if code >= 0 else 128 - code
        action = self.action(status) if status else "Count"
        if action == "Ignore":
            self.remove()
            return
        ended = {"exitCode": status, "finishedAt": second()}
        if action == "FailJob":
            # The old controller reads the phase; who sees the failed Job finds the status.
            self.post("Running", {"terminated": ended})
            self.fail_job(status)
        self.post("Succeeded" if code == 0 else "Failed", {"terminated": ended})
        if self.stopping:
            self.remove()

    def action(self, status: int) -> str:
        """Return the action of the failure policy of the Job for an exit status of this pod."""
        job, pod = self.send("GET", self.job), self.send("GET", path_of(self.pod))
        policy = ((job or {}).get("metadata", {}).get("annotations") or {}).get(POLICY)
        if policy is None or pod is None:
            return "Count"
        return action_of(json.loads(policy)["rules"], status, pod["status"].get("conditions", []))

    @property
    def job(self) -> str:
        """Path of the Job of the pod."""
        metadata = self.pod["metadata"]
        jobs = f"/apis/batch/v1/namespaces/{metadata['namespace']}/jobs"
        return f"{jobs}/{metadata.get('labels', {}).get('job-name')}"

    def fail_job(self, status: int) -> None:
        """Mark the Job as failed and delete its other pods."""
        name = self.pod["metadata"]["name"]
        message = f"Container {self.spec['name']} of pod {name} failed with exit code {status}"
        failed = {"type": "Failed", "status": "True", "reason": "PodFailurePolicy"}
        change = {"status": {"conditions": [{**failed, "message": message}]}}
        self.send("PATCH", f"{self.job}/status", change)
        time.sleep(1)  # the controller must see it before it sees that the pod has failed
        pods, owner = path_of(self.pod).rpartition("/")[0], owner_of(self.pod)
        for pod in (self.send("GET", pods) or {"items": []})["items"]:
            other, ended = pod["metadata"]["name"], ("Succeeded", "Failed")
            if owner_of(pod) == owner and other != name and pod["status"].get("phase") not in ended:
                self.send("DELETE", path_of(pod))

    def stop(self) -> None:
        """End the process as a kubelet does, and remove the pod."""
        self.stopping = True
        if self.process is None or self.process.poll() is not None:
            self.remove()
            return
        self.process.send_signal(signal.SIGTERM)
        grace = self.pod["metadata"]["deletionGracePeriodSeconds"]

        def kill() -> None:
            if self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGKILL)

        threading.Timer(grace, kill).start()

    def remove(self) -> None:
        body = {"kind": "DeleteOptions", "apiVersion": "v1", "gracePeriodSeconds": 0}
        self.send("DELETE", path_of(self.pod), body)

    def post(self, phase: str, state) -> None:
        container = {
            "name": self.spec["name"],
            "image": self.spec.get("image", ""),
            "imageID": "",
            "ready": phase == "Running",
            "restartCount": 0,
            "state": state,
        }
        conditions = [{"type": "PodScheduled", "status": "True"}]
        status = {
            "phase": phase,
            "podIP": "127.0.0.1",
            "containerStatuses": [container],
            "conditions": conditions,
        }
        self.send("PATCH", f"{path_of(self.pod)}/status", {"status": status})

    def send(self, method: str, path: str, body=None):
        """Repeat a request until the server answers; return None if the object is gone."""
        while True:
            try:
                kind = "merge-patch+json" if method == "PATCH" else "json"
                return self.api.call(method, path, body, kind)
            except urllib.error.HTTPError:
                return None
            except OSError:
                time.sleep(0.5)

    def environment(self) -> dict[str, str]:
        metadata = self.pod["metadata"]
        environment = dict(os.environ)
        for source in self.spec.get("envFrom", []):
            if "secretRef" in source:
                environment |= {
                    key: value.decode()
                    for key, value in self.entries("secrets", source["secretRef"]["name"]).items()
                }
        if INDEX in metadata.get("annotations", {}):
            environment["JOB_COMPLETION_INDEX"] = metadata["annotations"][INDEX]
        for variable in self.spec.get("env", []):
            value = variable.get("value", "")
            if field := variable.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath"):
                match = re.match(r"metadata\.(\w+)(?:\['(.+)'\])?", field)
                value = metadata.get(match[1], "")
                value = value.get(match[2], "") if match[2] else value
            environment[variable["name"]] = value
        return environment

    def entries(self, plural: str, name: str) -> dict[str, bytes]:
        namespace = self.pod["metadata"]["namespace"]
        found = self.api.call("GET", f"/api/v1/namespaces/{namespace}/{plural}/{name}")
        if plural == "configmaps":
            return {key: text.encode() for key, text in found.get("data", {}).items()}
        return {key: base64.b64decode(text) for key, text in found.get("data", {}).items()}

    def script(self) -> str:
        """Return the commands that mount the volumes and become the container's process."""
        lines = [
            "set -e",
            f"mount --bind {shlex.quote(str(self.hosts))} /etc/hosts",
            # Files of the run are mounted below /run, which is empty in a container.
            "mount -t tmpfs tmpfs /run",
        ]
        volumes = {volume["name"]: volume for volume in self.pod["spec"].get("volumes", [])}
        for mount in self.spec.get("volumeMounts", []):
            path, source = mount["mountPath"], self.source(volumes[mount["name"]])
            if source is None:
                continue
            lines.append(f"mkdir -p {shlex.quote(path)}")
            lines.append(f"mount --bind {shlex.quote(str(source))} {shlex.quote(path)}")
            if mount.get("readOnly"):
                lines.append(f"mount -o remount,bind,ro {shlex.quote(path)}")
        command = [*self.spec.get("command", []), *self.spec.get("args", [])]
        return "\n".join([*lines, "cd /tmp", f"exec {shlex.join(command)}"])

    def source(self, volume) -> Path | None:
        """Return the folder of a volume; None for memory, which a process has anyway."""
        if "persistentVolumeClaim" in volume:
            folder = self.folder / "claims" / volume["persistentVolumeClaim"]["claimName"]
            folder.mkdir(parents=True, exist_ok=True)
            return folder
        folder = self.home / volume["name"]
        if "configMap" in volume:
            entries, mode = self.entries("configmaps", volume["configMap"]["name"]), 0o644
        elif "secret" in volume:
            secret = volume["secret"]
            entries, mode = self.entries("secrets", secret["secretName"]), secret["defaultMode"]
        else:
            return None
        folder.mkdir(exist_ok=True)
        for name, content in entries.items():
            (folder / name).write_bytes(content)
            (folder / name).chmod(mode)
        return folder


class Node:
    """The node: its pods, and the loop that looks for new and deleted ones."""

    def __init__(self, api: Api, folder: Path) -> None:
        self.api, self.folder = api, folder
        self.containers: dict[str, Container] = {}
        self.hosts = folder / "hosts"
        self.hosts.write_text(Path("/etc/hosts").read_text())

    def register(self, port: int) -> None:
        try:
            body = {"metadata": {"name": NODE, "labels": LABELS}}
            self.api.call("POST", "/api/v1/nodes", body)
        except urllib.error.HTTPError as error:
            if error.code != 409:
                raise
        status = {
            "addresses": [{"type": "InternalIP", "address": "127.0.0.1"}],
            "daemonEndpoints": {"kubeletEndpoint": {"Port": port}},
            "capacity": CAPACITY,
            "allocatable": CAPACITY,
            "conditions": [{"type": "Ready", "status": "True", "lastHeartbeatTime": second()}],
        }
        self.api.call(
            "PATCH",
            f"/api/v1/nodes/{NODE}/status",
            {"status": status},
            "strategic-merge-patch+json",
        )

    def follow(self) -> None:
        while True:
            try:
                self.look()
            except OSError:  # the API server is not there; HTTP errors too
                time.sleep(0.5)
            time.sleep(0.2)

    def look(self) -> None:
        pods = self.api.call("GET", "/api/v1/pods")["items"]
        running = [pod for pod in pods if pod["spec"].get("nodeName")]
        ended = ("Succeeded", "Failed")
        used = sum(gpus(pod) for pod in running if pod["status"].get("phase") not in ended)
        for pod in pods:
            uid = pod["metadata"]["uid"]
            container = self.containers.get(uid)
            if pod["metadata"].get("deletionTimestamp"):
                if container is not None and not container.stopping:
                    container.pod = pod
                    container.stop()
                elif container is None:
                    body = {"kind": "DeleteOptions", "apiVersion": "v1", "gracePeriodSeconds": 0}
                    self.api.call("DELETE", path_of(pod), body)
            elif not pod["spec"].get("nodeName") and not is_ending(owner_of(pod), pods):
                self.number(pod, pods)
                if self.is_late(pod):
                    continue
                if place(self.api, pod, used):
                    self.name(pod)
                    self.containers[uid] = Container(self.api, self.folder, pod, self.hosts)
                    return  # the others after the use of devices is known

    def is_late(self, pod) -> bool:
        """Whether a pod has to wait for its start."""
        metadata = pod["metadata"]
        job, index = metadata.get("labels", {}).get("job-name"), metadata["annotations"].get(INDEX)
        file = self.folder / "late" / f"{job}-{index}"
        created = datetime.fromisoformat(metadata["creationTimestamp"])
        age = (datetime.now(UTC) - created).total_seconds()
        return file.exists() and age < float(file.read_text())

    def number(self, pod, pods) -> None:
        """Give a pod of a Job its index."""
        owner, annotations = owner_of(pod), pod["metadata"].setdefault("annotations", {})
        if not owner or INDEX in annotations:
            return
        taken = {
            other["metadata"].get("annotations", {}).get(INDEX)
            for other in pods
            if owner_of(other) == owner
            and other["status"].get("phase") != "Failed"
            and not other["metadata"].get("deletionTimestamp")
        }
        annotations[INDEX] = next(str(n) for n in range(len(pods) + 1) if str(n) not in taken)
        change = {"annotations": {INDEX: annotations[INDEX]}, "labels": {INDEX: annotations[INDEX]}}
        self.api.patch(path_of(pod), {"metadata": change})

    def name(self, pod) -> None:
        """Let the host name of a pod of a Job lead to this machine."""
        metadata, subdomain = pod["metadata"], pod["spec"].get("subdomain")
        index = metadata.get("annotations", {}).get(INDEX)
        job = metadata.get("labels", {}).get("job-name")
        host = pod["spec"].get("hostname") or (f"{job}-{index}" if job and index else "")
        if host and subdomain:
            line = f"127.0.0.1 {host}.{subdomain}\n"
            if line not in self.hosts.read_text():
                with self.hosts.open("a") as hosts:
                    hosts.write(line)


def logs_of(folder: Path) -> type[BaseHTTPRequestHandler]:
    """Return what serves the logs of containers, as a kubelet does."""

    class Logs(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            parsed = urllib.parse.urlparse(self.path)
            query = urllib.parse.parse_qs(parsed.query)
            pod = parsed.path.split("/")[3]
            since = query.get("sinceTime", [""])[0]
            self.send_response(200)
            self.end_headers()
            try:
                content = (folder / "pods" / pod / "log").read_bytes()
            except FileNotFoundError:
                return
            for line in content.splitlines(keepends=True):
                time_, _, text = line.partition(b" ")
                if time_.decode()[: len(since) - 1] >= since[:-1]:
                    self.wfile.write(line if "timestamps" in query else text)

        def log_message(self, *arguments) -> None:
            del arguments

    return Logs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--server", required=True)
    arguments = parser.parse_args()
    folder = arguments.folder
    api = Api(arguments.server, (folder / "admin.token").read_text().strip())
    server = ThreadingHTTPServer(("127.0.0.1", 0), logs_of(folder))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "certs" / "apiserver.crt", folder / "certs" / "apiserver.key")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    node = Node(api, folder)

    def leave(*_) -> None:
        for container in node.containers.values():
            if container.process is not None and container.process.poll() is None:
                os.killpg(container.process.pid, signal.SIGKILL)
        os._exit(0)

    signal.signal(signal.SIGTERM, leave)
    node.register(server.server_address[1])
    (folder / "node.ready").touch()
    node.follow()


main()
