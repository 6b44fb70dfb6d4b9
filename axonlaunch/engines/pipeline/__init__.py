"""Pipeline parallelism: splitting, schedules, timelines."""
