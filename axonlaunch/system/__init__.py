"""The operating system's side: processes, caches, disks, formatting."""
