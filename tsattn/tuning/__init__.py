"""Launch configurations of the kernels: candidates as data, one default per shape."""
