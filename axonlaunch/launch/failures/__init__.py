"""Why a run failed: the root cause among what ranks report, hangs, and hints."""
