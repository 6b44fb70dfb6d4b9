"""Context parallelism: sequences sharded among ranks."""
