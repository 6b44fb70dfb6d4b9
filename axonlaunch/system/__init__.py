"""Access to the operating system: processes, caches, disks, and formatting of values."""
