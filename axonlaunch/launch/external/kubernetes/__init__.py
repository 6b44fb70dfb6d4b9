"""Runs as Jobs, JobSets and TrainJobs of Kubernetes."""
