"""Pipeline parallelism: model splitting, schedules and timelines."""
