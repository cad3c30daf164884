"""The launcher of Kubernetes: has the user's own `helm` install the chart of this package, and watches by `kubectl`."""
