"""Keys and types of JobSets and TrainJobs, for which the Kubernetes client has no classes.

Sources: JobSet 0.12's API v1alpha2 and Kubeflow Trainer 2.3's API v1alpha1. A type is a key of
``CUSTOM_KINDS`` or is written as the client writes it.
"""

from __future__ import annotations

_OBJECT = {"apiVersion": "str", "kind": "str", "metadata": "V1ObjectMeta"}
_TEMPLATE = {"metadata": "V1ObjectMeta"}

CUSTOM_KINDS: dict[str, dict[str, str]] = {
    "JobSet": {**_OBJECT, "spec": "JobSetSpec"},
    "JobSetSpec": {
        "replicatedJobs": "list[ReplicatedJob]",
        "network": "Network",
        "successPolicy": "SuccessPolicy",
        "failurePolicy": "FailurePolicy",
        "startupPolicy": "StartupPolicy",
        "suspend": "bool",
        "coordinator": "Coordinator",
        "managedBy": "str",
        "ttlSecondsAfterFinished": "int",
        "volumeClaimPolicies": "list[VolumeClaimPolicy]",
    },
    "VolumeClaimPolicy": {
        "retentionPolicy": "RetentionPolicy",
        "templates": "list[V1PersistentVolumeClaim]",
    },
    "RetentionPolicy": {"whenDeleted": "str"},
    "ReplicatedJob": {
        "name": "str",
        "groupName": "str",
        "replicas": "int",
        "dependsOn": "list[DependsOn]",
        "template": "V1JobTemplateSpec",
    },
    "DependsOn": {"name": "str", "status": "str"},
    "Network": {
        "enableDNSHostnames": "bool",
        "publishNotReadyAddresses": "bool",
        "subdomain": "str",
    },
    "SuccessPolicy": {"operator": "str", "targetReplicatedJobs": "list[str]"},
    "FailurePolicy": {
        "maxRestarts": "int",
        "restartStrategy": "str",
        "rules": "list[FailurePolicyRule]",
    },
    "FailurePolicyRule": {
        "name": "str",
        "action": "str",
        "onJobFailureReasons": "list[str]",
        "onJobFailureMessagePatterns": "list[str]",
        "targetReplicatedJobs": "list[str]",
    },
    "StartupPolicy": {"startupPolicyOrder": "str"},
    "Coordinator": {"replicatedJob": "str", "jobIndex": "int", "podIndex": "int"},
    "TrainJob": {**_OBJECT, "spec": "TrainJobSpec"},
    "TrainJobSpec": {
        "runtimeRef": "RuntimeRef",
        "initializer": "Initializer",
        "trainer": "Trainer",
        "runtimePatches": "list[RuntimePatch]",
        "suspend": "bool",
        "activeDeadlineSeconds": "int",
        "managedBy": "str",
    },
    "RuntimeRef": {"name": "str", "apiGroup": "str", "kind": "str"},
    "Initializer": {"dataset": "InitializerSource", "model": "InitializerSource"},
    "InitializerSource": {
        "storageUri": "str",
        "env": "list[V1EnvVar]",
        "secretRef": "V1LocalObjectReference",
    },
    "Trainer": {
        "image": "str",
        "command": "list[str]",
        "args": "list[str]",
        "env": "list[V1EnvVar]",
        "numNodes": "int",
        "numProcPerNode": "int",
        "resourcesPerNode": "V1ResourceRequirements",
    },
    "RuntimePatch": {
        "manager": "str",
        "time": "datetime",
        "trainingRuntimeSpec": "TrainingRuntimeSpecPatch",
    },
    "TrainingRuntimeSpecPatch": {"template": "JobSetTemplatePatch"},
    "JobSetTemplatePatch": {**_TEMPLATE, "spec": "JobSetSpecPatch"},
    "JobSetSpecPatch": {"replicatedJobs": "list[ReplicatedJobPatch]"},
    "ReplicatedJobPatch": {"name": "str", "template": "JobTemplatePatch"},
    "JobTemplatePatch": {**_TEMPLATE, "spec": "JobSpecPatch"},
    "JobSpecPatch": {"template": "PodTemplatePatch"},
    "PodTemplatePatch": {**_TEMPLATE, "spec": "PodSpecPatch"},
    "PodSpecPatch": {
        "affinity": "V1Affinity",
        "containers": "list[ContainerPatch]",
        "imagePullSecrets": "list[V1LocalObjectReference]",
        "initContainers": "list[ContainerPatch]",
        "nodeSelector": "dict(str, str)",
        "schedulingGates": "list[V1PodSchedulingGate]",
        "securityContext": "V1PodSecurityContext",
        "serviceAccountName": "str",
        "terminationGracePeriodSeconds": "int",
        "tolerations": "list[V1Toleration]",
        "volumes": "list[V1Volume]",
    },
    "ContainerPatch": {
        "name": "str",
        "env": "list[V1EnvVar]",
        "securityContext": "V1SecurityContext",
        "volumeMounts": "list[V1VolumeMount]",
    },
}
"""Types by key of each kind of object, and of each kind of mapping in it."""
