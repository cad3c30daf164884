"""Makes rollouts: prompts become groups of scored samples, and groups become the batch of a step."""
