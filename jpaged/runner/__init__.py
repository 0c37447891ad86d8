"""The device side of a step: batch descriptors, buckets, the KV pool, sampling, the jitted step."""
