"""What a run was, from what its folder holds: read, laid beside others, shown on a page.

It reads run folders and nothing else; nothing here trains, estimates or changes a run.
"""
