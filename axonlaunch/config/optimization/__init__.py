"""Configuration of optimizers, schedules and parameter groups, and the states optimizers keep."""
