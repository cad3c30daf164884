"""Weight manifests, buckets, digests and broadcast groups."""
